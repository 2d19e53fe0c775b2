"""A learner of given rows that is spread over ranks does what it does in one process, and its processes end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.base.errors import ConfigError, HeadraceError, ModelError, RankLost, RunError
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import Failure
from headrace.flow.ledger.opening import open_ledger
from headrace.launch.hosts import EXIT_RANK_LOST, EXIT_REPORTED
from headrace.learner.checkpoint import newest_weights
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from headrace.run.cli.status import read_run_state
from headrace.run.session.exporting import export
from headrace.wings.supervised.bookkeeping import make_batch
from headrace.wings.supervised.learner import Answer, RankedLearner
from headrace.wings.supervised.session import sft
from tests.launch.test_forking import gone
from tests.learner.builders import gradients
from tests.learner.test_parallel import Found, answer, run
from tests.once import once, selected, shared_directory
from tests.wings.supervised.material import chat_model, conversations, settings, write_rows
from tests.wings.supervised.rank_cases import BY_WEIGHTS, choose_layouts
from tests.wings.supervised.test_against_trl import PLAIN, learner_of, prepared_for
from tests.wings.supervised.test_runs import run_file

TWO = {"parallel": {"data": 2}}
LORA = {"rank": 4}
COMPARED = [*PLAIN, "sft with an adapter", "dpo with an adapter"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_directory(tmp_path_factory, "given rows")


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, model: Path, place: Path) -> Found:
    return once(place, "alone", lambda: found_alone(place, model, selected(request, "name")))


def found_alone(directory: Path, model: Path, names: list[str]) -> Found:
    """What one process finds for losses of given names, some of them of an adapter; with files for the ranks."""
    alone: Found = {}
    for name in names:
        loss, _, adapter = name.partition(" with an ")
        lora = {"model": {"lora": LORA}} if adapter else {}
        prepared = prepared_for(loss, model, directory / "run", **lora)
        core, all_rows = learner_of(prepared), prepared.rows.rows
        batches = [
            make_batch(step, [(place, all_rows[place]) for place in prepared.schedule.rows(step)])[0]
            for step in range(prepared.schedule.num_steps)
        ]
        config = {"verb": prepared.verb, "config": prepared.config.model_dump(mode="json")}
        (directory / f"{name}.run.json").write_text(json.dumps(config))
        (directory / f"{name}.batches").write_bytes(MessageCodec(None).encode(batches))
        losses = [core.forward_backward(batches[0]).metrics["loss"]]
        save_file(gradients(core), directory / f"{name}.gradients")
        core.optim_step()
        losses += [core.train(batch).metrics["loss"] for batch in batches[1:]]
        save_file(weight_tensors(core.model), directory / f"{name}.weights")
        alone[name] = {"losses": losses, "without training": core.evaluate(batches[-1])["loss"]}
    return alone


def found_by_ranks(place: Path, case: str) -> Found:
    return once(place, case, lambda: answer(run(place, 2, [case]), case))


@pytest.mark.parametrize("name", COMPARED)
def test_every_loss_gradient_and_weight_is_that_of_one_process(name: str, place: Path, alone: Found) -> None:
    assert_same(name, found_by_ranks(place, "given_rows"), alone, choose_layouts(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_copies_and_parts_of_weights_change_no_loss(name: str, place: Path, alone: Found) -> None:
    assert_same(name, found_by_ranks(place, "given_rows_by_weights"), alone, BY_WEIGHTS)


def assert_same(name: str, found: Found, alone: Found, layouts: Sequence[dict[str, int]]) -> None:
    for layout in layouts:
        ranked = found[f"{name} {json.dumps(layout)}"]
        assert ranked["losses"] == pytest.approx(alone[name]["losses"], rel=1e-5), layout
        assert ranked["without training"] == pytest.approx(alone[name]["without training"], rel=1e-5), layout
        assert ranked["gradient"] < 1e-5, layout
        assert ranked["weights"] < 1e-5, layout


KILLED = """
import os, signal, sys
from headrace.wings.supervised import learner, session
whole = learner.RankedLearner.train
def train(ranks, batch):
    if batch.step == 3:
        print(*[each.pid for each in ranks.processes], flush=True)
        number = signal.SIGSTOP if sys.argv[2] == "stopped rank" else signal.SIGKILL
        os.kill(os.getpid() if sys.argv[2] == "run" else ranks.processes[1].pid, number)
    return whole(ranks, batch)
