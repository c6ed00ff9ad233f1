"""Steps and their outputs as changes, beside pickles of the same: bytes, and time to encode and to decode.

Runs in the interpreter that has vLLM. Both take turns, step by step; what was decoded is compared with what was sent.
"""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.figures import Figures, warm_up
from bench.harness.phases import collector_off, now
from bench.vllm_cases import queue_messages as messages


def measure(requests: int, count: int) -> Figures:
    """Returns times in microseconds and bytes of steps and outputs, keyed by "pickle." or "change." and the name."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    from penstock.integrations.vllm import steps

    status = WorkerProc.ResponseStatus.SUCCESS
    calls = [("execute_model", (step,), {}, 0) for step in messages.scheduled(requests, count)]
    replies = [(status, output) for output in messages.outputs(requests, count)]
    figures: Figures = {}
    for what, sent in (("step", calls), ("output", replies)):
        records: list[tuple[bytes, Any]] = []
        codecs = steps.load_codecs()
        writer = steps.StepWriter(lambda section, body, timeout, to=records: to.append((section, body)), codecs)
        reader = steps.StepReader(codecs)

        def encode(message: Any, writer: Any = writer, records: Any = records) -> list[bytes]:
            records.clear()
            assert writer.send(message), "a message that holds a step"
            ((section, body),) = records
            return [bytes(section)] if body is None else [bytes(section), pickle.dumps(body, 5)]

        def decode(parts: list[bytes], reader: Any = reader) -> Any:
            return reader.receive(parts[0], pickle.loads(parts[1]) if len(parts) > 1 else None)

        figures |= _both(what, sent, encode, decode)
        figures[f"change.{what}_whole"] = float(writer.num_whole)
    return figures


def _both(what: str, sent: Sequence[Any], encode: Callable[..., list[bytes]], decode: Callable[..., Any]) -> Figures:
    """Times are medians over the steps, bytes are means: blocks fall due in some of them."""
    figures: dict[str, list[float]] = {}

    def note(form: str, start: int, encoded: int, decoded: int, nbytes: int) -> None:
        times = {"encode_us": (encoded - start) / 1e3, "decode_us": (decoded - encoded) / 1e3}
        times["both_us"] = (decoded - start) / 1e3
        for key, value in {**times, "nbytes": float(nbytes)}.items():
            figures.setdefault(f"{form}.{what}_{key}", []).append(value)

    skipped = warm_up(len(sent))
    with collector_off():
        for index, message in enumerate(sent):
            start = now()
            pickled = pickle.dumps(message, 5)
            written = now()
            pickle.loads(pickled)
            read = now()
            parts = encode(message)
            changed = now()
            same = decode(parts)
            end = now()
            if same != message:
                raise ValueError(f"{what} {index} was decoded as another than was encoded")
            if index >= skipped:
                note("pickle", start, written, read, len(pickled))
                note("change", read, changed, end, sum(map(len, parts)))
    return {
        key: statistics.fmean(values) if key.endswith("nbytes") else statistics.median(values)
        for key, values in figures.items()
    }
