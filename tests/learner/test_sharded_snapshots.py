"""Snapshots that ranks write without gathering, and that other ranks read in parts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.environ import RankPlace, child_environment, rank_environment
from headrace.base.errors import CheckpointError
from headrace.learner.checkpoint import SnapshotState, begin, commit, latest, read_state, sweep
from headrace.learner.core import LearnerCore
from headrace.learner.disk import verify
from headrace.learner.parallel.parts import Part, SavedParts, write_parts
from headrace.models import ModelConfig, load_model
from headrace.models.heads import HEADS_FILE
from headrace.models.weights import weight_tensors
from tests.learner.builders import Setup, random_batch, tiny
from tests.learner.rank_snapshot_cases import LAYOUTS, same_bits
from tests.learner.test_parallel import KINDS, ROOT, Found, answer, assert_same_curve, run
from tests.once import once, shared_directory

CONFIG = {"tokens_per_microbatch": 30}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = shared_directory(tmp_path_factory, "shards")
    for kind in ("dense", "experts"):
        once(directory, f"made {kind}", lambda kind=kind: tiny(directory / kind, **KINDS[kind]))
    return directory


PREDICTING = {"mtp.fc.weight": torch.arange(6.0).view(2, 3)}
"""The tensors of a prediction head, which the model does not have."""


@pytest.fixture(scope="module")
def by_one(place: Path) -> Path:
    return once(place, "by one", lambda: saved_by_one(place))


def saved_by_one(place: Path) -> Path:
    save_file(PREDICTING, place / "dense" / "model-mtp.safetensors")
    learner = Setup(model_dir=place / "dense", config=CONFIG).learner()
    for step in range(2):
        learner.train(random_batch(step=step, num_samples=7))
    (place / "whole_by_one").mkdir()
    learner.save(place / "whole_by_one")
    save_file(state_alone(learner), place / "whole_by_one.expected")
    return place / "whole_by_one"


def state_alone(learner: LearnerCore) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in weight_tensors(learner.model).items()}
    for one in learner._optimizer.trained:
        found |= {f"{one.name}|{key}": part.clone() for key, part in learner._optimizer.parts(one).items()}
    return found


@pytest.fixture(scope="module")
def two(place: Path, by_one: Path) -> Found:
    cases = ["shards_by_two", "shards_full_disk", "shards_bad_heads", "shards_read", "shards_from_one", "shards_on_two"]
    return once(place, "two", lambda: run(place, 2, cases))


def test_a_snapshot_holds_the_state_before_the_steps_that_were_trained_while_it_was_written(two: Found, place: Path):
    answer(two, "shards_by_two")
    expected = load_file(place / "shards_by_two.expected")
    saved = SavedParts(sorted((place / "shards_by_two").glob("shard-*")))
    found = saved.under("model|") | saved.under("optimizer|")
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name].whole(), tensor) for name, tensor in expected.items())


def test_ranks_of_another_cut_restore_every_bit_without_a_second_model(two: Found):
    restored = answer(two, "shards_on_two")
    assert restored["wrong"] == restored["more"] == []


def test_no_tensor_is_gathered_for_a_snapshot(two: Found):
    assert not [kind for kind in answer(two, "shards_by_two")["messages"] if "functional" in kind]


def test_a_rank_reads_its_own_part_and_goes_on_as_if_nothing_had_happened(two: Found):
    found = answer(two, "shards_read")
    assert found["read"] == found["part"]
    assert found["curve"] == answer(two, "shards_by_two")["curve"]


def test_one_process_restores_every_bit_of_what_ranks_have_saved(two: Found, place: Path):
    answer(two, "shards_by_two")
    memory = {"memory": {"offload_optimizer": True}}
    learner = Setup(model_dir=place / "dense", config={**CONFIG, **memory}, dtype="bfloat16").learner()
    learner.restore(place / "shards_by_two")
    found, expected = state_alone(learner), load_file(place / "shards_by_two.expected")
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    losses = [learner.train(random_batch(step=step, num_samples=7)).metrics for step in range(2, 7)]
    curve = [[metrics["loss"], metrics["grad_norm"]] for metrics in losses]
    for (loss, norm), (expected_loss, expected_norm) in zip(curve, answer(two, "shards_by_two")["curve"], strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-2, abs=2e-2)  # bfloat16, in another order of sums
        assert norm == pytest.approx(expected_norm, rel=5e-2)


def test_ranks_restore_every_bit_of_what_one_process_has_saved(two: Found):
    assert answer(two, "shards_from_one") == {"wrong": [], "step": 2}


def test_a_snapshot_of_ranks_is_an_ordinary_model_directory(two: Found, place: Path):
    answer(two, "shards_by_two")
    expected = load_file(place / "shards_by_two.expected")
    found = weight_tensors(load_model(ModelConfig(path=str(place / "shards_by_two"), dtype="bfloat16")))
    assert found
    assert all(same_bits(tensor.detach(), expected[name]) for name, tensor in found.items())


def test_ranks_and_one_process_keep_the_prediction_heads_of_the_checkpoint(two: Found, place: Path, by_one: Path):
    answer(two, "shards_by_two")
    for snapshot in (by_one, place / "shards_by_two"):
        found = load_file(snapshot / HEADS_FILE)
        assert found.keys() == PREDICTING.keys()
        assert torch.equal(found["mtp.fc.weight"], PREDICTING["mtp.fc.weight"])
        index = json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"]
        assert index["mtp.fc.weight"] == HEADS_FILE
        verify(snapshot)


def test_a_rank_that_cannot_write_is_named_and_nothing_is_left(two: Found):
    found = answer(two, "shards_full_disk")
    assert "rank 1: " in found["problem"]
    assert not found["left"]


def test_heads_that_the_first_rank_cannot_copy_end_the_snapshot_on_every_rank(two: Found):
    found = answer(two, "shards_bad_heads")
    assert "the checkpoint has no config.json" in found["problem"]
    assert not found["left"]


@pytest.fixture
def committed(two: Found, place: Path, tmp_path: Path) -> Path:
    """The snapshot of two ranks as a run has it, behind an older one."""
    answer(two, "shards_by_two")
    for step in (1, 2):
        unfinished = begin(tmp_path, step)
        shutil.copytree(place / "shards_by_two", unfinished, dirs_exist_ok=True)
        commit(unfinished, SnapshotState(step=step, version=step, config_fingerprint="", controller={}))
    return tmp_path / "step-000002"


@pytest.mark.parametrize("damage", ["missing", "cut off", "a flipped bit"])
@pytest.mark.parametrize("shard", ["shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors"])
def test_a_shard_that_is_missing_or_has_changed_is_refused_by_name(committed: Path, shard: str, damage: str):
    path = committed / shard
    content = bytearray(path.read_bytes())
    path.unlink()
    content[-5] ^= 4
    if damage != "missing":
        path.write_bytes(content[:-9] if damage == "cut off" else content)
    with pytest.raises(CheckpointError, match=rf"{shard}[\s\S]*step-000001"):
        read_state(committed)
    assert read_state(committed, to_resume=False).step == 2  # what only uses the weights does not read it


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_learner_of_ones_own_names_the_shard_that_it_cannot_read(committed: Path, place: Path, damage: str):
    path = committed / "shard-00002-of-00002.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut off":
        path.write_bytes(content[:-9])
    with pytest.raises(CheckpointError, match=path.name):
        Setup(model_dir=place / "dense").learner().restore(committed)


def test_parts_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path):
    path = tmp_path / "shard-00001-of-00001.safetensors"
    write_parts(path, [Part(label="model|up", at=(0, 1), shape=(2, 3), values=torch.ones(2, 2))], {"step": 1})
    with pytest.raises(ValueError, match=r"model\|up: shard-00001-of-00001.safetensors hold 4 of 6"):
        SavedParts([path]).under("model|")["up"].whole()
    assert SavedParts([path]).under("model|")["up"].read([[range(2)], [range(1, 3)]]).tolist() == [[1, 1], [1, 1]]


def test_any_part_of_a_tensor_is_read_from_boxes_that_lie_in_any_way(tmp_path: Path):
    rng = random.Random(0)
    tensor = torch.arange(7 * 5 * 4).view(7, 5, 4)
    rows, columns = [(0, 3), (3, 4), (4, 7)], [(0, 2), (2, 5)]
    boxes = [(row, column) for row in rows for column in columns]
    paths = [tmp_path / f"shard-{number:05d}-of-00003.safetensors" for number in range(1, 4)]
    for number, path in enumerate(paths):
        write_parts(
            path,
            [
                Part(label="x", at=(a, c, 0), shape=(7, 5, 4), values=tensor[a:b, c:d].contiguous())
                for (a, b), (c, d) in boxes[number::3]
            ],
            {},
        )
    saved = SavedParts(paths).under("")["x"]
    assert torch.equal(saved.whole(), tensor)
    for _ in range(200):
        axes, indices = [], []
        for length in tensor.shape:
            cuts = sorted(rng.sample(range(length + 1), 4))
            runs = [range(cuts[0], cuts[1]), range(cuts[2], cuts[3])]
            rng.shuffle(runs)
            axes.append(runs)
            indices.append([index for run in runs for index in run])
        assert torch.equal(saved.read(axes), tensor[indices[0]][:, indices[1]][:, :, indices[2]])


# -- four ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(place: Path) -> Found:
    names = [f"{name}_{what}_four" for name in LAYOUTS for what in ("by", "on")]
    return once(place, "four", lambda: run(place, 4, names))


@pytest.fixture(scope="module")
def four_on_two(place: Path, four: Found) -> Found:
    return once(place, "four on two", lambda: run(place, 2, [f"{name}_on_two" for name in LAYOUTS]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", ["four", "two"])
def test_what_four_ranks_save_has_every_bit_on_any_ranks_and_goes_on(
    four: Found, four_on_two: Found, layout: str, ranks: str
):
    saved = answer(four, f"{layout}_by_four")
    restored = answer(four if ranks == "four" else four_on_two, f"{layout}_on_{ranks}")
    assert restored["wrong"] == restored["more"] == []
    if ranks == "four":
        assert restored["curve"] == saved["curve"]
    elif layout == "muon_fsdp4":  # its products are of bfloat16
        assert [loss for loss, _ in restored["curve"]] == pytest.approx([loss for loss, _ in saved["curve"]], abs=1e-3)
    elif "dtype" not in LAYOUTS[layout][1]:
        assert_same_curve(restored["curve"], saved["curve"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_four_ranks_save_has_every_bit_in_one_process(four: Found, place: Path, layout: str):
    answer(four, f"{layout}_by_four")
    more = dict(LAYOUTS[layout][1])
    directory = place / more.pop("kind", "dense")
    dtype = more.pop("dtype", "float32")
    learner = Setup(model_dir=directory, config={**CONFIG, **more}, dtype=dtype).learner()
    saved = place / f"{layout}_by_four"
    learner.restore(saved)
    found, expected = state_alone(learner), load_file(place / f"{layout}_by_four.expected")
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    alone = weight_tensors(load_model(ModelConfig(path=str(saved), dtype=dtype)))
    assert all(same_bits(tensor.detach(), expected[name]) for name, tensor in alone.items())


@pytest.mark.slow
def test_a_rank_needs_no_more_memory_to_save_than_a_copy_of_its_own_shard(place: Path):
    tiny(place / "large", hidden_size=512, intermediate_size=2048, extra={"num_hidden_layers": 6})
    found = answer(run(place, 2, ["shards_peak"]), "shards_peak")
    assert found["own"] > 100e6
    assert found["grown"] < 1.05 * found["own"] + 5e6


# -- ranks that are killed --------------------------------------------------------------------------------------------

SAVING = """
import sys
from pathlib import Path
import torch
from headrace.base.environ import rank_place
from headrace.learner.checkpoint import SnapshotState, begin, commit
from headrace.learner.parallel import mesh
from headrace.learner.parallel.config import ParallelConfig
from tests.learner.builders import random_batch
from tests.learner.rank_cases import _learner

