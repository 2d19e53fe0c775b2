"""A snapshot is whole or not there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.errors import CheckpointError
from headrace.learner.checkpoint import SnapshotState, abandon, begin, commit, latest, read_state, retain, sweep
from headrace.learner.disk import whole_or_nothing


def state(step: int, **controller: object) -> SnapshotState:
    return SnapshotState(step=step, version=step, config_fingerprint="abc", controller=controller)


def make(directory: Path, step: int, content: bytes = b"weights") -> Path:
    unfinished = begin(directory, step)
    (unfinished / "model.safetensors").write_bytes(content)
    return commit(unfinished, state(step))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_the_controller_committed_is_what_it_reads(tmp_path):
    unfinished = begin(tmp_path / "checkpoints", 10)
    (unfinished / "model.safetensors").write_bytes(b"12345")
    final = commit(unfinished, state(10, ledger={"position": 77}, seeds=[1, 2]))
    assert final == tmp_path / "checkpoints" / "step-000010"
    found = read_state(final)
    assert (found.step, found.version, found.config_fingerprint) == (10, 10, "abc")
    assert found.controller == {"ledger": {"position": 77}, "seeds": [1, 2]}
    assert found.files == {"model.safetensors": 5}


def test_nothing_has_the_final_name_before_commit(tmp_path):
    unfinished = begin(tmp_path, 3)
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path) is None
    abandon(unfinished)
    abandon(unfinished)
    assert names(tmp_path) == []


def test_latest_is_the_highest_step(tmp_path):
    for step in (9, 100, 20):
        make(tmp_path, step)
    make(tmp_path, 1_000_000)
    assert latest(tmp_path) == tmp_path / "step-1000000"
    assert latest(tmp_path / "missing") is None


@pytest.mark.parametrize("damage", ["truncated", "file gone", "state gone", "state broken"])
def test_an_incomplete_snapshot_is_refused_by_name_and_the_older_one_is_offered(tmp_path, damage):
    make(tmp_path, 1)
    broken = make(tmp_path, 2)
    match damage:
        case "truncated":
            (broken / "model.safetensors").write_bytes(b"w")
        case "file gone":
            (broken / "model.safetensors").unlink()
        case "state gone":
            (broken / "state.json").unlink()
        case "state broken":
            (broken / "state.json").write_text('{"step": "two"}')
    assert latest(tmp_path) == broken, "an older one is never taken without a word"
    with pytest.raises(CheckpointError, match="step-000002 cannot be used") as caught:
        read_state(broken)
    assert ("state.json" if "state" in damage else "model.safetensors") in caught.value.problem
    offered = re.search(r"continue from step-000001, which is whole: mv (\S+) (\S+), ", caught.value.remedy)
    assert offered is not None
    Path(offered[1]).rename(offered[2])
    assert latest(tmp_path) == tmp_path / "step-000001"
    assert read_state(tmp_path / "step-000001").step == 1


def test_each_flipped_bit_of_a_snapshot_is_noticed_and_its_file_named(tmp_path):
    make(tmp_path, 1)
    snapshot = make(tmp_path, 2, bytes(range(64)))
    assert read_state(snapshot).sealed
    for path in sorted(snapshot.iterdir()):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 7):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                read_state(snapshot)
        path.write_bytes(whole)
    assert read_state(snapshot).step == 2


def test_a_snapshot_whose_older_neighbour_is_damaged_too_offers_the_one_before(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"step-{step:06d}" / "model.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(CheckpointError, match="continue from step-000001"):
        read_state(tmp_path / "step-000003")


def test_a_snapshot_of_an_older_program_without_checksums_is_read_and_one_that_lost_them_is_not(tmp_path):
    snapshot = make(tmp_path, 1)
    (snapshot / "checksums.xxh3").unlink()
    with pytest.raises(CheckpointError, match=r"checksums\.xxh3 is missing"):
        read_state(snapshot)
    tree = json.loads((snapshot / "state.json").read_text())
    del tree["sealed"]
    (snapshot / "state.json").write_text(json.dumps(tree))
    assert not read_state(snapshot).sealed


def test_retention_keeps_the_newest_whole_ones(tmp_path):
    for step in range(1, 6):
        make(tmp_path, step)
    assert {path.name for path in retain(tmp_path, 2)} == {"step-000001", "step-000002", "step-000003"}
    assert names(tmp_path) == ["step-000004", "step-000005"]


def test_retention_never_counts_an_incomplete_one_as_the_newest(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / "step-000003" / "model.safetensors").unlink()
    retain(tmp_path, 0)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_sweep_removes_what_an_earlier_life_left_and_nothing_else(tmp_path):
    kept = make(tmp_path, 1)
    (tmp_path / "step-000002.tmp-4711").mkdir()
    (tmp_path / "step-000002.tmp-4711" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    assert [path.name for path in sweep(tmp_path)] == ["step-000002.tmp-4711"]
    assert names(tmp_path) == ["notes", kept.name]
    assert sweep(tmp_path / "missing") == []


def test_the_same_step_again_replaces_what_an_earlier_life_wrote(tmp_path):
    make(tmp_path, 4, b"old")
    final = make(tmp_path, 4, b"newer")
    assert (final / "model.safetensors").read_bytes() == b"newer"
    assert names(tmp_path) == ["step-000004"]


def test_too_little_space_is_found_before_anything_is_written(tmp_path):
    unfinished = begin(tmp_path, 1)
    wrote = []
    with (
        pytest.raises(CheckpointError, match=r"needs about 1000 bytes in all, 10 were free") as caught,
        whole_or_nothing(unfinished, 1000, free=lambda path: 10),
    ):
        wrote.append(1)
    assert not wrote
    assert str(tmp_path) in caught.value.remedy
    assert names(tmp_path) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
from headrace.learner.checkpoint import SnapshotState, begin, commit
from headrace.base.errors import CheckpointError

directory = Path(sys.argv[1])
unfinished = begin(directory, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
state = SnapshotState(step=2, version=2, config_fingerprint="", controller={"rows": list(range(1000))})
try:
    commit(unfinished, state)
except CheckpointError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_leaves_no_trace_and_the_last_snapshot_as_it_was(tmp_path):
    kept = make(tmp_path, 1)
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "step-000002.tmp-" in run.stdout
    assert "were free there" in run.stdout
    assert names(tmp_path) == [kept.name]
    assert read_state(kept).step == 1


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file stands where the directory should")
    with pytest.raises(CheckpointError, match="cannot be made"):
        begin(tmp_path / "checkpoints", 1)


def test_reading_snapshots_needs_no_torch():
    code = "import sys, headrace.learner.checkpoint; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "False"
