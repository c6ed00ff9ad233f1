"""`penstock generate`: starts an engine, answers the prompts of a file, and writes the answers in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError, OutputStream
from penstock.engine.cluster import logs
from penstock.engine.launcher.launcher import ClusterFailed, Launcher
from penstock.engine.launcher.preflight import require_startable
from penstock.engine.model_dir import load_tokenizer, tokenizer_path, with_model_defaults
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.text.grammar import build_grammar, byte_tokenizer, check_grammar
from penstock.engine.text.grammar_fields import Grammar, GrammarFields, require_fit, special_tokens

ATTEMPTS = 3  # to submit a request while groups die: a client resumes those that a group has taken
GREEDY = {"temperature": 0.0}  # where neither a line, nor the command, nor the model gives a temperature
PAUSE = 0.2  # seconds before the next attempt, in which the launcher sees that death, too

Tokenise = Callable[[str], list[int]]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class InputLine(msgspec.Struct):
    """A line of the input."""

    ids: list[Id]
    params: SamplingParams
    grammar: Grammar | None = None
    adapter: bytes = b""  # `Adapter.digest`


class Answer(msgspec.Struct, omit_defaults=True):
    """A line of the output: sample 0 in `text`, `ids` and `finish_reason`, the other samples in `more`."""

    index: int
    text: str = ""
    ids: list[int] = []
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    more: list[dict[str, Any]] = []
    error: str = ""
    status: int = 0


def run(config: EngineConfig, prompts: str, output: str, defaults: dict[str, Any], at_once: int) -> int:
    """Files are names, or `-`. Returns 0 if all prompts were answered, else 1: the lines of the others say why.

    `defaults` are sampling parameters for lines without them; they take precedence over the model's own.
    Raises ValueError if a line is not a prompt, and OSError.
    """
    logs.configure("launcher", config.log_format, config.log_level)
    config = with_model_defaults(config)
    if config.pooling:
        raise ValueError(f"{config.model} makes vectors: penstock serve answers them, or --runner generate")
    require_startable(config)
    defaults = {**GREEDY, **config.sampling_defaults.explicit, **defaults}
    with contextlib.ExitStack() as files:
        lines = sys.stdin.buffer if prompts == "-" else files.enter_context(open(prompts, "rb"))
        requests = list(_read_lines(lines, config, defaults))
        answers = sys.stdout.buffer if output == "-" else files.enter_context(open(output, "wb"))
        with _progress(len(requests)) as advance:
            return asyncio.run(_generate(config, requests, answers, advance, at_once))


def _read_lines(lines: IO[bytes], config: EngineConfig, defaults: dict[str, Any]) -> Iterator[InputLine]:
    tokenise: Tokenise | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
            options = value if isinstance(value, dict) else {"ids" if isinstance(value, list) else "prompt": value}
            if "prompt" in options and tokenise is None:
                tokenise = _tokenise(config)
            yield _parse_line({**defaults, **options}, tokenise, config)
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} of the prompts: {error}") from None


def _parse_line(options: dict[str, Any], tokenise: Tokenise | None, config: EngineConfig) -> InputLine:
    ids, text = options.pop("ids", None), options.pop("prompt", None)
    if (ids is None) == (text is None):
        raise ValueError("expected either 'prompt', a text, or 'ids', a list of token ids")
    adapter = _adapter(options.pop("model", None), config)
    names = options.keys() & set(GrammarFields.__struct_fields__)
    fields_of_grammar = msgspec.convert({name: options.pop(name) for name in names}, GrammarFields)
    unknown = options.keys() - set(SamplingParams.__struct_fields__)
    if unknown:
        raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
    if ids is None and tokenise is not None:
        ids = tokenise(msgspec.convert(text, str))
    fields = [options.get(name, default) for name, default in _DEFAULTS.items()]
    params = msgspec.convert(fields, SamplingParams)
    return InputLine(msgspec.convert(ids, list[Id]), params, _grammar(fields_of_grammar, params, config), adapter)


def _adapter(name: object, config: EngineConfig) -> bytes:
    """Returns the digest of the adapter that a line names; b"": it names the model, or none."""
    adapters = {adapter.name: adapter.digest for adapter in config.lora.adapters}
    if name is None or name in (config.model, Path(config.model).name):
        return b""
    if name not in adapters:
        names = ", ".join(map(repr, adapters)) or "none"
        raise ValueError(f"expected model, a LoRA adapter of --lora-modules ({names}), got {name!r}")
    return adapters[str(name)]


def _grammar(fields: GrammarFields, params: SamplingParams, config: EngineConfig) -> Grammar | None:
    source = fields.grammar_source()
    if source is None:
        return None
    require_fit(params.min_tokens, params.ignore_eos, params.allowed_token_ids, source)
    if not config.end_ids or not tokenizer_path(config).exists():
        raise ValueError(f"{source.param}: a grammar needs a model with an end id and a tokenizer")
    grammar = build_grammar(source)
    check_grammar(byte_tokenizer([*special_tokens(load_tokenizer(config)).values()]), grammar, source)
    return grammar


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def _tokenise(config: EngineConfig) -> Tokenise:
    if config.simulated is not None and not config.model:
        return lambda text: [byte % config.simulated.vocabulary for byte in text.encode()] if config.simulated else []
    tokenizer = load_tokenizer(config)
    return lambda text: list(tokenizer.encode(text).ids)


async def _generate(
    config: EngineConfig, requests: list[InputLine], output: IO[bytes], advance: Callable[[int], None], at_once: int
) -> int:
    launcher = Launcher(config)
    turns = asyncio.Semaphore(at_once)
    written = failed = 0
    try:
        launcher.start()
        await launcher.serving()
        began, tokens = time.monotonic(), 0
        async with Client(launcher.cluster, 0) as client:

            async def answer_in_turn(index: int, request: InputLine) -> Answer:
                async with turns:
                    return await _answer(client, index, request, launcher.serving)

            tasks = [asyncio.ensure_future(answer_in_turn(index, request)) for index, request in enumerate(requests)]
            try:
                for task in tasks:
                    answer = await task
                    written += 1
                    failed += bool(answer.error)
                    tokens += answer.completion_tokens
                    output.write(msgspec.json.encode(answer) + b"\n")
                    advance(answer.completion_tokens)
            finally:
                output.flush()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        took = time.monotonic() - began
        logs.event("generated", requests=len(requests), failed=failed, tokens=tokens, tokens_per_second=tokens / took)
    except asyncio.CancelledError:
        logs.event("interrupted", written=written, requests=len(requests))
        raise
    except ClusterFailed:  # the process and its end stand in the log
        return 1
    finally:
        await launcher.stop()
    return 1 if failed else 0


async def _submit(client: Client, request: InputLine, serving: Callable[[], Awaitable[None]]) -> OutputStream:
    """Submits a request. Raises EngineError after ATTEMPTS attempts, and ClusterFailed if the cluster has failed."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await client.submit(request.ids, request.params, grammar=request.grammar, adapter=request.adapter)
        except EngineError as error:
            if error.status != 503:
                raise
        await asyncio.sleep(PAUSE)
        await serving()
    return await client.submit(request.ids, request.params, grammar=request.grammar, adapter=request.adapter)


async def _answer(client: Client, index: int, request: InputLine, serving: Callable[[], Awaitable[None]]) -> Answer:
    """Returns the answer, or the error of a request without one. Raises ClusterFailed if the cluster has failed."""
    answer = Answer(index)
    samples: list[dict[str, Any]] = [{"text": "", "ids": [], "finish_reason": ""} for _ in range(request.params.n)]
    try:
        async with await _submit(client, request, serving) as stream:
            async for chunk in stream:
                sample = samples[chunk.sample]
                sample["text"] += chunk.text
                sample["ids"] += chunk.ids
                if chunk.reason is not None:
                    sample["finish_reason"] = chunk.reason.name.lower()
        answer.prompt_tokens, answer.completion_tokens = stream.prompt_tokens, stream.completion_tokens
        answer.cached_tokens = stream.cached_tokens
    except EngineError as error:
        answer.error, answer.status = error.reason, error.status
    first, *answer.more = samples
    answer.text, answer.ids, answer.finish_reason = first["text"], first["ids"], first["finish_reason"]
    return answer


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of tokens of each answer. Shows a bar on a terminal, with `rich`."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda tokens: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("requests", total=total, tokens=0)
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress.update(bar, advance=1, tokens=done)

        yield advance
