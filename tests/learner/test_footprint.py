"""The estimated memory of a learner's rank is what torch's memory tracker counts in the learner's own passes, and what
a real learner allocates."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoConfig

from headrace.base.config import validate
from headrace.learner import head
from headrace.learner.config import LearnerConfig
from headrace.learner.footprint import CACHED_NUMBERS, HOST_TILE, TILE, LearnerSizes, levers
from headrace.learner.memory import compute_sizes
from headrace.models import ModelConfig, load_model
from headrace.models.config import LoraConfig
from headrace.models.shape import parse_shape
from tests.learner.builders import Setup, tiny
from tests.learner.tracked import Case, allocated_bytes, make_batch, peak_bytes
from tests.models.kinds import tiny as tiny_kind

CATALOGUE = tomllib.loads((files("headrace.wings.plan.catalogue") / "models.toml").read_text(encoding="utf-8"))
RANK = 16
"""The rank of adapters."""
LEAST, MOST = 0.9, 1.15
"""The bounds of the estimate, as a share of what is counted."""


def case_of(
    model: str, *, layers: int = 2, dtype: Any = "bfloat16", lora: bool = False, experts: bool = False, **settings: Any
) -> Case:
    """A learner of a model of the catalogue that is cut to some layers; its samples have 1,024 tokens."""
    sized = {
        name: settings.pop(name) for name in ("hidden_size", "intermediate_size", "vocab_size") if name in settings
    }
    row = {**CATALOGUE[model], **sized, "num_hidden_layers": layers}
    row["intermediate_size"] = row.get("intermediate_size", row.get("moe_intermediate_size"))
    named = {"num_local_experts": row["num_experts"]} if row["model_type"] == "gpt_oss" else {}
    return Case(
        model=AutoConfig.for_model(tie_word_embeddings=row.pop("tie_word_embeddings", False), **row, **named),
        learner=validate(LearnerConfig, {"tokens_per_microbatch": 4096, "share_prefixes": False, **settings}),
        longest=min(1024, settings.get("tokens_per_microbatch", 4096)),
        dtype=dtype,
        lora=LoraConfig(rank=RANK, experts=experts) if lora or experts else None,
    )


def sizes_of_case(case: Case) -> LearnerSizes:
    """What a plan knows of a learner."""
    shape = parse_shape(case.model.model_type, case.model.to_dict())
    return LearnerSizes(
        shape=shape,
        config=case.learner,
        itemsize=4 if case.dtype == "float32" else 2,
        longest=case.longest,
        adapter_params=0.0 if case.lora is None else shape.adapter_params(RANK, experts=case.lora.experts),
        adapts_experts=case.lora is not None and case.lora.experts,
    )


def share(case: Case) -> float:
    """The estimate, as a share of what is counted."""
    return sizes_of_case(case).footprint().total_bytes / peak_bytes(case)


@pytest.mark.slow
def test_a_small_learner_needs_what_is_estimated() -> None:
    case = case_of("qwen3-0.6b", hidden_size=128, intermediate_size=256, vocab_size=512, tokens_per_microbatch=1024)
    assert LEAST < share(case) < MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3-8b", {}),
        ("qwen3-8b", {"dtype": "float32"}),
        ("llama-3.1-8b", {"layers": 4, "memory": {"recompute": True}}),
        ("llama-3.1-8b", {"lora": True}),
        ("qwen3-30b-a3b", {}),
        ("qwen3-30b-a3b", {"optimizer": {"kind": "muon"}}),
        ("qwen3-8b", {"reference": {"kind": "frozen"}}),
        ("gpt-oss-20b", {}),
        ("gpt-oss-20b", {"layers": 3, "tokens_per_microbatch": 16384, "memory": {"recompute": True}}),
        ("llama-3.1-8b", {"layers": 4, "parallel": {"data": 8}}),
        ("llama-3.1-8b", {"parallel": {"context": 2}}),
        ("llama-3.1-70b", {"parallel": {"data": 16}, "memory": {"recompute": True}}),
        ("llama-3.1-70b", {"parallel": {"data": 16}, "lora": True}),
        ("qwen3-30b-a3b", {"lora": True}),
        ("qwen3-30b-a3b", {"lora": True, "memory": {"recompute": True}}),
        ("gpt-oss-20b", {"lora": True}),
    ],
)
def test_a_rank_needs_what_is_estimated(name: str, settings: dict[str, Any]) -> None:
    assert LEAST < share(case_of(name, **settings)) < MOST


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_of_experts_keep_a_copy_of_the_experts_of_each_layer(*, recompute: bool) -> None:
    assert LEAST < share(case_of("qwen3-30b-a3b", layers=4, experts=True, memory={"recompute": recompute})) < MOST


def test_adapters_of_experts_are_found_in_a_loaded_model(tmp_path: Path) -> None:
    directory = str(tiny_kind(tmp_path / "model", "qwen3_moe"))
    for experts in (False, True):
        model = load_model(ModelConfig(path=directory, lora=LoraConfig(rank=2, experts=experts)))
        sizes = compute_sizes(model, LearnerConfig())
        assert sizes.adapts_experts == experts
        merged = replace(sizes, adapts_experts=False)
        assert (sizes.footprint().total_bytes > merged.footprint().total_bytes) == experts


@pytest.mark.slow
def test_an_adapter_of_70b_on_sixteen_ranks_fits_into_80_gb() -> None:
    """With twelve or more layers, the peak is at the beginning of the backward pass, as with all eighty, and every
    further layer adds as much as the thirteenth. With fewer layers it is at the end, where a layer adds less."""
    settings: dict[str, Any] = {"parallel": {"data": 16}, "lora": True, "memory": {"recompute": True}}
    twelve, thirteen = (peak_bytes(case_of("llama-3.1-70b", layers=layers, **settings)) for layers in (12, 13))
    counted = twelve + 68 * (thirteen - twelve)
    estimated = sizes_of_case(case_of("llama-3.1-70b", layers=80, **settings)).footprint().total_bytes
    assert LEAST < estimated / counted < MOST
    assert max(estimated, counted) < 0.9 * 80e9


def test_a_real_learner_allocates_what_is_estimated(tmp_path: Path) -> None:
    directory = tiny(tmp_path / "model", hidden_size=256, intermediate_size=512)
    learner = Setup(model_dir=directory, config={"tokens_per_microbatch": 1024, "share_prefixes": False}).learner()
    counted = allocated_bytes(learner, [make_batch(8, 256, step) for step in range(2)])
    assert LEAST < replace(learner._memory, longest=256.0).footprint().total_bytes / counted < MOST


def test_tiles_are_those_of_the_head() -> None:
    assert (head.LARGE_TILE, head.TILES["cpu"]) == (TILE, HOST_TILE)


def test_settings_that_free_memory_free_what_is_estimated() -> None:
    """Every lever is the difference of two estimates, and the largest settings are named with their bytes."""
    sizes = sizes_of_case(case_of("llama-3.1-8b", layers=32, tokens_per_microbatch=16384))
    freed = levers(sizes)
    assert freed["learner.memory.recompute = true"] > 40e9
    assert freed["learner.memory.offload_optimizer = true"] > 0
    recomputing = replace(
        sizes, config=validate(LearnerConfig, {**sizes.config.model_dump(), "memory": {"recompute": True}})
    )
    saved = sizes.footprint().total_bytes - recomputing.footprint().total_bytes
    assert freed["learner.memory.recompute = true"] == pytest.approx(saved)
    assert "learner.memory.recompute = true" not in levers(recomputing)


def named(name: str, **settings: Any) -> dict[str, float]:
    """The levers of a learner of a whole model of the catalogue, by the names of the settings."""
    case = case_of(name, layers=CATALOGUE[name]["num_hidden_layers"], **settings)
    return {setting.partition(" (")[0]: freed for setting, freed in levers(sizes_of_case(case)).items()}


def test_more_ranks_are_named_where_they_help() -> None:
    params = {name: parse_shape(name, CATALOGUE[name]).params for name in ("llama-3.1-8b", "llama-3.1-70b")}
    recompute = {"memory": {"recompute": True}}
    freed = named("llama-3.1-8b", **recompute)["learner.parallel.data = 2"]
    assert freed == pytest.approx(18 * params["llama-3.1-8b"] / 2, rel=0.15)
    adapter = named("llama-3.1-70b", lora=True, **recompute)["learner.parallel.data = 2"]
    assert adapter == pytest.approx(2 * params["llama-3.1-70b"] / 2, rel=0.15)  # every rank has the whole adapter
    ranks = {"parallel": {"data": 48}}
    assert named("qwen3-30b-a3b", **ranks)["learner.parallel.expert = 16"] > 1e9
    assert not [each for each in named("llama-3.1-8b", **ranks) if "expert" in each]


def test_a_pass_is_made_shorter_as_far_as_samples_allow() -> None:
    tokens, context = "learner.tokens_per_microbatch", "learner.parallel.context = 2"
    sizes = sizes_of_case(case_of("llama-3.1-8b", layers=32))

    def offered(**changes: Any) -> list[str]:
        settings = [setting.partition(" (")[0] for setting in levers(replace(sizes, **changes))]
        return [each for each in settings if each.startswith((tokens, context, "learner.parallel.tensor"))]

    tensor = "learner.parallel.tensor = 2"
    assert offered(longest=1024.0) == offered(longest=math.inf) == [f"{tokens} = 2048"]
    assert offered(longest=3000.5) == [f"{tokens} = 3001", context, tensor]
    assert offered(longest=4096.0) == [context, tensor]
    recurrent = msgspec.structs.replace(sizes.shape, whole_sequences=True)
    assert offered(longest=4096.0, shape=recurrent) == []
    passes = CACHED_NUMBERS // sizes.shape.inner  # a CPU computes shorter passes than the setting allows
    assert offered(on_host=True, adapter_params=1e7, longest=math.inf) == [f"{tokens} = {passes // 2}"]


def test_muon_keeps_two_moments_of_tables_and_of_experts() -> None:
    sizes = sizes_of_case(case_of("qwen3-30b-a3b", optimizer={"kind": "muon"}, parallel={"data": 4}))
    shape = sizes.shape
    matrices = shape.params - 2 * shape.table_params - shape.expert_params
    assert sizes.resident().optimizer_bytes == pytest.approx(4 * (3 * shape.params - matrices) / 4)
