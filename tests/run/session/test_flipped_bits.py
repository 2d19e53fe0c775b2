"""Bits that flip in the files of a run: each is noticed by the name of its file before anything is trained on it, or
changes nothing that a resume reads."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from headrace.base.errors import HeadraceError
from headrace.control.recovery import find_starting_point
from headrace.flow.ledger.opening import open_ledger
from headrace.learner import checkpoint
from headrace.run.session.directory import CONFIG_FILE, FACTS_FILE, read_sealed
from tests.run.session.runs import command, make_run, running, tiny_model

FLIPS = 200
STEPS = 24
SETTINGS = {
    "flow": {"max_age": 0, "groups_per_step": 2, "group_size": 4},
    "run": {"dir": "run", "steps": STEPS, "checkpoint_every": 2},
}
"""Without staleness, a resumed run is bit for bit the one that was never disturbed."""


def headrace(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program to its end; on a machine where all is busy that may take minutes."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)


def files(run_dir: Path) -> list[str]:
    """Every file that holds a bit, but the log's index, which SQLite makes again."""
    found = (path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.stat().st_size)
    return [path.relative_to(run_dir).as_posix() for path in found if not path.name.endswith("-shm")]


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def told(run_dir: Path) -> tuple[object, ...]:
    """All that a resume, an evaluation and a replay take from the files of a run, verified as they verify it."""
    start = find_starting_point(run_dir)
    with closing(open_ledger(run_dir)) as ledger:
        books = (ledger.attempts(0), ledger.checksums(), ledger.notes(), repr(ledger.roll_back(start.step)))
    assert start.snapshot is not None
    read = [path.read_bytes() for path in sorted(start.snapshot.iterdir()) if path.suffix != ".xxh3"]
    settings = [read_sealed(run_dir / name) for name in (CONFIG_FILE, FACTS_FILE)]
    return (start.step, start.fingerprint, start.memory, read, books, settings)


def trained(run_file: Path, run_dir: Path) -> tuple[str, list[bytes]]:
    """Resume the run in ``run_dir`` with the program; what it refused, or the weights and moments it came to."""
    done = headrace("train", run_file, "--resume", "--set", f"run.dir={run_dir}")
    last = run_dir / "checkpoints" / f"step-{STEPS:06d}"
    if done.returncode:
        assert not last.exists(), "nothing was trained"
        return done.stderr, []
    return "", [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flips")
    return make_run(directory / "work", tiny_model(directory / "model"), **SETTINGS)


@pytest.fixture(scope="module")
def killed(run_file: Path) -> Path:
    """The directory of a run that was killed after its second snapshot: half of its ledger is in the log."""
    run_dir = run_file.parent / "killed"
    with running("train", run_file, "--set", f"run.dir={run_dir}") as run:
        run.until_step(6)
    assert (run_dir / "ledger.sqlite-wal").stat().st_size > 0
    return run_dir


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_flipped_bits_are_noticed_by_name_or_have_no_effect(run_file: Path, killed: Path, tmp_path: Path) -> None:
    rng = random.Random(24)
    copy = tmp_path / "copy"
    whole = told(shutil.copytree(killed, copy))
    table: Counter[tuple[str, str]] = Counter()
    to_try: dict[tuple[str, bool], Path] = {}
    for number, name in enumerate(rng.choices(files(killed), k=FLIPS)):
        shutil.rmtree(copy)
        shutil.copytree(killed, copy)
        flip(copy / name, rng)
        damaged = shutil.copytree(copy, tmp_path / f"{number}-{name.replace('/', '-')}")
        try:
            fate = "without effect" if told(copy) == whole else "missed"
        except HeadraceError as error:
            fate = "noticed" if Path(name).name in str(error) else f"noticed under another name: {error}"
        table[name, fate] += 1
        kind = "snapshot" if name.startswith("checkpoints") else name
        if to_try.setdefault((kind, fate == "noticed"), damaged) != damaged:
            shutil.rmtree(damaged)
    for (name, fate), count in sorted(table.items()):
        print(f"{name:<55} {fate:<20} {count}")
    assert {fate for _, fate in table} == {"noticed", "without effect"}
    problem, undamaged = trained(run_file, shutil.copytree(killed, tmp_path / "undamaged"))
    assert not problem, problem
    for (kind, noticed), damaged in to_try.items():
        problem, weights = trained(run_file, damaged)
        print(f"resumed with a flipped bit in {kind}: {problem.splitlines()[:1] or 'the same weights'}")
        assert weights == undamaged or (noticed and (kind in problem or "snapshot" in problem))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damage_of_a_snapshot_ends_a_resume_and_its_remedy_works(run_file: Path, killed: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(killed, tmp_path / "run")
    newest = checkpoint.latest(run_dir / "checkpoints")
    assert newest is not None
    flip(newest / "optimizer.safetensors", random.Random(0))
    refused = headrace("train", run_file, "--resume", "--set", f"run.dir={run_dir}")
    assert refused.returncode == 1
    assert "optimizer.safetensors has changed since it was written" in refused.stderr
    whole = headrace("export", run_dir, tmp_path / "out")  # which reads no optimizer
    assert whole.returncode == 0, whole.stderr
    flip(newest / "model.safetensors", random.Random(0))
    rows = run_dir.parent / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for verb in (["eval", run_dir, "--set", f"data.eval_path={rows}"], ["export", run_dir, tmp_path / "other"]):
        assert "model.safetensors has changed" in headrace(*verb).stderr
    shutil.move(newest, f"{newest}.damaged")
    done = headrace("train", run_file, "--resume", "--set", f"run.dir={run_dir}")
    assert done.returncode == 0, done.stderr
    assert f"finished after {STEPS} steps" in done.stdout


@pytest.mark.slow
def test_changed_settings_of_a_run_are_not_used(run_file: Path, killed: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(killed, tmp_path / "run")
    text = (run_dir / CONFIG_FILE).read_text()
    (run_dir / CONFIG_FILE).write_text(text.replace('"temperature": 1.0', '"temperature": 1.5'))
    words = f"{CONFIG_FILE} has changed since it was written"
    assert words in headrace("eval", run_dir).stderr
    assert words in headrace("train", run_file, "--resume", "--set", f"run.dir={run_dir}").stderr
    assert headrace("report", run_dir).returncode == 0
    assert words in (run_dir / "report" / "report.html").read_text()
