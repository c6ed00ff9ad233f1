"""What a CUDA device has been told to do, recorded: all of a step's kernels are launched by one call.

All that needs a CUDA device to be tried out. Leaves to `decode_graphs` what is recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CudaGraphs:
    """Of the current device. They share the memory between their kernels: what one answers is there until the next
    one runs."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Calls `compute` three times. Raises RuntimeError where it waits for the device, or does something else that
        cannot be recorded; what is called then goes on as before."""
        now = torch.cuda.current_stream()
        self._stream.wait_stream(now)
        try:
            with torch.cuda.stream(self._stream):
                compute()  # whatever is made only once, libraries' own memory too, is there after that
                with _refusing_to_wait():  # told before anything is recorded, of which a failure would leave half
                    compute()
        finally:
            now.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",  # NCCL's thread looks at its events meanwhile
        )
        with torch.cuda.stream(self._stream), recording:  # a recording that fails does not go back to `now` by itself
            outcome = compute()

        def replay() -> Tensor:
            graph.replay()
            return outcome

        return replay


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Makes reading a number from the device a RuntimeError, as that number would decide what is done next."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it does not find everything: the recording finds the rest
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
