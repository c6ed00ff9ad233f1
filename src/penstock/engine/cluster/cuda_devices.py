"""The number of CUDA devices that a worker will find, by the driver and torch's version file; torch is not imported.

An unknown number is None, and never 0: the worker finds out.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.engine.protocol.config import EngineConfig

# In a process of its own, as a driver that has been initialised keeps memory and descriptors.
ASK_DRIVER = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print("absent" if "cannot open shared object file: No such file" in str(error) else error)
else:
    count, version, can = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    print(status, count.value, version.value)
    device, peer, uuid = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
    name = ctypes.create_string_buffer(256)
    for number in range(count.value):
        ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        if driver.cuDeviceGet(ctypes.byref(device), number) or ask(uuid, device):
            break
        apart = []
        for other in range(count.value):
            if other != number and not driver.cuDeviceGet(ctypes.byref(peer), other):
                if not driver.cuDeviceCanAccessPeer(ctypes.byref(can), device, peer) and not can.value:
                    apart.append(str(other))
        driver.cuDeviceGetName(name, len(name), device)
        print(uuid.raw.hex(), ",".join(apart) or "-", "slice" if b" MIG " in name.value else "whole")
"""
PATIENCE = 20.0  # seconds; for the driver's answer
NO_DEVICE, STUB_LIBRARY = 100, 34  # CUDA_ERROR_…: the two errors that mean no device


class TorchBuild(NamedTuple):
    """An installed torch, by its own version.py."""

    version: str
    cuda: str | None  # the version of CUDA that it was built for; None: it cannot use one
    hip: str | None  # the version of ROCm; torch calls its devices "cuda", too


class Devices(NamedTuple):
    number: int | None  # None: not known
    reason: str
    uuids: tuple[str, ...] = ()  # as hexadecimal digits; empty: not known
    cuda: tuple[int, int] | None = None  # the newest version of CUDA that the driver knows
    apart: frozenset[tuple[int, int]] = frozenset()  # numbers of devices of which the first cannot reach the second
    has_slices: bool = False  # (MIG) CUDA shows a process no more than one

    def number_of(self, name: str) -> int | None:
        """Returns the number of a device by number or UUID; None: not known."""
        if name.isdecimal():
            return int(name)
        matches = numbers_of(name, self.uuids)
        return matches[0] if len(matches) == 1 else None

    def uuids_of(self, names: Sequence[str]) -> list[bytes]:
        """Returns the uuids of devices by number or UUID. Raises ValueError if not known."""
        numbers = [self.number_of(name) for name in names]
        uuids = [self.uuids[number] for number in numbers if number is not None and number < len(self.uuids)]
        if not numbers or len(uuids) != len(numbers):
            raise ValueError(f"expected CUDA devices of workers, got {list(names) or 'a CPU'}: {self.reason}")
        return [bytes.fromhex(uuid) for uuid in uuids]


def uuid_digits(name: str) -> str:
    """Returns the digits of a UUID, which may be the first ones only, as in CUDA_VISIBLE_DEVICES."""
    return name.removeprefix("GPU-").replace("-", "").lower()


def numbers_of(name: str, uuids: Sequence[str]) -> list[int]:
    """Returns the numbers of devices with a UUID that begins with `name`. `uuids`: of all devices, as digits."""
    return [number for number, uuid in enumerate(uuids) if uuid.startswith(uuid_digits(name))]


def torch_build() -> TorchBuild | None:
    """None: torch is not installed. Raises OSError and others where its version.py cannot be read."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_py = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    return TorchBuild(str(version_py["__version__"]), version_py.get("cuda"), version_py.get("hip"))


def cuda_devices() -> Devices:
    try:
        build = torch_build()
    except Exception as error:  # whatever another package's file does
        return Devices(None, f"torch's version.py: {error}")
    if build is None:
        return Devices(None, "torch is not installed")
    if build.hip is not None:
        return Devices(None, f"torch {build.version} is built for ROCm {build.hip}")
    if build.cuda is None:
        return Devices(0, f"torch {build.version} is built without CUDA")
    return _asked_of_driver()


def _asked_of_driver() -> Devices:
    command = [sys.executable, "-I", "-S", "-c", ASK_DRIVER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Devices(None, f"the driver could not be asked: {error}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    lines = [line.split() for line in done.stdout.splitlines()]
    fields, devices = (lines[0], lines[1:]) if lines else ([], [])
    if fields == ["absent"]:
        return Devices(0, "there is no NVIDIA driver (libcuda.so.1)")
    if done.returncode != 0 or len(fields) != 3 or not all(field.isdecimal() for field in fields):
        return Devices(None, f"the driver: {done.stdout.strip() or f'exit status {done.returncode}'}")
    status, count, version = map(int, fields)
    if status in (NO_DEVICE, STUB_LIBRARY):
        return Devices(0, f"the driver finds no device{where}")
    if status != 0:
        return Devices(None, f"the driver answers with error {status}")
    return Devices(
        count,
        f"the driver finds {count} device{'' if count == 1 else 's'}{where}",
        tuple(uuid for uuid, _, _ in devices),
        (version // 1000, version % 1000 // 10),
        frozenset(
            (number, int(other))
            for number, (_, apart, _) in enumerate(devices)
            for other in apart.split(",")
            if other.isdecimal()
        ),
        any(kind == "slice" for _, _, kind in devices),
    )


def worker_devices(config: EngineConfig) -> list[bytes]:
    """Returns the uuids of the devices of this node's workers, for `DeviceScope`. Raises ValueError if not known."""
    return cuda_devices().uuids_of(config.device_names)
