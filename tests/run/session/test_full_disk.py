"""A disk that really is full."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import train
from headrace.base.errors import CheckpointError, HeadraceError
from tests.run.session.runs import make_run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB; the test is skipped where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if mount("-t", "tmpfs", "-o", "size=3m", "none", disk) != 0:
        pytest.skip("no disk may be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def mount(*arguments: str | Path) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_full_disk_ends_the_run_in_words_and_costs_no_snapshot(
    tmp_path: Path, small_disk: Path, model_dir: Path
) -> None:
    run_dir = small_disk / "run"
    run_file = make_run(
        tmp_path / "work",
        model_dir,
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 1},
        observe={"view": "none", "report": True},
        run={"dir": str(run_dir), "steps": 30, "checkpoint_every": 1, "keep_checkpoints": 100},
    )
    with pytest.raises(CheckpointError, match=r"snapshot .* cannot be written: .* it needs \d+ bytes, \d+ are free"):
        train(run_file)
    kept = whole(run_dir)
    assert kept[0] == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "cannot be written" in summary["cause"]
    for loop in ("rollout", "scoring", "learner", "sync"):  # and what it was at
        assert f"\n  {loop} " in summary["cause"]

    fill(small_disk)
    with pytest.raises(HeadraceError, match="cannot be"):  # not even the ledger can be written
        train(run_file, resume=True)
    assert whole(run_dir) == kept

    assert mount("-o", "remount,size=60m", small_disk) == 0
    (small_disk / "filler").unlink()
    train(run_file, resume=True, overrides=["run.steps=20"])
    assert not list((run_dir / "checkpoints").glob("*tmp*"))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["versions"][0] == kept[-1]
    assert summary["steps"] == 20
    for fates in summary["ledger"].values():
        assert fates["submitted"] == fates["trained"] + sum(fates["dropped"].values()) + fates["in_flight"]
    assert summary["ledger"]["groups"]["trained"] == 40


def whole(run_dir: Path) -> list[int]:
    """The steps of which there are snapshots."""
    return sorted(
        int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir() if ".tmp" not in path.name
    )


def fill(disk: Path) -> None:
    """Write until nothing more fits."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return