learner.RankedLearner.train = train
session.sft(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["run", "rank"])
def test_a_run_on_ranks_that_is_killed_ends_whole_and_resumes_to_the_same_bits(model, tmp_path, victim):
    rows = write_rows(tmp_path / "rows.jsonl", conversations(18))
    sections = {"learner.parallel": {"data": 2}, "run": {"checkpoint_every": 2, "keep_checkpoints": 9}}
    killed = run_file(tmp_path / "b", model, tmp_path / "killed", rows, **sections)
    (tmp_path / "killer.py").write_text(KILLED, encoding="utf-8")
    call = [sys.executable, str(tmp_path / "killer.py"), str(killed), victim]
    died = subprocess.run(call, check=False, capture_output=True, timeout=120)
    pids = [int(pid) for pid in died.stdout.split()]
    assert len(pids) == 2
    assert gone(pids), "a rank outlives its run"
    if victim == "run":
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()
        assert read_run_state(tmp_path / "killed")["state"] == "killed"
    else:
        assert f"rank 1 of the learner, process {pids[1]}, has ended (killed by SIGKILL)" in died.stderr.decode()
        assert read_run_state(tmp_path / "killed")["state"] == "failed"
    whole = run_file(tmp_path / "a", model, tmp_path / "whole", rows, **sections)
    assert sft(whole).steps == 5
    summary = sft(killed, resume=True)
    assert (summary.status, summary.steps) == ("finished", 5)
    for step in (4, 5):
        found = [_tensors(tmp_path / name / "checkpoints" / f"step-{step:06}") for name in ("whole", "killed")]
        assert found[0].keys() == found[1].keys()
        assert all(found[0][key].equal(found[1][key]) for key in found[0])
    ledger = open_ledger(tmp_path / "killed")
    assert ledger.conservation().holds
    assert {step: len(numbers) for step, numbers in ledger.steps().items()} == {0: 4, 1: 4, 2: 4, 3: 4, 4: 2}
    ledger.close()
    exported = export(tmp_path / "killed", tmp_path / "out")
    assert load_model(ModelConfig(path=str(exported.directory)))


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_the_one_that_is_named(model, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", conversations(18))
    parallel = {"data": 2, "timeout_s": 5}
    run_toml = run_file(tmp_path / "b", model, tmp_path / "run", rows, **{"learner.parallel": parallel})
    (tmp_path / "killer.py").write_text(KILLED, encoding="utf-8")
    call = [sys.executable, str(tmp_path / "killer.py"), str(run_toml), "stopped rank"]
    died = subprocess.run(call, check=False, capture_output=True, timeout=120)
    pids = [int(pid) for pid in died.stdout.split()]
    assert f"rank 1 of the learner, process {pids[1]}, has kept the others waiting" in died.stderr.decode()
    assert gone(pids)


def _tensors(directory: Path) -> dict[str, Any]:
    """Weights and moments, of all ranks; not the state of torch's random numbers, which nothing draws."""
    files = {path.name: load_file(path) for path in directory.glob("*.safetensors")}
    return {
        f"{name} {key}": each for name, file in files.items() for key, each in file.items() if each.is_floating_point()
    }


def test_the_status_names_the_ranks_and_an_error_of_theirs_ends_the_run_in_words(model, tmp_path):
    tree = settings(model, tmp_path / "run", learner={**TWO, "lr": 1e38, "max_grad_norm": 1e38})
    tree["learner"]["schedule"] = "constant"
    with pytest.raises(RunError, match="the global gradient norm is nan"):
        sft(tree, data=conversations(8))
    components = json.loads((tmp_path / "run" / "status.json").read_text())["components"]
    assert [each["role"] for each in components] == ["controller", "learner-0", "learner-1"]
    assert gone([each["pid"] for each in components[1:]])


ALONE = """
import os
if os.environ.get("RANK") == "1":
    from headrace.learner.parallel.optim import ShardOptimizer
    def fail(*_):
        raise ValueError("a planted fault")
    ShardOptimizer.clip_norms = fail
"""


def test_an_error_of_one_rank_alone_is_told_as_it_is(model, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(ALONE, encoding="utf-8")
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(tmp_path))
    with pytest.raises(HeadraceError, match=r"rank 1 of the learner failed .* ValueError: a planted fault"):
        sft(settings(model, tmp_path / "run", learner=TWO), data=conversations(8))


IN_A_SNAPSHOT = """
import os, signal
if os.environ.get("RANK") == VICTIM:
    from headrace.learner import snapshot
    from headrace.learner.parallel.files import Snapshot
    def die(part):
        def maybe(one, directory, *rest, **more):
            if "step-000004" in str(directory):
                os.kill(os.getpid(), signal.SIGKILL)
            return part(one, directory, *rest, **more)
        return maybe
    if VICTIM == "1":  # while the first writes
        Snapshot._save_as_one = die(Snapshot._save_as_one)
    else:  # when it has written the files, and not yet sealed them
        seal = snapshot.seal
        snapshot.seal = lambda directory, *rest: die(lambda _, place, *more: seal(place, *more))(None, directory, *rest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_that_is_killed_while_an_adapter_is_saved_leaves_the_older_snapshot(
    model, tmp_path, monkeypatch, victim
):
    rows = write_rows(tmp_path / "rows.jsonl", conversations(18))
    sections = {"learner.parallel": {"data": 2}, "run": {"checkpoint_every": 2, "keep_checkpoints": 9}}
    sections["model.lora"] = LORA
    whole, killed = (
        run_file(tmp_path / f"{name} file", model, tmp_path / name, rows, **sections) for name in ("whole", "killed")
    )
    (tmp_path / "sitecustomize.py").write_text(IN_A_SNAPSHOT.replace("VICTIM", repr(victim)), encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setitem(os.environ, "PYTHONPATH", str(tmp_path))
        with pytest.raises(RankLost, match=rf"rank {victim} of the learner, .* \(killed by SIGKILL\)"):
            sft(killed)
    snapshots = tmp_path / "killed" / "checkpoints"
    assert [each.name for each in snapshots.glob("step-*") if "tmp" not in each.name] == ["step-000002"]
    assert newest_weights(snapshots) == snapshots / "step-000002"  # every checksum fits
    assert sft(killed, resume=True).status == sft(whole).status == "finished"
    for step in (2, 4, 5):
        found = [_tensors(tmp_path / name / "checkpoints" / f"step-{step:06}") for name in ("whole", "killed")]
        assert found[0].keys() == found[1].keys()
        assert all(found[0][key].equal(found[1][key]) for key in found[0])


class Ended:
    """A process that has ended with a code."""

    def __init__(self, code: int) -> None:
        self.pid, self.log, self.code = 1, Path("log"), code

    def wait(self, _timeout_s: float | None = None) -> int:
        return self.code

    def last_lines(self) -> str:
        return ""


def test_a_failure_that_is_reported_behind_the_end_of_another_rank_is_the_one_that_is_told():
    learner = object.__new__(RankedLearner)
    learner._codec, ends = MessageCodec(Answer), [Pipe(), Pipe()]
    learner._pipes = [ours for ours, _ in ends]
    learner.processes = [Ended(EXIT_RANK_LOST), Ended(EXIT_REPORTED)]  # type: ignore[list-item]
    failure = Failure(call=None, kind="ModelError", problem="rank 1 cannot", remedy="mend it")
    ends[1][1].send_bytes(learner._codec.encode(failure))
    for _, theirs in ends:
        theirs.close()
    with pytest.raises(ModelError, match="rank 1 cannot"):
        learner._receive()
    for ours in learner._pipes:
        ours.close()


def test_what_cannot_be_spread_is_refused_before_a_process_starts(model, tmp_path, monkeypatch):
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"learner": {"parallel": {"tensor": 3}}}, "learner.parallel.tensor=3 does not fit"),
        ({"learner": {"parallel": {"tensor": 2}}, "model": {"lora": {"use_dora": True}}}, "lora.use_dora=true: each"),
        ({"learner": TWO, "model": {"deterministic": True}}, "model.deterministic works in one process only"),
    )
    for sections, words in cases:
        with pytest.raises(ConfigError, match=words):
            sft(settings(model, tmp_path / "run", **sections), data=conversations(4))
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"a launcher .* has started 2 processes"):
        sft(settings(model, tmp_path / "run"), data=conversations(4))
    assert not (tmp_path / "run").exists()
