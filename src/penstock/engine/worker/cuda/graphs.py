"""CUDA graphs: all kernels of a step are recorded once, and then launched by one call.

`step_graphs` decides what is recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.engine.cluster.process import CannotStart


class InvalidatedCapture(CannotStart):
    """CUDA has invalidated a capture, and torch's allocator counts the capture as underway until the process ends: it
    returns no memory to the device, and begins no other capture."""


class CudaGraphs:
    """Records graphs on the current device. All graphs share one memory pool: the result of a replay is valid until the
    next replay of any graph."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Records what `compute` does, in three calls of it, and returns the replay. Raises RuntimeError if `compute`
        synchronizes with the device or does something else that cannot be recorded; the device stays usable. Raises
        InvalidatedCapture if only the capture finds that out."""
        now = torch.cuda.current_stream()
        self._stream.wait_stream(now)
        try:
            with torch.cuda.stream(self._stream):
                compute()  # after it, memory that libraries allocate once exists
                with _refusing_to_wait():  # before recording, since a failed recording would be left half done
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
        try:
            with torch.cuda.stream(self._stream), recording:  # a capture that fails may not go back to `now` by itself
                outcome = compute()
        except Exception as error:
            try:
                torch.cuda.empty_cache()
            except RuntimeError:
                cause = error.__context__ or error  # the end of an invalidated capture raises an error, too
                raise InvalidatedCapture(f"{type(cause).__name__}: {cause}".partition("\n")[0]) from error
            raise

        def replay() -> Tensor:
            graph.replay()
            return outcome

        return replay


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Makes reading a number from the device a RuntimeError: a recorded graph could not depend on that number."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it does not find everything: the recording finds the rest
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
