"""What a worker does not import with transformers: each second of it is a second of every start."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

from penstock.engine.protocol.config import SHIPPED
from tests import tiers

LOADS = """
    import sys
    from penstock.engine.worker.model_runner import ModelRunner
    ModelRunner({model!r}, slots=1, blocks=1)
    print(*{{"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"}} & set(sys.modules))
    import torch
    print(torch.distributed.is_available(), torch.compile(lambda row: row + 1, backend="eager")(torch.ones(1)).item())
"""


@tiers.needs_all  # the process imports torch; without this the other tests hold, but the start is longer
def test_worker_that_has_loaded_a_model_has_imported_no_compiler() -> None:
    program = textwrap.dedent(LOADS).format(model=str(SHIPPED))
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.splitlines() == ["", "True 2.0"]
