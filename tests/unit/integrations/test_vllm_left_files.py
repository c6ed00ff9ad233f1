"""Removal of files in /dev/shm after kills of vLLM's workers."""

import mmap
import os
from pathlib import Path

import pytest

from penstock.integrations.vllm import left_files

NAME = "vllm_dist_9ca0d50cd6ff45d68937a2cb5af94497-tp:0-[0-1]-cpushm_0"


def file_in(folder: Path, name: str, age: float = 3600.0) -> Path:
    path = folder / name
    path.write_bytes(b"x" * mmap.PAGESIZE)
    changed = path.stat().st_mtime - age
    os.utime(path, (changed, changed))
    return path


def test_file_that_no_process_has_mapped_is_removed(tmp_path: Path) -> None:
    path = file_in(tmp_path, NAME)
    assert left_files.remove_left_files(tmp_path) == [NAME]
    assert not path.exists()


def test_file_that_a_process_has_mapped_stays(tmp_path: Path) -> None:
    path = file_in(tmp_path, NAME)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert left_files.remove_left_files(tmp_path) == []
    assert path.exists()


@pytest.mark.parametrize(("name", "age"), [(NAME, 60.0), ("vllm_dist_other", 3600.0), ("psm_12345", 3600.0)])
def test_file_that_is_new_or_has_another_name_stays(name: str, age: float, tmp_path: Path) -> None:
    path = file_in(tmp_path, name, age)
    assert left_files.remove_left_files(tmp_path) == []
    assert path.exists()
