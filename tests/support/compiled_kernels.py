"""Triton kernels compiled for an NVIDIA device without one, and what the machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple


class CompiledKernel(NamedTuple):
    registers: int  # of a thread
    stack: int  # bytes of a thread: spilled registers, mostly
    shared: int  # bytes of a program
    global_loads: int
    wide_loads: int  # of 16 bytes
    ptx: str


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    *,
    floats: Collection[str] = (),
    stages: int = 3,
    architecture: int = 90,
    fuses: bool = True,
) -> CompiledKernel:
    """`pointers`: types by the names of arguments. All other arguments are constants, floats or integers. Pointers and
    integers are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = f"*{pointers[name]}" if name in pointers else "fp32" if name in floats else "i32"
        if name in floats:
            continue
        attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuses}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage, ptx = _usage(compiled.asm["cubin"]), compiled.asm["ptx"]
    loads = re.findall(r"ld\.global\S*", ptx)
    wide = [load for load in loads if ".v4.b32" in load or ".v2.b64" in load]
    return CompiledKernel(usage["REG"], usage["STACK"], compiled.metadata.shared, len(loads), len(wide), ptx)


def _usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
