"""Steps and their outputs as changes, beside pickles of the same: bytes, and time to encode and to decode.

Runs in the interpreter that has vLLM. Both take turns, step by step; what was decoded is compared with what was sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.figures import Figures, warm_up
from bench.harness.phases import collector_off, now
from bench.vllm_cases import queue_messages as messages


def measure(requests: int, count: int) -> Figures:
    """Returns means over the steps, in microseconds and bytes: of steps and of outputs, as pickles and as changes."""
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
        figures[f"{what}_whole"] = float(writer.num_whole)
    return figures


def _both(what: str, sent: Sequence[Any], encode: Callable[..., list[bytes]], decode: Callable[..., Any]) -> Figures:
    nanoseconds = {"pickle_encode": 0, "pickle_decode": 0, "change_encode": 0, "change_decode": 0}
    nbytes = {"pickle": 0, "change": 0}
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
                stamps = (written - start, read - written, changed - read, end - changed)
                for key, took in zip(nanoseconds, stamps):
                    nanoseconds[key] += took
                nbytes["pickle"] += len(pickled)
                nbytes["change"] += sum(map(len, parts))
    counted = len(sent) - skipped
    return {
        **{f"{what}_{key}_us": took / counted / 1e3 for key, took in nanoseconds.items()},
        **{f"{what}_{key}_nbytes": total / counted for key, total in nbytes.items()},
    }
