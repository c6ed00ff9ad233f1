"""`python -m penstock`."""

import sys

from penstock.cli import main

if __name__ == "__main__":  # a process that is spawned imports this file too
    sys.exit(main())
