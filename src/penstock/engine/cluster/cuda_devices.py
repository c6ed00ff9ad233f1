"""The number of CUDA devices that a worker will find, by the driver and torch's version file; torch is not imported.

An unknown number is None, and never 0: the worker finds out.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# In a process of its own, as a driver that has been initialised keeps memory and descriptors.
ASK_DRIVER = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print("absent" if "cannot open shared object file: No such file" in str(error) else error)
else:
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    print(status, count.value)
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    for number in range(count.value):
        ask = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
        if driver.cuDeviceGet(ctypes.byref(device), number) or ask(uuid, device):
            break
        print(uuid.raw.hex())
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


def uuid_digits(name: str) -> str:
    """Returns the digits of a UUID, which may be the first ones only, as in CUDA_VISIBLE_DEVICES."""
    return name.removeprefix("GPU-").replace("-", "").lower()


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
    fields = done.stdout.split()
    fields, uuids = fields[:2], tuple(fields[2:])
    if fields == ["absent"]:
        return Devices(0, "there is no NVIDIA driver (libcuda.so.1)")
    if done.returncode != 0 or len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return Devices(None, f"the driver: {done.stdout.strip() or f'exit status {done.returncode}'}")
    status, count = map(int, fields)
    if status in (NO_DEVICE, STUB_LIBRARY):
        return Devices(0, f"the driver finds no device{where}")
    if status != 0:
        return Devices(None, f"the driver answers with error {status}")
    return Devices(count, f"the driver finds {count} device{'' if count == 1 else 's'}{where}", uuids)
