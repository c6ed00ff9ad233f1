"""What the data plane costs, measured beside the other ways to do the same; no test checks speed, this does."""

import sys
from pathlib import Path

# Run as a file, a benchmark has its folder on the path, where `vllm.py` would be imported in place of vLLM.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
