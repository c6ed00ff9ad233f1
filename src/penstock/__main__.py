"""The command `penstock`, and `python -m penstock`: the first statements of the process.

A process that is spawned imports this file too.
"""

import importlib.util
import sys

from penstock import command_signals


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        # Before the imports below, which take a second on a busy machine.
        command_signals.receive()
        from penstock import standard_streams

        standard_streams.guard()
        if importlib.util.find_spec("penstock.engine") is not None:  # the build of the data plane has none
            from penstock.engine.launcher import early_fork_server

            early_fork_server.start_early(sys.argv[2:])
    from penstock.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
