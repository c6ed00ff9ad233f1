"""A node without servers, as a program: its argument is the `EngineConfig` as JSON. Ray's actors run it."""

from __future__ import annotations

import sys

from penstock import command_signals

if __name__ == "__main__":
    command_signals.receive()
    # Imported here, as these imports take a second on a busy machine.
    import msgspec

    from penstock import standard_streams
    from penstock.engine.protocol.config import EngineConfig
    from penstock.server.server_launcher import run_headless

    standard_streams.guard()
    sys.exit(run_headless(msgspec.json.decode(sys.argv[1], type=EngineConfig)))
