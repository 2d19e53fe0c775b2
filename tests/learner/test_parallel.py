"""A learner over ranks computes what one process computes. The ranks are processes of this machine that speak Gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.environ import RankPlace, child_environment, rank_environment
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from tests.learner.builders import Setup, gradients, random_batch, tiny
from tests.learner.rank_cases import BUNDLES, LAYOUTS, SUMMED
from tests.learner.rank_core_cases import ALIGNED, ON_FOUR, alike_steps
from tests.models.kinds import HYBRIDS
from tests.models.kinds import KINDS as MODEL_KINDS
from tests.once import once, selected, shared_directory
from tests.venvs import python_with

Found = dict[str, Any]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
BIASED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 2,
}
"""A mixture whose routers choose by a correction bias."""
ZERO_EXPERTS = {
    "n_routed_experts": 2,
    "zero_expert_num": 126,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 24,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 8,
}
"""A mixture most of whose experts have no weights, so that the others may get no token in a pass."""
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sequences": {},
    "tied": {"extra": {"tie_word_embeddings": True}},
    "experts": {"kind": "qwen3_moe", "extra": EXPERTS},
    "biased": {"kind": "glm4_moe", "extra": BIASED},
    "window": {"kind": "mistral", "extra": {"sliding_window": 3}},
    "sinks": {
        "kind": "gpt_oss",
        "extra": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "capped": {"kind": "gemma2", "extra": {**MODEL_KINDS["gemma2"], "final_logit_softcapping": 2.0}},
    "llama4_text": {"kind": "llama4_text", "extra": MODEL_KINDS["llama4_text"]},
    "zero_experts": {"kind": "longcat_flash", "extra": ZERO_EXPERTS},
    **{kind: {"kind": kind, "extra": HYBRIDS.get(kind, {})} for kind in ("falcon_h1", "mamba2")},
}
TWO = [name for name, (_, ways) in LAYOUTS.items() if torch.tensor(list(ways.values())).prod() == 2 or "ep2" in name]
FOUR = [name for name in LAYOUTS if name not in TWO]
SHARED = ("dense", "tied", "experts", "capped", "llama4_text")
"""The kinds of models that other tests than those of a layout need."""


def run(directory: Path, num_ranks: int, cases: list[str]) -> Found:
    """What the first rank found; all ranks have ended when this returns."""
    for stale in (*directory.glob("rendezvous*"), *directory.glob("found-*")):
        stale.unlink()
    ranks = []
    for rank in range(num_ranks):
        place = RankPlace(rank=rank, local_rank=rank, world=num_ranks)
        environment = {**child_environment(1), **rank_environment(place)}
        command = [sys.executable, "-m", "tests.learner.rank_main", str(directory), *cases]
        with (directory / f"rank-{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
    try:
        for process in ranks:
            process.wait(DEADLINE_S)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: Found = json.loads((directory / "found-0.json").read_text())
    return found


def reference(directory: Path, kind: str) -> Found:
    """Loss, metrics and gradient norm of one process; gradients beside them, for the ranks."""
    tiny(directory / kind, **KINDS[kind])
    algo = {"bundle": BUNDLES.get(kind, "grpo")}
    learner = Setup(model_dir=directory / kind, algo=algo, config={"tokens_per_microbatch": 30}).learner()
    gradient = learner.forward_backward(random_batch(num_samples=7))
    save_file(gradients(learner), directory / f"{kind}.gradients")
    norm = torch.nn.utils.get_total_norm([p.grad for p in learner.model.parameters()])
    return {"metrics": gradient.metrics, "norm": float(norm)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_directory(tmp_path_factory, "ranks")


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, place: Path) -> Found:
    kinds = dict.fromkeys([*SHARED, *(LAYOUTS[layout][0] for layout in selected(request, "layout"))])
    return once(place, "alone", lambda: {kind: reference(place, kind) for kind in kinds})


@pytest.fixture(scope="module")
def curve_alone(place: Path, alone: Found) -> list[list[float]]:
    learner = Setup(model_dir=place / "dense", config={"tokens_per_microbatch": 30}).learner()
    reports = [learner.train(random_batch(step=step, num_samples=7)) for step in range(4)]
    return [[report.metrics["loss"], report.metrics["grad_norm"]] for report in reports]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, place: Path, alone: Found) -> Found:
    once(place, "damage", lambda: damage(place))
    cases = [layout for layout in selected(request, "layout") if layout in TWO]
    cases += [f"summed_{layout}" for layout in selected(request, "summed")]
    cases += ["words", "refusals", "idle", "curve", "resume", "experts_snapshot", "memory", "masters", "muon"]
    return once(place, "two", lambda: run(place, 2, [*cases, "tiles", "vocabulary", "death"]))


@pytest.fixture(scope="module")
def four(place: Path, alone: Found) -> Found:
    return once(place, "four", lambda: run(place, 4, [*FOUR, "four", "aligned_on_four"]))


def damage(directory: Path) -> None:
    """Write copies of the dense model, each with one thing wrong."""
    tensors = load_file(directory / "dense" / "model.safetensors")
    up, query = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    broken = tensors[query].clone()
    broken[-1, -1] = torch.nan  # in the part of the last rank
    kinds = {
        "a number": {**tensors, query: broken},
        "a shape": {**tensors, up: tensors[up][1:].clone()},
        "a tensor less": {name: tensor for name, tensor in tensors.items() if name != up},
        "a tensor more": {**tensors, "model.layers.0.self_attn.extra.weight": tensors[up].clone()},
        "an end": tensors,
    }
    for kind, held in kinds.items():
        place = Path(shutil.copytree(directory / "dense", directory / "damaged" / kind))
        save_file(held, place / "model.safetensors", metadata={"format": "pt"})
    os.truncate(directory / "damaged" / "an end" / "model.safetensors", 5000)
    _settings(Path(shutil.copytree(directory / "dense", directory / "damaged" / "a size")), vocab_size=200_000)
    for kind in ("nothing", "settings", "one end", "one tensor less"):
        (directory / "damaged_on_none").mkdir(exist_ok=True)
        (directory / "damaged_on_none" / kind).symlink_to(directory / "dense")
    one = directory / "damaged_on_one"
    (one / "nothing").mkdir(parents=True)
    _settings(Path(shutil.copytree(directory / "dense", one / "settings")), model_type="no_such_model")
    shutil.copytree(directory / "damaged" / "an end", one / "one end")
    shutil.copytree(directory / "damaged" / "a tensor less", one / "one tensor less")
    tiny(directory / "a state", kind="qwen3_next", extra=HYBRIDS["qwen3_next"])
    tiny(directory / "rows of several tensors", kind="olmo_hybrid", extra=HYBRIDS["olmo_hybrid"])
    tiny(directory / "chosen tokens", kind="deepseek_v32", extra=MODEL_KINDS["deepseek_v32"])
    _settings(Path(shutil.copytree(directory / "dense", directory / "heads")), num_attention_heads=3)
    tiny(directory / "no plan", kind="gpt2")
    tiny(directory / "no trunk", kind="opt")


def _settings(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def answer(found: Found, case: str) -> Found:
    assert case in found, f"an earlier case failed: {[name for name in found if 'failed' in found[name]]}"
    assert "failed" not in found[case], found[case]["failed"]
    result: Found = found[case]
    return result


def assert_exact(found: Found, expected: Found) -> None:
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    name, apart = found["worst"]
    assert apart < 1e-5, name
    for metric, value in found["metrics"].items():
        assert value == pytest.approx(expected["metrics"][metric], rel=1e-4, abs=1e-6), metric


@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_compute_the_loss_and_gradient_of_one_process(two: Found, alone: Found, layout: str) -> None:
    assert_exact(answer(two, layout), alone[LAYOUTS[layout][0]])


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_compute_the_loss_and_gradient_of_one_process(four: Found, alone: Found, layout: str) -> None:
    assert_exact(answer(four, layout), alone[LAYOUTS[layout][0]])


def assert_same_curve(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_ranks_train_along_the_curve_of_one_process(two: Found, curve_alone: list[list[float]]) -> None:
    assert_same_curve(answer(two, "curve")["curve"], curve_alone)


def test_a_snapshot_goes_on_along_the_same_curve_when_it_is_cut_otherwise(
    two: Found, curve_alone: list[list[float]]
) -> None:
    resumed = answer(two, "resume")
    assert resumed["step"] == 2
    assert_same_curve(resumed["curve"], curve_alone[2:])


@pytest.mark.slow
def test_a_snapshot_of_four_ranks_goes_on_along_the_same_curve_on_two(
    four: Found, place: Path, curve_alone: list[list[float]]
) -> None:
    assert_same_curve(answer(four, "four")["curve"], curve_alone)
    assert_same_curve(answer(run(place, 2, ["resume_on_two"]), "resume_on_two")["curve"], curve_alone[2:])


@pytest.mark.slow
def test_four_ranks_bound_the_cosine_of_gradients_as_one_process_does(four: Found, place: Path) -> None:
    learner = Setup(model_dir=place / "dense", config={"tokens_per_microbatch": 30, **ALIGNED}).learner()
    expected = alike_steps(lambda batch: learner.train(batch).metrics, range(4))
    found = answer(four, "aligned_on_four")["found"]
    assert len(found) == len(ON_FOUR)
    for rows in found:
        for row, expected_row in zip(rows, expected, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-5)


def test_every_weight_travels_whole_under_its_own_name(two: Found) -> None:
    assert answer(two, "experts_snapshot") == {"names": True, "equal": True}


def test_a_snapshot_of_parted_experts_is_an_ordinary_model_directory(two: Found, place: Path) -> None:
    answer(two, "experts_snapshot")
    saved = place / "experts_saved"
    names = {name for path in saved.glob("model-*.safetensors") for name in load_file(path)}
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert names == set(json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"])
    before, after = (weight_tensors(load_model(ModelConfig(path=str(path)))) for path in (place / "experts", saved))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_no_file_of_a_snapshot_is_pickled(two: Found, place: Path) -> None:
    answer(two, "curve")
    assert {path.suffix for path in (place / "saved_by_two").iterdir()} == {".json", ".safetensors", ".xxh3"}


@pytest.mark.parametrize("setting", ["recompute", "offload_activations", "offload_optimizer"])
def test_saving_memory_changes_no_bit_of_the_weights(two: Found, setting: str) -> None:
    assert answer(two, "memory")[setting]


@pytest.mark.parametrize("summed", SUMMED)
def test_whole_gradients_are_summed_once_for_all_micro_batches(two: Found, summed: str) -> None:
    found = answer(two, f"summed_{summed}")
    assert found["micro-batches"] > 2
    assert found["apart"] < 1e-6
    if summed in ("data", "replicate"):
        after_each, at_the_end = found["sent"]
        assert after_each == found["micro-batches"] * at_the_end > 0


def test_a_head_that_is_a_matrix_is_computed_in_tiles(two: Found) -> None:
    """Tensor-parallel ranks compute the tiles of their own part of it."""
    found = answer(two, "tiles")
    assert all(worst < 1e-5 for worst in found["worst"].values()), found
    assert found["calls"].keys() == {"data", "context", "tensor", "tied"}


def test_parts_of_the_vocabulary_give_the_values_and_gradients_of_the_whole(two: Found) -> None:
    found = answer(two, "vocabulary")
    assert len(found["differences"]) == 4
    assert all(worst < 1e-10 for worst in found["differences"].values()), found
    assert found["same ids"]


def test_small_updates_of_bfloat16_weights_are_kept_by_their_float32_copies(two: Found) -> None:
    found = answer(two, "masters")
    assert found["moved_True"] > 0.9
    assert found["moved_False"] < 0.1
    assert found["rounded_True"]


def test_muon_makes_the_update_of_the_whole_matrix(two: Found) -> None:
    found = answer(two, "muon")
    assert found["matrices"] == 14
    assert found["worst"] < 1e-4


def test_orders_reach_every_rank_and_answers_come_in_order(two: Found) -> None:
    assert answer(two, "words") == {"heard": "train", "empty": "", "said": ["x", "xx"], "joined": [0.5, 0.25]}


def test_every_rank_refuses_a_directory_that_cannot_be_loaded(two: Found, place: Path) -> None:
    found = answer(two, "refusals")
    assert all(first == second for first, second in found.values()), found
    other = "on rank 1 of the learner, "
    one = f"{place}/damaged_on_one"
    words = {
        "a size": "describes a qwen3 of",
        "nothing": f"ModelError: {other}model.path='{one}/nothing' holds no config.json",
        "settings": f"ModelError: {other}{one}/settings/config.json cannot be used",
        "one end": f"{other}{one}/one end/model.safetensors is damaged or incomplete",
        "one tensor less": f"{other}the weights of model.path='{one}/one tensor less' lack what config.json asks for",
        "a state": "ConfigError: learner.parallel.context=2 with",
        "rows of several tensors": "files hold parts of model.layers.0.linear_attn.conv1d.weight, which transformers",
        "a change in place": "a pass with a gradient fails: Output 0 of",
        "chosen tokens": "a DeepseekV32ForCausalLM: the keys by which its layers choose",
        "no plan": "is a GPT2LMHeadModel: transformers has no plan that shards its layers",
        "no trunk": "is a OPTForCausalLM: its forward pass does not call its trunk as a whole",
        "heads": "ConfigError: learner.parallel.tensor=2 does not fit",
        "a number": "infinite or not a number: model.layers.1.self_attn.q_proj.weight (1 of",
        "a shape": "lack what config.json asks for: model.layers.0.mlp.up_proj.weight ([",
        "a tensor less": "lack what config.json asks for: model.layers.0.mlp.up_proj.weight",
        "a tensor more": "hold weights that config.json does not ask for: model.layers.0.self_attn.extra",
        "an end": "model.safetensors is damaged or incomplete",
    }
    assert found.keys() == words.keys()
    for name, part in words.items():
        assert part in found[name][0], found[name]


def test_a_rank_without_work_adds_nothing(two: Found) -> None:
    found = answer(two, "idle")
    assert abs(found["loss"]) < 1e-6
    assert found["worst"] < 1e-5


def test_a_rank_that_goes_away_ends_the_others_within_seconds_and_in_words(two: Found) -> None:
    found = answer(two, "death")
    assert "lost another rank" in found["said"]
    assert found["seconds"] < 20


@pytest.mark.slow
def test_torchrun_starts_the_ranks(place: Path, alone: Found) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["tests.learner.rank_main", str(place), "words", "fsdp2"]
    (place / "found-0.json").unlink(missing_ok=True)
    subprocess.run(command, cwd=ROOT, env=child_environment(1), check=True, timeout=DEADLINE_S, capture_output=True)
    found = json.loads((place / "found-0.json").read_text())
    assert_exact(answer(found, "fsdp2"), alone["dense"])


RAY = """
import os, socket, sys
import ray

place, names = sys.argv[1], sys.argv[2:]

@ray.remote(num_cpus=1)
class Rank:
    def run(self, environment):
        os.environ.update(environment)
        from pathlib import Path
        from tests.learner.rank_main import main
        main(Path(place), names)

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
ranks = [Rank.remote() for _ in range(2)]
ray.get([rank.run.remote({**told, "RANK": str(n), "LOCAL_RANK": str(n)}) for n, rank in enumerate(ranks)])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_actors_of_ray_are_ranks(place: Path, alone: Found) -> None:
    """They are told their place as torchrun tells it, and run the same code."""
    (place / "found-0.json").unlink(missing_ok=True)
    command = [str(python_with("ray>=2.49")), "-c", RAY, str(place), "words", "fsdp2"]
    environment = {**child_environment(1), "PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=DEADLINE_S, capture_output=True)
    found = json.loads((place / "found-0.json").read_text())
    assert_exact(answer(found, "fsdp2"), alone["dense"])
