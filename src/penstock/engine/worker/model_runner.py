"""The model runner, a worker's real device: runs the model on this rank over its KV cache, and samples on rank 0.

`input_batch` builds the input of a step, `model` computes logits, and `sampler` samples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import penstock
from penstock._native import memory_available
from penstock.engine.cluster.kept_memory import MemoryFile
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.model_fingerprint import ModelFiles
from penstock.engine.cluster.node_weights import WeightFile
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import NOTHING, Index
from penstock.engine.protocol.lora import Adapter
from penstock.engine.protocol.messages import AdapterChange, AdapterState, FinishReason, Step
from penstock.engine.worker import model_loader, rope
from penstock.engine.worker.cpu_kernels import keep_freed_memory, kernel_threads, set_threads
from penstock.engine.worker.cpu_threads import (
    SHORT,
    TRIED,
    TUNE_AFTER_S,
    CpuThreads,
    ThreadMemory,
    TunedThreads,
    share,
    tune_threads,
)
from penstock.engine.worker.device import EncodingCounts, PendingStep, SamplerOutput
from penstock.engine.worker.encoding_exchange import EncoderOptions
from penstock.engine.worker.grammars import Grammars, TokenMasks
from penstock.engine.worker.image_encoder import Open, device_inputs
from penstock.engine.worker.input_batch import InputBatch, TokenTable, build_batch, trial_batch
from penstock.engine.worker.kv_pages import KVPages
from penstock.engine.worker.lora import AdapterRun, adapter_runs
from penstock.engine.worker.paged_attention import KVCache, PagedAttention
from penstock.engine.worker.pooler import Pooler
from penstock.engine.worker.prompt_logprobs import PendingPromptLogprobs, PromptScorer
from penstock.engine.worker.sampler import Sampler
from penstock.engine.worker.shared_weights import SharedWeights
from penstock.engine.worker.tensor_parallel import TPGroup
from penstock.engine.worker.vision_encoder import EncoderCache
from penstock.tensor import Handle, Store

if TYPE_CHECKING:  # these import Triton
    from penstock.engine.worker.cuda.step_graphs import GraphRecorder
    from penstock.engine.worker.cuda.step_room import MemoryNeeds
    from penstock.engine.worker.cuda.step_sampler import StepLogits
    from penstock.engine.worker.cuda.steps import CudaSteps

FULL_STEP_TOKENS = 512  # of a CPU: linear layers of 64 rows reach 98 % of the rate of 259, with AVX-512 and bfloat16
CPU_SHARE = 0.3  # of the memory that is available
KEPT_NBYTES = 256 << 20  # of a CUDA device, for what graphs have beside their memory


class ModelRunner:
    """Launches steps, one after the other. All ranks of a model launch the same steps."""

    def __init__(
        self,
        path: str | Path,
        *,
        slots: int,
        ranks: TPGroup | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        block_size: int = 16,
        blocks: int | None = None,
        max_blocks: int | None = None,
        max_blocks_per_request: int | None = None,
        token_budget: int = 2048,
        memory_utilization: float = 0.9,
        open_handle: Open | None = None,
        threads: int | None = None,
        processes: int = 1,
        end_ids: Collection[int] = (),
        recorder: GraphRecorder | None = None,
        encoder: EncoderOptions | None = None,
        takes_embeds: bool = False,
        kv_file: MemoryFile | None = None,
        adapters: Sequence[Adapter] | None = None,
        weight_file: WeightFile | None = None,
        pooler: Pooler | None = None,
        store: Store | None = None,
        receives_tensors: bool = False,
    ) -> None:
        """Loads the model. `blocks`: of the KV cache; None: as many as all ranks have room for, at most
        `max_blocks`. `threads`: of a CPU; None: the fastest number, up to the share of one of so many
        `processes`. `open_handle`: opens images; None: only inline images can be opened. `recorder`: records steps
        of a CUDA device as graphs; None: they run without. `encoder`: see `encoding_exchange`. `takes_embeds`:
        prompts may be embeddings. `kv_file`, `weight_file`: of the launcher, for keys and values and for weights that
        outlive this process. `adapters`: requests may have one of them; None: LoRA is not enabled. `pooler`: makes
        vectors of prompts, in place of the sampler, on a CPU. `store`: of images, from which a CUDA device copies.
        `receives_tensors`: of devices.

        Raises ValueError if the model is not supported, or there is no room for one block, and RuntimeError if its
        files change meanwhile.
        """
        self._ranks = ranks or TPGroup()
        max_threads = self._ranks.least(threads or share(processes))  # all ranks take part in measurements, or none
        set_threads(max_threads)
        where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._device = where
        if where.type == "cpu":
            keep_freed_memory()
        files = ModelFiles(Path(path))
        self._pooler = pooler
        has_head = pooler is None or pooler.needs_logits
        parts = files.fingerprint.digest, files.weights_identity, dtype, self._ranks.rank, self._ranks.size, has_head
        shared = SharedWeights.open(weight_file, *parts, check=files.require_unchanged)
        longest, needs = 1, None  # blocks of a request
        if where.type == "cuda":
            from penstock.engine.worker.cuda.step_room import MemoryNeeds
            from penstock.engine.worker.cuda.steps import StepSizes

            longest = max_blocks_per_request or 1
            state = partial(StepSizes(slots, max_blocks_per_request or 0, token_budget, 1).nbytes, block_size)
            request_tokens = longest * block_size if blocks is None else 0
            needs = MemoryNeeds(memory_utilization, token_budget, slots, request_tokens, KEPT_NBYTES, state)
        require_room = None if needs is None else needs.require
        self._model = model_loader.load(
            Path(path), self._ranks, where, dtype, adapters, shared, has_head=has_head, require_room=require_room
        )
        files.require_unchanged()
        self.model = files.fingerprint.word
        self.vocabulary: int = self._model.vocab_size
        self.max_short_prompt = self._model.max_short_prompt
        self.full_step_tokens = FULL_STEP_TOKENS if where.type == "cpu" else None
        self._prompt_lengths = np.zeros(slots, np.intp)
        self._adapters = np.zeros(slots, np.intp)  # number of each slot's adapter; 0: none
        self.tune_after: float | None = None
        self.block_size = block_size
        self._max_threads = max_threads
        self._threads = CpuThreads(max_threads, max_threads)
        key = files.fingerprint.digest.hex(), self._model.dtype, self._ranks.size, max_threads
        self._thread_memory = ThreadMemory(penstock.__version__, *key)
        if not threads and where.type == "cpu" and max_threads > 1:
            self._recall_threads()
        # Only rank 0 samples: logits of ranks that add up in another order may differ in the last bit.
        samples = self._ranks.rank == 0 and pooler is None
        self._sampler = Sampler(slots, self._model.vocab_size, end_ids, where) if samples else None
        self._prompts = PromptScorer(self._model)
        self._grammars = Grammars(Path(path), self.vocabulary, end_ids, open_handle or Handle.open)
        self.grammars = self._grammars.counts
        self._masks: Future[TokenMasks] | None = None  # of the step that is launched
        if kv_file is not None and not self._model.sums_attention:
            event("kv cache is not kept", WARNING, reason="a rank may end a step before all ranks have attended")
            kv_file = None
        pages = KVPages(kv_file, *parts, self._model.dtype, self._model.shapes, block_size)
        if blocks is None:  # memory is measured by the first life: pages that are kept count as used
            blocks = self._ranks.least(pages.num_blocks) or None
        if blocks is None:
            pages.discard()
            self._ranks.least(0)  # no rank measures before all ranks have given their pages back
            has_images = takes_embeds or self._model.image_id is not None
            reserved = KEPT_NBYTES + ((encoder or EncoderOptions()).cache_nbytes if has_images else 0)
            room = self._room(longest, reserved, needs)
            blocks = room if max_blocks is None else min(room, max_blocks)
        self.blocks = blocks
        self._memory = self._model.memory(self.blocks, block_size, pages)
        self.dtype, self.kv_epoch = str(self._model.dtype).removeprefix("torch."), pages.epoch
        self._tokens = TokenTable(
            slots if where.type == "cpu" else 0, where
        )  # `DeviceState` has those of other devices
        self._images: EncoderCache | None = None
        if takes_embeds or self._model.image_id is not None:
            options = (encoder or EncoderOptions())._replace(salt=files.fingerprint.digest)
            opener = open_handle or Handle.open
            inputs = device_inputs(where, store, opener, receives_tensors=receives_tensors)
            self._images = EncoderCache(self._model, opener, slots, options, inputs)
        self.encodings = EncodingCounts() if self._images is None else self._images.exchange.counts
        self._cuda: CudaSteps | None = None
        self._num_failed = 0  # steps in a row, as memory was short
        if where.type == "cuda":
            from penstock.engine.worker.cuda.steps import CudaSteps, StepSizes

            axes = 1 if self._images is None else self._images.num_position_axes
            per_request = min(self.blocks, max_blocks_per_request or self.blocks)
            sizes = StepSizes(slots, per_request, token_budget, axes)
            self._cuda = CudaSteps(self._model, self._memory, recorder, sizes, self._sampler)

    @property
    def adapters(self) -> tuple[AdapterState, ...]:
        loaded = self._model.adapters
        return (
            () if loaded is None else tuple(AdapterState(each, loaded.errors.get(each, "")) for each in loaded.digests)
        )

    @torch.inference_mode()
    def change_adapter(self, change: AdapterChange) -> str:
        if self._model.adapters is None:
            return "LoRA is not enabled: --enable-lora"
        if change.is_loaded:
            return self._model.adapters.load(Adapter(change.name, change.path, change.digest))
        self._model.adapters.unload(change.digest)
        return ""

    @torch.inference_mode()  # all of it: a tensor that is created or grown here may be written nowhere else
    def launch(self, batch: BatchState, step: Step) -> PendingStep:
        """Launches a step that `batch` has just applied. Steps run in the order in which they are launched."""
        if self._cuda is not None:
            return self._launch_on_cuda(batch, step, self._cuda)
        self._follow(batch, step)
        if not batch.counts[batch.rows].any():  # no row, or all of them wait
            return SamplerOutput(NOTHING)
        input_batch = self._build_batch(batch)
        has_products = not self._model.is_packed or bool(input_batch.chunks)  # of torch: in attention, or of images
        use_threads(self._threads, input_batch.slots.size, has_products=has_products)
        try:
            likeliest = self._prompts.likeliest(input_batch, batch) if self._prompts.slots else None
            hidden, failed = self._compute(input_batch, input_batch.last if likeliest is None else None)
            prompts = () if likeliest is None else self._score(input_batch, batch, hidden)
            logits = self._model.logits(hidden[torch.from_numpy(input_batch.last)]) if input_batch.last.size else None
            if logits is not None and self._pooler is not None:
                vectors = self._pooler.vectors(logits) if self._ranks.rank == 0 else None
                return self._pooler.step(vectors, batch.sampled, failed)
        finally:
            set_threads(kernel_threads())  # torch's, too: to sort the logits of random samples
        if logits is None:
            return SamplerOutput(NOTHING, None, failed, tuple(part.result() for part in prompts))
        return self._sample(logits, batch, failed, prompts)

    def _sample(
        self,
        logits: Tensor,
        batch: BatchState,
        failed: dict[int, FinishReason],
        prompts: tuple[PendingPromptLogprobs, ...],
    ) -> SamplerOutput:
        """Samples the rows of a step, on rank 0, and sends the ids to the other ranks."""
        slots, masks = batch.sampled, self._take_masks()
        chosen = self._sampler.sample(logits, slots, masks) if self._sampler is not None else None
        ids = torch.empty(slots.size, dtype=torch.int32) if chosen is None else chosen.ids
        if self._ranks.size > 1:
            self._ranks.broadcast(ids)
        self._tokens.write(slots, batch.computed[slots], ids)
        if masks is not None:
            failed = {**failed, **masks.failed}
            self._grammars.sampled(ids.numpy)
        logprobs = None
        if chosen is not None:
            failed = {**chosen.failed(slots), **failed}
            logprobs = chosen.logprobs()
        return SamplerOutput(ids.numpy(), logprobs, failed, tuple(part.result() for part in prompts))

    def _launch_on_cuda(self, batch: BatchState, step: Step, cuda: CudaSteps) -> PendingStep:
        try:
            self._follow(batch, step)
            pending = self._compute_on_cuda(batch, cuda)
        except RuntimeError as error:
            from penstock.engine.worker.cuda.step_room import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            # The step after a failed one is on its way, and has the failed requests. A rank that fails within a step
            # leaves other ranks waiting, unless all ranks have agreed to fail.
            if self._num_failed > 1 or (self._ranks.size > 1 and not cuda.is_agreed(error)):
                raise MemoryError(f"{error}; lower --gpu-memory-utilization or --max-num-batched-tokens") from error
            why = str(error).partition("\n")[0]
        else:
            self._num_failed = 0
            return pending
        return self._fail_step(batch, step, cuda, why)  # here: the error would hold the tensors of the step

    def _fail_step(self, batch: BatchState, step: Step, cuda: CudaSteps, why: str) -> PendingStep:
        """Fails the requests of a step that lacked memory, and frees what can be computed again."""
        self._num_failed += 1
        cuda.state.forget()
        if self._images is not None:
            self._images.forget_encodings()
        torch.cuda.empty_cache()
        rows = batch.rows[batch.counts[batch.rows] > 0]
        if step.joined is not None:  # parameters of joined slots may be lost
            rows = np.union1d(rows, step.joined.slots)
        event("out of memory", WARNING, requests=rows.size, why=why)
        ids = np.zeros(batch.sampled.size, np.int32)
        return SamplerOutput(ids, failed=dict.fromkeys(rows.tolist(), FinishReason.ERROR))

    def _compute_on_cuda(self, batch: BatchState, cuda: CudaSteps) -> PendingStep:
        if not batch.counts[batch.rows].any():  # no row, or all of them wait
            return SamplerOutput(NOTHING)
        result, failed, prompts = self._sample_on_cuda(batch, cuda)
        release = (lambda: None) if self._images is None else self._images.release_copied
        masks = self._take_masks()
        pending = cuda.sampler.finish(result, batch, failed, masks, prompts, release)
        if masks is not None:
            self._grammars.sampled(pending.ids)
        return pending

    def _take_masks(self) -> TokenMasks | None:
        """Returns the masks of the step that is launched, and waits for them."""
        masks, self._masks = None if self._masks is None else self._masks.result(), None
        return masks

    def _sample_on_cuda(
        self, batch: BatchState, cuda: CudaSteps
    ) -> tuple[StepLogits, dict[int, FinishReason], tuple[PendingPromptLogprobs, ...]]:
        """Returns the logits of a step, the slots that fail, with the reasons, and log-probabilities of prompts."""
        images = self._images
        has_adapters = bool(batch.adapters) and bool(self._adapters[batch.rows].any())
        if not has_adapters and cuda.is_decoding(batch):
            if images is None or images.is_text(batch.sampled, batch.computed[batch.sampled] - 1):
                if images is not None:
                    images.begin_step()
                return cuda.decode(batch), {}, ()
        input_batch = self._build_batch(batch)
        tokens = input_batch.slots.size
        likeliest = self._prompts.likeliest(input_batch, batch) if self._prompts.slots else None
        is_text = images is None or images.is_text(input_batch.slots, input_batch.positions)
        is_recorded = is_text and likeliest is None and not has_adapters and cuda.is_recorded(input_batch)
        needs: dict[str, Any] = {"has_embeds": not is_text, "likeliest": likeliest}
        cuda.require_room(tokens, is_recorded=is_recorded, **needs)
        step = cuda.input_of(batch, input_batch, self._positions(input_batch))
        if is_recorded:
            if images is not None:
                images.begin_step()
            return cuda.replay(step), {}, ()
        tensors, embeds = cuda.tensors(step), None
        failed: dict[int, FinishReason] = {}
        if images is not None:
            embeds, failed = images.embeds(input_batch, tensors.ids)
            if not is_text:
                cuda.require_room(tokens, **needs)  # encodings have taken memory
        result, hidden = cuda.compute(tensors, embeds, self._runs(input_batch))
        return result, failed, () if likeliest is None else self._score(input_batch, batch, hidden)

    def _score(self, input_batch: InputBatch, batch: BatchState, hidden: Tensor) -> tuple[PendingPromptLogprobs, ...]:
        return self._prompts.score(input_batch, batch, hidden, is_used=self._sampler is not None)

    def _follow(self, batch: BatchState, step: Step) -> None:
        """Applies leaves and joins to what is kept by slot."""
        if self._cuda is not None:
            self._cuda.follow(step)
        if step.left is not None:
            if self._prompts.slots:
                self._prompts.leave(step.left.tolist())
            for slot in step.left.tolist():
                if self._sampler is not None:
                    self._sampler.leave(slot)
                if self._images is not None and slot in self._images.by_slot:
                    self._images.leave(slot)
        if self._sampler is not None:  # before joins, which may lack memory: grammars follow failed steps, too
            has_grammars = self._grammars.states or (step.joined is not None and step.joined.grammars)
            self._masks = self._grammars.launch(batch, step) if has_grammars else None
        if step.joined is not None:
            for slot in step.joined.slots.tolist():
                self._join(slot, batch)

    def _join(self, slot: int, batch: BatchState) -> None:
        prompt, generated = batch.prompts[slot], batch.generated[slot]
        params = batch.params[slot]
        # A resumed sample that has generated ids has delivered the log-probabilities of its prompt.
        if params is not None and params.prompt_logprobs is not None and not generated.size:
            self._prompts.join(slot, params.prompt_logprobs)
        text = prompt
        if self._images is not None and batch.inputs[slot]:
            self._images.join(slot, prompt, batch.inputs[slot])
            text = self._images.ids_of_text(slot, prompt)
        self._prompt_lengths[slot] = prompt.size
        if self._model.adapters is not None:
            self._adapters[slot] = self._model.adapters.number_of(batch.adapters.get(slot))
        if self._cuda is not None:
            rope_offsets = NOTHING if self._images is None else self._images.offsets(slot)
            self._cuda.join(slot, batch, text, rope_offsets)
            return
        if self._sampler is not None and params is not None:
            seed, sample = int(batch.seeds[slot]), int(batch.samples[slot])
            self._sampler.join(slot, params, text, seed=seed, sample=sample, generated=generated)
        self._tokens.join(slot, np.concatenate((prompt, generated)))

    def _positions(self, input_batch: InputBatch) -> Index:
        """Returns the positions of the step's tokens, as the rotary embedding takes them."""
        positions: Index = input_batch.positions
        if self._images is not None and self._images.by_slot:
            positions = self._images.positions(input_batch)
        elif self._images is not None and self._images.num_position_axes > 1:  # alike for text
            positions = np.tile(positions, (self._images.num_position_axes, 1))
        if self.max_short_prompt is None:
            return positions
        return rope.mark_long(positions, input_batch, self._prompt_lengths[input_batch.rows], self.max_short_prompt)

    def _build_batch(self, batch: BatchState) -> InputBatch:
        return build_batch(batch, self._adapters if batch.adapters else None)

    def _runs(self, input_batch: InputBatch) -> list[AdapterRun]:
        return [] if self._model.adapters is None else adapter_runs(self._adapters[input_batch.slots])

    def _compute(self, input_batch: InputBatch, read: Index | None) -> tuple[Tensor, dict[int, FinishReason]]:
        """Returns the hidden states of tokens, and slots that fail, with reasons. `read`: see `LoadedModel.hidden`."""
        where = torch.from_numpy(np.stack((input_batch.slots, input_batch.positions)))
        ids = self._tokens.read(where[0], where[1]).to(torch.int64)
        positions, embeds = torch.from_numpy(self._positions(input_batch)), None
        failed: dict[int, FinishReason] = {}
        if self._images is not None and self._images.by_slot:
            embeds, failed = self._images.embeds(input_batch, ids)
        paged = PagedAttention(self._memory, input_batch, self._device)
        return self._model.hidden(paged, ids, positions, embeds, self._runs(input_batch), read), failed

    def _room(self, longest: int, reserved: int, needs: MemoryNeeds | None) -> int:
        """Returns the number of blocks that fit into memory, on the rank with the least memory. `reserved`: bytes of a
        CUDA device that are allocated later, and stay. Raises ValueError for fewer than `longest`."""
        if needs is not None:
            free, hint = needs.free_nbytes(self._model, reserved)
        else:
            free, hint = CPU_SHARE * memory_available()[0] / self._ranks.size, ""
        each = KVCache.nbytes_of_block(self._model.shapes, self.block_size, self._model.dtype)
        blocks = self._ranks.least(int(free // each))
        if blocks < longest:
            raise ValueError(
                f"no room for keys and values of one request: {max(0, free) / 2**20:.1f} MiB left, and {longest} "
                f"blocks of {each} bytes are needed{hint}"
            )
        return blocks

    def _recall_threads(self) -> None:
        remembered = self._thread_memory.read(self._max_threads) or TunedThreads(CpuThreads(0, 0), True)
        *threads, is_certain = self._ranks.least_of_each([*remembered.threads, int(remembered.is_certain)])
        if threads[0]:  # all ranks remember
            self._use_tuned(TunedThreads(CpuThreads(*threads), bool(is_certain)))
        else:
            self.tune()

    @torch.inference_mode()  # as in `launch`
    def tune(self) -> None:
        """Measures the numbers of threads. A disturbed measurement is repeated by the worker after `tune_after`."""
        memory = self._model.memory(max(TRIED[0], -(-TRIED[1] // self.block_size)), self.block_size)

        def compute(tokens: int) -> None:
            tried = CpuThreads(kernel_threads(), kernel_threads())
            input_batch = trial_batch(tokens, self.block_size, is_chunk=tokens > SHORT)
            use_threads(tried, tokens, has_products=not self._model.is_packed or bool(input_batch.chunks))
            zeros = torch.zeros(tokens, dtype=torch.int64)
            hidden = self._model.hidden(PagedAttention(memory, input_batch, self._device), zeros, zeros)
            self._model.logits(hidden[torch.from_numpy(input_batch.last)])

        tuned = tune_threads(self._max_threads, compute, self._ranks)
        self._thread_memory.write(tuned)
        self._use_tuned(tuned)

    def _use_tuned(self, tuned: TunedThreads) -> None:
        self._threads = tuned.threads
        if tuned.is_certain:
            self.tune_after = None
        elif self._ranks.size == 1:  # several ranks would have to begin together
            self.tune_after = TUNE_AFTER_S if self.tune_after is None else 2 * self.tune_after


def use_threads(threads: CpuThreads, tokens: int, *, has_products: bool = True) -> None:
    """Sets the numbers of threads for a step of so many tokens. `has_products`: torch computes some of the products.

    What is left to torch in a short step takes microseconds, but milliseconds when torch wakes a thread of its own
    beside one of the kernels.
    """
    is_short = tokens <= SHORT
    count = threads.short if is_short else threads.long
    set_threads(count, 1 if is_short and not has_products else count)
