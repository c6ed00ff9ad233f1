"""
The engine's native code: KV-cache blocks and their prefix hashes, layers of a model on CPUs, the pixels of videos, chunks of streamed answers, records of fatal signals.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy
import numpy.typing
from numpy.typing import NDArray


def hash_blocks(root: bytes, token_ids: numpy.typing.NDArray[numpy.int32], block_size: int, extra: Sequence[bytes] = ()) -> bytes:
    """
    Returns `root` and the hash of each full block of these ids, 32 bytes each: SHA-256 of the parent's hash, the ids, and the block's `extra` keys.
    """

def count_tokens(counts: numpy.typing.NDArray[numpy.int32], limits: numpy.typing.NDArray[numpy.int32], stop_bits: numpy.typing.NDArray[numpy.uint8], slots: numpy.typing.NDArray[numpy.int64], token_ids: numpy.typing.NDArray[numpy.int32]) -> numpy.typing.NDArray[numpy.int64] | None:
    """
    Adds 1 to the count of each slot. Returns the rows of slots that have reached their limit, and of token ids that may be stop tokens: the bit that an id's low bits name is set. None: no row.
    """

def ledger_nbytes(num_blocks: int, num_slots: int = 0, block_size: int = 0) -> int:
    """Returns the size of the ledger of a cache."""

class BlockCache:
    """
    The blocks of the KV cache by number. A block is in use, or cached (no references, and found by its hash), or empty. Every operation takes constant time per block.
    """

    def __init__(self, num_blocks: int, ledger: numpy.typing.NDArray[numpy.uint8] | None = None, num_slots: int = 0, block_size: int = 0) -> None:
        """
        `ledger`: of `ledger_nbytes()`, which outlive the core. The cache begins with the blocks that are valid there, and keeps the ledger up to date. `num_slots`: for unfinished blocks; 0: they are not in the ledger.
        """

    @property
    def num_adopted(self) -> int:
        """Blocks that the cache has begun with."""

    @property
    def damage(self) -> str:
        """Why the ledger was cleared; empty: it was not."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int:
        """Cached and empty blocks: as many can be taken."""

    def ref_count(self, block: int) -> int: ...

    def match(self, hashes: bytes) -> numpy.typing.NDArray[numpy.int32]:
        """
        Returns the blocks with these hashes, up to the first hash that no block has, and adds a reference to each.
        """

    def take(self, count: int) -> numpy.typing.NDArray[numpy.int32] | None:
        """
        Takes `count` blocks with one reference each: empty blocks first, then the least recently used cached blocks, which lose their hash. None, and nothing is taken, if fewer are free.
        """

    def release(self, blocks: numpy.typing.NDArray[numpy.int32]) -> None:
        """
        Removes a reference from each, the last first: so the end of a prefix is evicted before its beginning, without which it cannot be found.
        """

    def publish(self, block: int, hash: bytes) -> None:
        """
        Makes a block in use findable by its hash, unless another block has that hash already.
        """

    def take_tail(self, parent: bytes, ids: numpy.typing.NDArray[numpy.int32]) -> tuple[int, int] | None:
        """
        Takes the unfinished block of a former life that follows the block of the hash `parent` and begins with the most of these ids. Returns the block and their number; None: there is no block.
        """

    def check(self) -> None:
        """For tests: raises AssertionError where an invariant is broken."""

