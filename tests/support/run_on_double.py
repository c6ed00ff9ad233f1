"""Runs a module, and the processes that it spawns, on a double of a CUDA device: tests/support/libcuda.c.

python -m tests.support.run_on_double bench.cuda --rehearse
"""

from __future__ import annotations

import importlib
import sys
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # before this module: both say how a pipe carries a tensor

from tests.support.cuda_double import OnDevice
from tests.support.libcuda import open_device, use_device


def rebuild(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to("cuda")


ForkingPickler.register(OnDevice, lambda tensor: (rebuild, (tensor.numbers,)))

if __name__ == "__mp_main__":  # in a process that was spawned
    use_device(0)

if __name__ == "__main__":
    with open_device():
        sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
