"""Removes files of vLLM's all-reduce on the CPU that killed workers have left in /dev/shm.

vLLM removes such a file with the process that made the file. The name has a number that is drawn for each executor, so
a file that no process has mapped is of an executor that is gone. Processes that cannot be seen, as in another pid
namespace, lose nothing: all workers map the files in the first seconds, and a file must be older to be removed.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from penstock.integrations.vllm.settings import LOGGER

FOLDER = Path("/dev/shm")
NAME = re.compile(r"vllm_dist_[0-9a-f]{32}-.*-cpushm_\d+")
MIN_AGE_S = 600.0


def remove_left_files(folder: Path = FOLDER) -> list[str]:
    """Removes the files of this user that no process has mapped. Returns their names."""
    newest = time.time() - MIN_AGE_S
    names = set()
    for path in folder.glob("vllm_dist_*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if NAME.fullmatch(path.name) and status.st_uid == os.getuid() and status.st_mtime < newest:
                names.add(path.name)
    left = sorted(names - mapped_names(folder)) if names else []
    for name in left:
        (folder / name).unlink(missing_ok=True)
    if left:
        LOGGER.info("penstock removed from %s what vLLM's workers had left: %s", folder, ", ".join(left))
    return left


def mapped_names(folder: Path) -> set[str]:
    """Returns the names of the files in the folder that processes have mapped."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or may not be read
            names.update(re.findall(rf"{re.escape(str(folder))}/(\S+)", (process / "maps").read_text()))
    return names