class PrefixHasher:
    """
    Hashes the blocks of each slot's sequence as they fill, and publishes them in the cache once they are computed.
    """

    def __init__(self, cache: BlockCache, num_slots: int, block_size: int) -> None: ...

    def add_sequence(self, slot: int, chain: bytes, tail: numpy.typing.NDArray[numpy.int32], extra: bytes = b'') -> None:
        """
        Puts a new sequence into the slot: the `chain` of its prompt by hash_blocks(), the `tail` of ids after its full blocks, and the `extra` keys of the block that the tail begins.
        """

    def allocate(self, slot: int, num_cached: int) -> None:
        """
        The sequence has been given blocks, also after a preemption; the first `num_cached` are published already.
        """

    def schedule(self, slot: int, step: int) -> None:
        """Sets the step that first uses the blocks given by allocate()."""

    def finish(self, slot: int) -> None:
        """Ends the sequence: tokens that still arrive for it are ignored."""

    def first_step(self, slot: int) -> int:
        """
        Returns the sequence's first step; 2^63 - 1 before it is scheduled and after its end.
        """

    def num_tokens(self, slot: int) -> int:
        """
        Returns how many tokens of the sequence are known, the prompt's included.
        """

    def hashes(self, slot: int) -> bytes:
        """Returns the hashes of its full blocks."""

    def publish(self, step: int, num_computed: numpy.typing.NDArray[numpy.int32], status: numpy.typing.NDArray[numpy.uint8], running: int, block_tables: numpy.typing.NDArray[numpy.int32]) -> None:
        """
        The step is done, and with it `num_computed` tokens of each slot: publishes the blocks that are full by it. Skips slots with a `status` other than `running`, and those that got their blocks after that step.
        """

    def append(self, step: int, slots: numpy.typing.NDArray[numpy.int64], token_ids: numpy.typing.NDArray[numpy.int32]) -> numpy.typing.NDArray[numpy.int64] | None:
        """
        Appends the id that the step sampled for each slot. Returns the rows of sequences that have not finished before; None: all of them.
        """

    def filled(self) -> list[tuple[int, int]]:
        """
        Returns (slot, tokens in its full blocks) of each sequence that has filled a block since the last call.
        """

class TokenCounters:
    """Counters of an engine's tokens, in the row of a server process."""

    def __init__(self, words: Any, tokens: int, histogram: int, bounds: Sequence[float]) -> None:
        """
        `words`: of 64 bits, which stay in memory. `tokens`, `histogram`: indices of words. The histogram has the seconds from one token to the next, with a sum in nanoseconds.
        """

class ChunkSender:
    """
    The streams of a server process that are written to sockets without the interpreter.
    """

    def __init__(self) -> None: ...

    def add(self, request: int, fd: int, is_chunked: bool, keeps_ids: bool, counters: TokenCounters, last: float) -> None:
        """
        Adds a stream of a connection without unsent bytes. `is_chunked`: text is framed as a chunk of HTTP/1.1. `last`: when its last token was passed on, in seconds of `time.monotonic`.
        """

    def take(self, request: int) -> tuple[list[int], int, float] | None:
        """
        Returns the ids and the number of tokens since the last call, and when the last token was passed on. None: the stream was not added.
        """

    def remove(self, request: int) -> None: ...

    def __len__(self) -> int: ...

    def send(self, rows: int, numbers: numpy.typing.NDArray[numpy.int32], text: bytes, counts: numpy.typing.NDArray[numpy.uint16] | None = None, samples: numpy.typing.NDArray[numpy.uint16] | None = None, finished: numpy.typing.NDArray[numpy.uint16] | None = None) -> tuple[list[tuple[int, int, int, int, int, int, int]], list[tuple[int, int, int, int]]]:
        """
        Sends the rows of a Delta that are of added streams, but for the last row of a stream. Returns the other rows: row, request, sample, begin and length of the text, index of the first id, and number of ids; and rests, which sockets did not take: request, begin and length of the text, and sent bytes of its frame. A stream with a rest is removed before it is added again.
        """

