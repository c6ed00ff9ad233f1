"""Tensors of a CUDA device between processes, and copies from shared host memory to one.

Imports without CUDA, and without torch; what needs a device raises NoDevice, which says what is missing.

    pool = cuda.CudaPool.create(2 << 30)  # in the producer; others attach to its ticket, or are spawned with it
    tensors = cuda.CudaTensors(pool, store)  # in each process, each with its own end of both
    ref = tensors.put(images, [place])  # `place`: the consumer's `tensors.place`, by any message
    images = tensors.view(ref)  # over there: the same memory
"""

from penstock.tensor.cuda.device_scope import DeviceScope, ReceivedTensors
from penstock.tensor.cuda.driver import DeviceError, Driver, ForeignDevice, NoDevice
from penstock.tensor.cuda.pool import CudaPool, Slice
from penstock.tensor.cuda.ref import CudaRef, HostRef, Place, Reference
from penstock.tensor.cuda.tensors import CudaStats, CudaTensors
from penstock.tensor.cuda.torch_driver import driver_of
from penstock.tensor.cuda.uploads import Uploads, UploadStats

__all__ = [
    "CudaPool",
    "CudaRef",
    "CudaStats",
    "CudaTensors",
    "DeviceError",
    "DeviceScope",
    "Driver",
    "ForeignDevice",
    "HostRef",
    "NoDevice",
    "Place",
    "ReceivedTensors",
    "Reference",
    "Slice",
    "UploadStats",
    "Uploads",
    "driver_of",
]
