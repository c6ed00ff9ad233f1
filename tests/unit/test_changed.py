"""scripts/changed, by which CI decides what else a change needs: where it cannot know, it says that there was one."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.documents import ROOT

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
CHANGED, UNCHANGED = 0, 1


class Repository:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main")
        self.write("scripts/changed", (ROOT / "scripts" / "changed").read_text())
        self.commit("native/core.h", "one")

    def git(self, *words: str) -> None:
        output = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false", *words)
        subprocess.run(["git", *output], cwd=self.folder, check=True, capture_output=True, timeout=30)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, name: str, text: str) -> None:
        self.write(name, text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")

    def status(self, *paths: str) -> int:
        command = ["bash", "scripts/changed", *paths]
        return subprocess.run(command, cwd=self.folder, capture_output=True, timeout=30).returncode


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return Repository(tmp_path)


def test_single_commit_counts_as_changed(repository: Repository) -> None:
    assert repository.status("native") == CHANGED


def test_a_folder_without_git_counts_as_changed(repository: Repository) -> None:
    shutil.rmtree(repository.folder / ".git")
    assert repository.status("native") == CHANGED


def test_a_branch_is_compared_with_where_it_left_the_main_branch(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "branch")
    repository.commit("src/module.py", "one")
    assert (repository.status("native"), repository.status("src")) == (UNCHANGED, CHANGED)
    repository.git("switch", "--quiet", "main")
    repository.commit("native/core.h", "two")  # which is no change of the branch
    repository.git("switch", "--quiet", "branch")
    assert repository.status("native") == UNCHANGED
    repository.commit("native/core.h", "three")
    assert repository.status("src/other", "native") == CHANGED


def test_the_main_branch_is_compared_with_the_last_tag_before_it(repository: Repository) -> None:
    repository.git("tag", "v1")
    repository.commit("src/module.py", "one")
    repository.git("tag", "v2")
    assert (repository.status("native"), repository.status("src")) == (UNCHANGED, CHANGED)
    repository.commit("native/core.h", "two")
    assert (repository.status("native"), repository.status("src")) == (CHANGED, UNCHANGED)


@pytest.mark.parametrize("name", ["native/core.h", "native/new.h"])
def test_uncommitted_file_counts_as_a_change(repository: Repository, name: str) -> None:
    repository.git("tag", "v1")
    repository.commit("src/module.py", "one")
    assert repository.status("native") == UNCHANGED
    repository.write(name, "other")
    assert repository.status("native") == CHANGED
