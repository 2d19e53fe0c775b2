"""What a killed run leaves behind, and what a running one has in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.launch.leases import LOCK, Lease, sweep

HOLDER = """
import sys, threading
from pathlib import Path
from headrace.launch.leases import Lease
root = Path(sys.argv[1])
print(Lease.create_directory(root).path, Lease.create_file(root).path, flush=True)
threading.Event().wait()
"""


def test_what_a_killed_run_left_is_swept_and_what_a_running_one_uses_is_not(tmp_path: Path) -> None:
    (tmp_path / "headrace-notes").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        paths = [Path(path) for path in process.stdout.readline().split()]
        sweep(tmp_path)
        assert [path.is_dir() for path in paths] == [True, False]
        assert all(path.exists() for path in paths)
        process.kill()
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["headrace-notes"]
    assert process.returncode == -signal.SIGKILL


def test_the_end_of_a_lease_leaves_nothing(tmp_path: Path) -> None:
    for lease in (Lease.create_directory(tmp_path), Lease.create_file(tmp_path)):
        lease.end()
    assert os.listdir(tmp_path) == []


@contextmanager
def interrupted_removal(monkeypatch: pytest.MonkeyPatch, removed: int) -> Iterator[None]:
    """A removal that is interrupted after so many files and directories."""
    left = removed

    def interrupted(remove: Callable[..., None]) -> Callable[..., None]:
        def maybe(path: Path | str, *args: Any, **kwargs: Any) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            remove(path, *args, **kwargs)

        return maybe

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", interrupted(os.unlink))
        patch.setattr(os, "rmdir", interrupted(os.rmdir))
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("removed", range(4))
def test_directory_whose_removal_was_interrupted_anywhere_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    lease = Lease.create_directory(tmp_path)
    for name in ("a.orders", "z.reports"):
        (lease.path / name).touch()
    with interrupted_removal(monkeypatch, removed):
        lease.end()  # its lock is released, as by the kernel when the process ends
    assert lease.path.exists()
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_directory_that_is_in_use_is_not_swept_when_somebody_has_deleted_its_lock(tmp_path: Path) -> None:
    lease = Lease.create_directory(tmp_path)
    (lease.path / "a.orders").touch()
    (lease.path / LOCK).unlink()
    sweep(tmp_path)
    assert os.listdir(lease.path) == ["a.orders"]
    lease.end()
    assert os.listdir(tmp_path) == []


def test_lease_whose_directory_cannot_be_listed_ends_and_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    lease = Lease.create_directory(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", unreadable)
        lease.end()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lease._descriptor)
