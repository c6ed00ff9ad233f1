"""What a CUDA graph is, on a CPU: the operations one after the other, with the tensors and the numbers of then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# For a number: a device would be waited for.
ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")


class Eager:
    """Does it again, by doing it. `replays` is how often each recording was replayed."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> torch.Tensor:
            self.replays[number] += 1
            return compute()

        return replay


class Tape(Eager):
    """Records."""

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        compute()  # as a device is warmed up
        recording = _Recording()
        with recording:
            outcome = compute()
        return super().record(lambda: recording.replay(outcome))


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(ASKING) or (
            name == "index" and any(arg.dtype == torch.bool for arg in args[1] if arg is not None)
        ):
            raise RuntimeError(f"called a synchronizing operation: {name}")
        outcome = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, outcome))
        return outcome

    def replay(self, tensor: torch.Tensor) -> torch.Tensor:
        replayed: dict[int, torch.Tensor] = {}  # in place of those that were made while this was recorded

        def now(value: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda tensor: replayed.get(id(tensor), tensor), value)

        for func, args, kwargs, before in self._done:
            after = func(*now(args), **now(kwargs))
            if isinstance(before, torch.Tensor):
                replayed[id(before)] = after
            elif isinstance(before, (tuple, list)):
                replayed.update(
                    {id(old): two for old, two in zip(before, after, strict=True) if isinstance(old, torch.Tensor)}
                )
        return replayed[id(tensor)]