def record_fatal_signals(words: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')], index: int) -> None:
    """
    Stores the number, the code and the sender of the first signal that ends this process in a word of shared memory: number | code << 8 | sender << 32. The array is kept until the process ends.
    """

LARGE_PAGE_NBYTES: int = 2097152

def map_file(fd: int, nbytes: int, is_writable: bool) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Maps a file for all processes at a multiple of 2 MiB. NumPy writes to each array: without `is_writable`, a write is a SIGSEGV. Raises OSError.
    """

def claim_large_pages(mapping: numpy.typing.NDArray[numpy.uint8]) -> bool:
    """
    Writes a zero to each page of 2 MiB of a mapping, and asks the kernel for large ones. False: for some of the mapping there are none.
    """

def protect(mapping: numpy.typing.NDArray[numpy.uint8]) -> None:
    """Makes a mapping read-only. Raises OSError."""

def paged_attention(queries: numpy.typing.NDArray[Any], keys: numpy.typing.NDArray[Any], values: numpy.typing.NDArray[Any], out: numpy.typing.NDArray[Any], block_tables: numpy.typing.NDArray[numpy.int32], first_positions: numpy.typing.NDArray[numpy.int64], seq_lens: numpy.typing.NDArray[numpy.int64], block_size: int, scale: float, softcap: float = 0.0, sinks: numpy.typing.NDArray[numpy.float32] | None = None, threads: int = 1) -> None:
    """
    Writes to `out` [sequences, heads, value size] the attention of one query per sequence: `queries` [sequences, heads, key size] attend to `keys` and `values` [positions, KV heads, size] in the blocks of `block_tables` [sequences, width], from `first_positions` up to `seq_lens`. Arrays are of float32, or of uint16 with the bits of bfloat16. `softcap` bounds scores by tanh; `sinks` has a score without a value for each head. Raises ValueError for shapes that do not fit and for blocks that are not there.
    """

def prefill_attention(queries: numpy.typing.NDArray[numpy.uint16], keys: numpy.typing.NDArray[numpy.uint16], values: numpy.typing.NDArray[numpy.uint16], out: numpy.typing.NDArray[numpy.uint16], blocks: numpy.typing.NDArray[numpy.int32], seq_len: int, block_size: int, scale: float, window: int = 0, softcap: float = 0.0, sinks: numpy.typing.NDArray[numpy.float32] | None = None, threads: int = 1) -> None:
    """
    Writes to `out` [tokens, heads, value size] the attention of the last tokens of one sequence: `queries` [tokens, heads, key size] attend to `keys` and `values` [positions, KV heads, size] in `blocks`, each up to its own position. Arrays have the bits of bfloat16. `window`: a token attends to so many positions; 0: to all. `softcap` and `sinks`: as in `paged_attention`. Raises ValueError for shapes that do not fit and for blocks that are not there.
    """

class PackedLinear:
    """
    y = x W^T + b in bfloat16 or float32, with W packed into panels of 16 outputs. Sums are float32.
    """

    def __init__(self, inputs: int, outputs: int, buffer: numpy.typing.NDArray[numpy.uint16], bias: numpy.typing.NDArray[numpy.float32] | None = None, is_gated: bool = False, is_float32: bool = False, is_gelu: bool = False) -> None:
        """
        Packs into `buffer`, of at least `packed_size` elements at a multiple of 64 bytes, and keeps it alive. `is_gated`: W has panels of a gate and of an up projection in turn, and y = silu(gate) * up; with `is_gelu`, y = gelu(gate) * up, by tanh.
        """

    def pack(self, rows: numpy.typing.NDArray[numpy.uint16], first_panel: int = 0, step: int = 1, threads: int = 1) -> None:
        """
        Packs rows of W, the bits of its elements, into the panels `first_panel`, `first_panel + step`, …
        """

    def compute(self, x_address: int, x_stride: int, rows: int, out_address: int, out_stride: int, threads: int, added_address: int = 0, added_stride: int = 0) -> None:
        """
        Computes rows of y. The caller checks that `x_address` has `rows` rows of `inputs` elements, and `out_address` room for as many of `results`; strides are in elements. `added_address`: as many rows of `outputs` elements, which are added to x W^T, before the gate; 0: none are.
        """

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def results(self) -> int: ...

def packed_size(inputs: int, outputs: int, is_float32: bool = False) -> int:
    """Elements of 2 bytes of a buffer for these packed weights."""

def forget_pages(address: int, nbytes: int) -> None:
    """
    Unmaps the whole pages of a tensor that nothing reads any more: of a file, they are read again if need be; anonymous ones lose their contents.
    """

def linear_kernel() -> str:
    """Name of the kernel in use."""

def linear_kernels() -> list[str]:
    """Names of the kernels that this processor can run, the fastest first."""

def choose_linear_kernel(name: str) -> None:
    """Chooses the kernel of this process. Raises ValueError."""

class RankMemory:
    """
    Adds up numbers of all ranks of a model, in memory that the ranks share.
    """

    def __init__(self, memory: numpy.typing.NDArray[numpy.uint8], rank: int, ranks: int, pidfds: Sequence[int]) -> None:
        """
        `memory`: of `rank_memory_nbytes` zeros, which all ranks map. `pidfds`: of the processes of all ranks, by rank; empty: no rank ends before this one.
        """

    def sum(self, address: int, count: int, is_bfloat16: bool) -> None:
        """
        Adds up numbers of all ranks, in place. Blocks until all ranks have called. Raises RuntimeError if a rank ends. The caller checks the address.
        """

    def gather(self, address: int, rows: int, nbytes: int, out_address: int) -> None:
        """
        Copies rows of bytes of all ranks to [rows, ranks, nbytes] at `out_address`. Blocks and raises as `sum`.
        """

def rank_memory_nbytes(ranks: int) -> int:
    """Bytes of the memory of so many ranks."""

class DecoderLayer:
    """
    A layer in bfloat16 or float32: attention and a gated MLP, a norm before each, and residuals.
    """

    def __init__(self, cache: int, norms: Sequence[tuple[int, float, bool]], linears: tuple[PackedLinear, PackedLinear, PackedLinear | None, PackedLinear | None], heads: Sequence[int], scale: float, window: int = 0, softcap: float = 0.0, sinks: numpy.typing.NDArray[numpy.float32] | None = None) -> None:
        """
        `cache`: index of the layer's keys and values. `norms`: address of the weights or 0, epsilon, whether the factor is 1 + w; before attention, of its result, before the MLP, of its result, of queries, of keys. `linears`: queries, keys and values; output; gate and up; down; None twice: the layer ends before its MLP. `heads`: numbers of heads and of KV heads, sizes of a key and of a value. The rest is as in `prefill_attention`. The caller checks the addresses.
        """

    def set_adapter(self, adapter: int, product: int, a: PackedLinear, b: PackedLinear) -> None:
        """
        Adds x A^T B^T to a product for tokens with an adapter. `product`: index in `linears`.
        """

    def remove_adapter(self, adapter: int) -> None:
        """
        Forgets A and B of an adapter. No step with tokens of the adapter may run.
        """

    @property
    def size(self) -> int:
        """Elements of a hidden state."""

class AttentionStep:
    """
    The tokens of a step, and where in the KV cache their keys and values lie.
    """

    def __init__(self, caches: numpy.typing.NDArray[numpy.int64], num_blocks: int, block_size: int, places: numpy.typing.NDArray[numpy.int64], block_tables: numpy.typing.NDArray[numpy.int32], seq_lens: numpy.typing.NDArray[numpy.int64], chunks: Sequence[tuple[int, int, int, numpy.typing.NDArray[numpy.int32]]], is_float32: bool = False) -> None:
        """
        `caches` [layers, 2]: addresses of all keys and of all values. `places`: of each token. The first tokens are of sequences with one token each, of `block_tables` and `seq_lens`. `chunks`: first token, number of tokens, length and blocks of each other sequence, in bfloat16 only. Raises ValueError for places and blocks that are not there.
        """

    def set_runs(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """
        Sets the tokens that have an adapter: number of the adapter, first token and token behind the last, in the order of the tokens.
        """

    def set_read(self, tokens: numpy.typing.NDArray[numpy.int64]) -> None:
        """
        Sets the tokens with hidden states that are read: rows of one token, and last tokens of chunks. Those of other tokens of chunks may be anything after several layers. Raises ValueError.
        """

def compute_layers(layers: Sequence[DecoderLayer], step: AttentionStep, x: tuple[int, int], cos_sins: Sequence[tuple[int, int]], final_norm: tuple[int, float, bool], out_address: int, threads: int, ranks: RankMemory | None = None, normed_address: int = 0) -> None:
    """
    Computes hidden states [tokens, size] of the layers' dtype. `x`: address and stride between tokens in elements. `cos_sins`: of each layer, addresses of [tokens, size of a key]. `final_norm`: as in `DecoderLayer`; of the result, which goes to `normed_address`, or replaces the result if that is 0. `ranks`: of a model with several; all compute the same tokens. The caller checks the addresses. Raises RuntimeError if a rank ends.
    """

def resize(frames: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None, 3), order='C', device='cpu', writable=False)], first: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], weights: Annotated[NDArray[numpy.int16], dict(shape=(None, None), order='C', device='cpu', writable=False)], shift: int, is_along_width: bool, out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None, 3), order='C', device='cpu')]) -> None:
    """
    Resizes frames [count, height, width, 3] along one axis. Each result is a sum of pixels from `first` on times `weights`, divided by 1 << shift.
    """

def write_patches(frames: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None, 3), order='C', device='cpu', writable=False)], numbers: Annotated[NDArray[numpy.float32], dict(shape=(3, 256), order='C', device='cpu', writable=False)], patch: tuple[int, int], merge: int, group: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Writes the patches of frames [count, height, width, 3], as Qwen-VL orders them: the number of each colour and byte, from `numbers` [3, 256]. `patch`: height and width. The last frame fills its group.
    """

def rms_norm(x_address: int, x_stride: int, rows: int, size: int, weight_address: int, out_address: int, epsilon: float, adds_one: bool, is_bfloat16: bool, threads: int) -> None:
    """
    Computes x / sqrt(mean(x^2) + epsilon) * w of each row, in float32 or bfloat16. `adds_one`: the factor is 1 + w. The caller checks the addresses; the stride is in elements.
    """

MAX_ROTARY_SIZE: int = 512

def rotary(queries: tuple[int, int, int, int], keys: tuple[int, int, int, int], values: tuple[int, int, int, int], cos_sin: tuple[int, int], epsilon: float, adds_one: bool, sizes: tuple[int, int], tokens: int, places: int, outputs: tuple[int, int, int], is_bfloat16: bool, threads: int) -> None:
    """
    Normalizes and rotates queries and keys, and writes keys and values to the cache. `queries`, `keys`, `values`: address, stride between tokens in elements, number of heads, address of the weights of a norm or 0. `cos_sin`: addresses of [tokens, size]. `sizes`: of a key and of a value. `places`: the address of the places of the tokens in the cache. `outputs`: addresses of the queries, and of all cached keys and values. The caller checks the addresses.
    """

class TableWriter:
    """
    Writes the rows of a message to an output processor that all have texts of the tables.
    """

    def __init__(self, *, texts: list[bytes], quoted: list[bytes], is_whole: Any, masks: Any, frames: Any, bases: Any, firsts: Any, marks: Any, servers: Any, requests: Any, samples: Any, generated: Any) -> None:
        """
        The first four are the tables of a `Vocabulary`. The others have an item for each slot, and may change between calls. `frames`: None has no text of the tables; an empty tuple has the text alone; the parts of others are joined by the escaped text.
        """

    def write(self, slots: numpy.typing.NDArray[numpy.intp], ids: numpy.typing.NDArray[numpy.int32]) -> tuple[int, bytes, bytes, bytes | None] | None:
        """
        Returns the server, the numbers of the Delta (of 32 bits), its text, and the samples of its rows (of 16 bits; None: all 0), and counts an id for each slot. Returns None, and changes nothing, if a row has no text of the tables, or the rows are of several servers.
        """

def choose_tokens(address: int, stride: int, vocabulary: int, temperatures: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], top_ks: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], top_ps: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], min_ps: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], draws: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], masked: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], bits: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], results: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], threads: int) -> None:
    """
    Chooses a token from each row of float32 logits. `temperatures`: 0: the likeliest token. `draws`: of [0, 1). `masked`: rows of which only the tokens with a set bit may come; the logits of the others become -inf. `results`: 0: chosen; 1: the greatest logit is no number; 2: the mask leaves no token. The caller checks the address; the stride is in elements.
    """
