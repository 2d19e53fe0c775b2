"""What a killed run leaves behind, and what a running one has in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from headrace.launch.leases import Lease, sweep

HOLDER = """
import sys, threading
from pathlib import Path
from headrace.launch.leases import Lease
root = Path(sys.argv[1])
print(Lease.directory(root).path, Lease.file(root).path, flush=True)
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
    for lease in (Lease.directory(tmp_path), Lease.file(tmp_path)):
        lease.end()
    assert os.listdir(tmp_path) == []
