"""A node without servers, as a program: its argument is the `EngineConfig` as JSON. Ray's actors run it."""

from __future__ import annotations

import sys

import msgspec

from penstock.engine.protocol.config import EngineConfig
from penstock.server.server_launcher import run_headless

if __name__ == "__main__":
    sys.exit(run_headless(msgspec.json.decode(sys.argv[1], type=EngineConfig)))
