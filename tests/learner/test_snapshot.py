"""A learner that was saved and restored continues as if nothing had happened, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.errors import CheckpointError
from headrace.learner.checkpoint import SnapshotState, begin, commit, latest
from headrace.models import ModelConfig, load_model
from tests.learner.builders import Setup, assert_same_bits, random_batch, tiny, weights
from tests.models.kinds import tiny as tiny_kind

CONFIG = {"schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "tokens_per_microbatch": 20}


@pytest.fixture
def setup(model_dir):
    return Setup(model_dir=model_dir, config=CONFIG, total_steps=5)


def trained(setup: Setup, steps: range):
    learner = setup.learner()
    for step in steps:
        learner.train(random_batch(step))
    return learner


@pytest.fixture
def saved(setup, tmp_path):
    unfinished = begin(tmp_path, 2)
    trained(setup, range(2)).save(unfinished)
    return unfinished


def test_two_steps_saved_restored_and_two_more_are_four_steps(setup, saved, tmp_path):
    state = SnapshotState(step=2, version=2, config_fingerprint="", controller={})
    assert commit(saved, state) == latest(tmp_path)
    unbroken = trained(setup, range(4))
    resumed = setup.learner()
    resumed.restore(tmp_path / "step-000002")
    assert resumed.version == 2
    reports = [resumed.train(random_batch(step)) for step in (2, 3)]
    assert_same_bits(weights(resumed), weights(unbroken))
    rerun = trained(setup, range(3)).train(random_batch(3))
    assert reports[-1].metrics["lr"] == rerun.metrics["lr"]
    assert reports[-1].metrics["loss"] == rerun.metrics["loss"]


def test_moments_matter_to_the_continuation(setup, saved):
    """Without them the test above could pass for the wrong reason."""
    resumed, forgetful = setup.learner(), setup.learner()
    resumed.restore(saved)
    forgetful.restore(saved)
    forgetful._optimizer.adamw.state.clear()
    resumed.train(random_batch(2))
    forgetful.train(random_batch(2))
    pairs = zip(resumed.model.parameters(), forgetful.model.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)


def test_restored_moments_and_random_state_are_those_saved(setup, saved):
    learner = setup.learner()
    expected = torch.get_rng_state()
    torch.rand(1)
    learner.restore(saved)
    assert torch.equal(torch.get_rng_state(), expected)
    again = saved.with_name("again")
    again.mkdir()
    learner.save(again)
    first, second = (load_file(directory / "optimizer.safetensors") for directory in (saved, again))
    assert_same_bits(
        {name: tensor for name, tensor in first.items() if tensor.dtype == torch.float32},
        {name: tensor for name, tensor in second.items() if tensor.dtype == torch.float32},
    )
    assert any(name.endswith("exp_avg_sq") for name in first)


def test_a_snapshot_before_the_first_step_restores(setup, tmp_path):
    unfinished = begin(tmp_path, 0)
    setup.learner().save(unfinished)
    resumed = setup.learner()
    resumed.restore(unfinished)
    resumed.train(random_batch(0))
    assert_same_bits(weights(resumed), weights(trained(setup, range(1))))


def test_a_snapshot_is_an_ordinary_model_directory_without_pickles(setup, saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert_same_bits(dict(model.named_parameters()), weights(trained(setup, range(2))))
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.decode(tokenizer.encode("1+2=3")) == "1+2=3"
    names = {path.name for path in saved.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors"} <= names
    assert {path.suffix for path in saved.iterdir()} <= {".json", ".safetensors", ".jinja", ".txt", ".xxh3"}


def test_a_snapshot_of_another_model_is_refused(setup, saved, tmp_path):
    other = replace(setup, model_dir=tiny(tmp_path / "other", hidden_size=16)).learner()
    before = weights(other)
    with pytest.raises(CheckpointError, match="another model"):
        other.restore(saved)
    assert_same_bits(weights(other), before)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "model.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "truncated"])
def test_a_damaged_file_is_refused_by_name(setup, saved, name, damage):
    path = saved / name
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=str(saved)):
        setup.learner().restore(saved)


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from headrace.learner.checkpoint import begin
from headrace.base.errors import CheckpointError
from tests.learner.builders import Setup, assert_same_bits, random_batch, weights

torch.set_num_threads(1)
learner = Setup(model_dir=Path(sys.argv[1])).learner()
learner.train(random_batch())
before = weights(learner)
unfinished = begin(Path(sys.argv[2]), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    learner.save(unfinished)
except CheckpointError as error:
    print(error)
assert_same_bits(weights(learner), before)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
learner.save(begin(Path(sys.argv[2]), 1))
"""


@pytest.mark.parametrize("limit", [1, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (2_000, 120_000))])
def test_a_disk_that_fills_up_leaves_no_trace_and_the_run_can_save_later(model_dir, tmp_path, limit):
    """At the first small file, at the weights, at the optimizer's moments (which are larger)."""
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(model_dir), str(tmp_path), str(limit)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert f"{tmp_path}/step-000001.tmp-" in run.stdout
    assert "were free there" in run.stdout
    assert "remedy:" in run.stdout
    (after,) = tmp_path.iterdir()
    assert (after / "optimizer.safetensors").is_file()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "buffer"), [("lfm2_moe", "expert_bias"), ("gemma4_text", "layer_scalar")])
def test_buffers_that_belong_to_a_models_files_are_saved(kind, buffer, dtype, tmp_path):
    setup = Setup(model_dir=tiny_kind(tmp_path / "model", kind), config={"tokens_per_microbatch": 20}, dtype=dtype)
    learner = setup.learner()
    given = [one for name, one in learner.model.named_buffers() if name.endswith(buffer)]
    assert given
    for place, one in enumerate(given):
        one.fill_(0.25 + place)
    learner.train(random_batch(0))
    unfinished = begin(tmp_path, 1)
    learner.save(unfinished)
    saved = load_model(ModelConfig(path=str(unfinished), dtype=dtype))
    assert [float(one.flatten()[0]) for name, one in saved.named_buffers() if name.endswith(buffer)] == [
        0.25 + place for place in range(len(given))
    ]