torch.set_num_threads(1)
place = Path(sys.argv[1])
with mesh.join_ranks(ParallelConfig(data=2, timeout_s=60), rank_place(), torch.device("cpu"), f"file://{place}/meet"):
    learner = _learner(place, {"data": 2}, kind="middle")
    for step in range(1000):
        learner.train(random_batch(step=step, num_samples=4))
        leads = learner.ranks.is_leader
        unfinished = begin(place / "checkpoints", step + 1) if leads else None
        where = learner.ranks.broadcast(str(unfinished).encode() if leads else None).decode()
        learner.core.save(Path(where))
        if leads:
            commit(unfinished, SnapshotState(step=step + 1, version=step + 1, config_fingerprint="", controller={}))
            print(step + 1, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_are_killed_at_any_moment_of_saving_leave_a_whole_snapshot(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    tiny(tmp_path / "middle", hidden_size=256, intermediate_size=1024)
    ranks = []
    for rank in range(2):
        environment = {**child_environment(1), **rank_environment(RankPlace(rank=rank, local_rank=rank, world=2))}
        command = [sys.executable, "-c", SAVING, str(tmp_path)]
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, start_new_session=True))
    try:
        assert ranks[0].stdout is not None
        said = [int(ranks[0].stdout.readline()) for _ in range(2)]
        _wait_for_begun(tmp_path / "checkpoints", rng.uniform(0, 0.6))
        for process in rng.sample(ranks, 2):
            os.killpg(process.pid, signal.SIGKILL)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    sweep(tmp_path / "checkpoints")
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None
    step = read_state(newest).step  # every file is there, and has the bytes that were written
    assert step >= said[-1]
    learner = Setup(model_dir=tmp_path / "middle", config=CONFIG).learner()
    learner.restore(newest)
    assert learner.version == step


def _wait_for_begun(directory: Path, seconds: float) -> None:
    """Return some time after a snapshot was begun."""
    while not list(directory.glob("*.tmp-*")):
        time.sleep(0.001)  # gate: sleep - the ranks are other processes, and the clock is theirs
    time.sleep(seconds)  # gate: sleep - the moment of the kill is any
