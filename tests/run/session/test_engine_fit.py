"""What an engine lacks is refused when the run is loaded, by name and with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.engine.fleet import FleetConfig
from headrace.models.devices import Devices
from headrace.policy import PolicyConfig
from headrace.run.session import load_config
from headrace.run.session.engine_fit import compute_explained_gap, refuse_unsupported
from headrace.wings.servers.vllm.command import LORA_RANKS
from tests.run.session.runs import tiny_model

WAITS = ("engine.kind=vllm", "launch.start_timeout_s=400")


def told(kind: str, *settings: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config({"model": {"path": "m"}}, [f"engine.kind={kind}", "launch.start_timeout_s=400", *settings])
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("vllm", ["sync.interrupt=stream"], "sync.interrupt='stream'"),
        ("vllm", ["sync.interrupt=sleep", "engine.device=cpu"], "'inflight_recompute'"),
        ("sglang", [], "sync.interrupt='inflight'"),
        ("sglang", ["sync.interrupt=drain", "engine.top_p=0.9"], "no engine.top_k, top_p or min_p"),
        ("sglang", ["sync.interrupt=drain", "model.lora.rank=4"], "model.lora, whose adapters alone travel"),
        ("vllm", ["model.deterministic=true"], "model.deterministic"),
        ("vllm", ["model.lora.use_dora=true"], "model.lora.use_dora"),
        ("vllm", ["model.lora.experts=true"], "model.lora.use_dora or experts"),
        ("vllm", ["model.lora.rank=513"], "set it to 512 or less"),
        ("vllm", ["observe.record_entropy=true"], "entropies"),
        ("vllm", ['engine.server.urls=["http://a"]', "engine.count=2"], "1 servers for engine.count=2"),
        ("vllm", ["engine.cache_tokens=99"], "engine.cache_tokens=99 is of engine.kind='native'"),
        ("vllm", ["engine.stream_steps=2"], "engine.stream_steps=2"),
        ("vllm", ['engine.server.urls=["a"]'], "'a', which is not a URL"),
        ("vllm", ['engine.server.urls=["http://a"]', "engine.server.python=p"], "engine.server.python"),
        ("vllm", ["engine.server.token_from=KEY"], "engine.server.token_from"),
        ("vllm", ["launch.start_timeout_s=100"], "engine.server.wait_s=110"),
        ("native", ["engine.server.python=p"], "engine.kind='native' has none"),
        ("vlm", [], "engine.kind='vlm'"),
    ],
)
def test_what_the_engine_lacks_is_refused_at_load(kind: str, settings: list[str], words: str) -> None:
    said = told(kind, *settings)
    assert words in said
    assert "remedy" in said


def test_what_the_engine_has_is_taken() -> None:
    config = load_config({"model": {"path": "m"}}, [*WAITS, "engine.top_p=0.9", "learner.keep_sampling_mask=false"])
    assert config.engine.can.truncates
    assert load_config({"model": {"path": "m"}}, [*WAITS, f"model.lora.rank={LORA_RANKS[-1]}"]).model.lora


def test_servers_give_no_memory_back_on_the_processor_that_a_run_ends_up_on() -> None:
    config = load_config({"model": {"path": "m"}}, [*WAITS, "sync.interrupt=sleep"])
    refuse_unsupported(config, (), Devices(engines=("cuda:0",), learner=("cuda:0",)))
    with pytest.raises(ConfigError, match="does not free its memory"):
        refuse_unsupported(config, (), Devices(engines=("cpu",), learner=("cpu",)))


def test_each_engine_of_a_fleet_has_its_own_server() -> None:
    fleet = FleetConfig.model_validate({"kind": "vllm", "count": 2, "server": {"urls": ["http://a", "http://b"]}})
    devices = Devices(engines=("cpu", "cpu"), learner=("cpu",))
    assert [fleet.for_engine(place, devices).server.urls for place in range(2)] == [("http://a",), ("http://b",)]


def test_loop_of_ones_own_has_its_engine_in_its_process() -> None:
    with pytest.raises(ConfigError, match="a policy of a loop of its own"):
        validate(PolicyConfig, {"model": {"path": "m"}, "engine": {"kind": "vllm"}})


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ([], 1e-3),
        (["model.dtype=bfloat16"], 0.1),
        (["model.deterministic=true"], 0.0),
        (["sync.codec=cast_bf16"], 0.1),
        (["sync.codec=cast_fp8"], 0.25),
        (["model.dtype=bfloat16", "engine.temperature=0.5"], 0.2),
        ([*WAITS, 'engine.server.args=["--quantization", "fp8"]', "model.dtype=bfloat16"], 0.25),
        ([*WAITS, "model.dtype=bfloat16"], 0.1),
    ],
)
def test_gap_that_rounding_explains_follows_from_the_number_formats(
    settings: list[str], largest: float, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model")
    config = load_config({"model": {"path": str(model)}}, settings)
    assert compute_explained_gap(config) == largest


def test_experts_that_each_side_chooses_anew_explain_more(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = tiny_model(tmp_path / "model", kind="qwen3_moe", extra=experts)
    config = {"model": {"path": str(model), "dtype": "bfloat16"}}
    assert compute_explained_gap(load_config(config, [])) == 0.1
    assert compute_explained_gap(load_config(config, ["learner.keep_routing=false"])) == 0.25


@pytest.mark.parametrize("codec", ["cast_bf16", "cast_fp8"])
def test_codec_that_rounds_is_refused_where_bits_must_agree(codec: str) -> None:
    with pytest.raises(ConfigError, match=f"model.deterministic=true with sync.codec='{codec}'"):
        load_config({"model": {"path": "m"}}, ["model.deterministic=true", f"sync.codec={codec}"])
