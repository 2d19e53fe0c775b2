"""Plans: what fits, what is found, what is said, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.models.shape import parse_shape
from headrace.run.cli.app import app
from headrace.run.session import load_config
from headrace.wings.plan import Cluster, ClusterFile, SizingRequest, Workload, load_cluster, make_site, plan, search
from headrace.wings.plan.catalogue import accelerator, accelerators, model, models
from headrace.wings.plan.picture import draw_plan
from headrace.wings.plan.planning import make_sizing_request
from headrace.wings.plan.search import Search, SearchResult
from headrace.wings.plan.sizing import engine_bytes, fit, learner_bytes, learner_sizes, spread_sizes, update_bytes
from headrace.wings.plan.words import describe, describe_verdict

RUN: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"},
    "engine": {"max_new_tokens": 512, "max_sequences": 256},
    "flow": {"groups_per_step": 8, "group_size": 4, "max_age": 1},
    "sync": {"transport": "group"},
    "learner": {"memory": {"recompute": True}},
}
BILLIONS = {
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.6, "qwen2.5-32b": 32.8,
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, less in {"EPISODES": 300, "LEAST_STEPS": 4, "COARSE": (0.25, 0.5, 0.75), "AGES": (1, 4)}.items():
        monkeypatch.setattr(search, name, less)


def asked(**changes: dict[str, Any]) -> SizingRequest:
    return make_sizing_request(load_config({**RUN, **changes}))


def found(cluster: dict[str, Any], workload: dict[str, Any] | None = None, **changes: dict[str, Any]) -> SearchResult:
    given = None if workload is None else Workload.model_validate(workload)
    site = make_site(asked(**changes), ClusterFile(cluster=Cluster.model_validate(cluster), workload=given))
    return Search(site=site, clock=RealClock(), seed=0).run_preview()


def test_every_model_of_the_catalogue_has_the_parameters_that_its_makers_tell() -> None:
    assert set(models()) == set(BILLIONS)
    for name, billions in BILLIONS.items():
        assert model(f"someone/{name.upper()}").params / 1e9 == pytest.approx(billions, rel=0.03), name
    assert model("qwen3-30b-a3b").active / 1e9 == pytest.approx(3.0, rel=0.1)


def test_accelerators_are_found_however_they_are_written_and_unknown_ones_cost_three_numbers() -> None:
    assert accelerator("mi300x").bandwidth_gb_s == 5300
    assert all(each.peak_tflops > 0 for each in accelerators().values())
    with pytest.raises(ConfigError, match="three numbers of it are needed") as refused:
        found({"accelerator": "X900", "count": 8})
    assert "cluster.peak_tflops" in refused.value.remedy
    assert "cluster.memory_gb" in refused.value.remedy
    given = {"peak_tflops": 500.0, "bandwidth_gb_s": 2000.0, "memory_gb": 96.0}
    assert found({"accelerator": "X900", "count": 16, **given}).requested.tok_s > 0


def test_cluster_that_cannot_hold_the_model_says_by_how_much_and_what_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"4 × A10G cannot hold qwen3-8b: .* GB too little") as refused:
        found({"accelerator": "A10G", "count": 4}, learner={"memory": {"recompute": True}})
    assert "qwen3-1.7b would fit; or set model.lora" in refused.value.remedy
    with pytest.raises(ConfigError, match=r"21\.6 GB can be used: [\d.]+ GB too little") as refused:
        found({"accelerator": "A10G", "count": 24}, learner={})
    assert "learner.memory.recompute = true, or lower learner.tokens_per_microbatch" in refused.value.remedy
    assert "learner.memory.offload_activations = true: " in refused.value.remedy


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ({"accelerator": "A10G", "count": 4}, "qwen3-8b"),
        ({"accelerator": "H100", "count": 1}, "qwen3-8b"),
        ({"accelerator": "H200", "count": 2}, "qwen3-32b"),
        ({"accelerator": "H100", "count": 2}, "qwen3-235b-a22b"),
        ({"accelerator": "H100", "count": 27, "per_node": 27}, "qwen3-235b-a22b"),
        ({"accelerator": "H100", "count": 64, "per_node": 4}, "qwen3-235b-a22b"),
    ],
)
def test_every_way_out_of_a_cluster_that_is_too_small_leads_to_a_plan(cluster: dict[str, Any], name: str) -> None:
    terms: dict[str, Any] = {"model": {"path": name, "dtype": "bfloat16"}, "learner": {"memory": {"recompute": True}}}
    with pytest.raises(ConfigError, match="GB too little") as refused:
        found(cluster, **terms)
    remedy = refused.value.remedy
    taken = re.search(r"take (\d+) ×", remedy)
    machines = re.search(r"machines of (\d+)", remedy)
    assert taken
    per_node = {} if machines is None else {"per_node": int(machines[1])}
    assert fits({**cluster, "count": int(taken[1]), **per_node}, **terms)
    if int(taken[1]) > cluster["count"]:
        assert not fits({**cluster, "count": int(taken[1]) - 1, **per_node}, **terms)
    smaller = re.search(r"model: (\S+) would fit", remedy)
    assert smaller is None or fits(cluster, **{**terms, "model": {"path": smaller[1], "dtype": "bfloat16"}})
    lora = {**terms, "model": {**terms["model"], "lora": {}}}
    assert ("set model.lora" in remedy) == fits(cluster, **lora)


def fits(cluster: dict[str, Any], **changes: dict[str, Any]) -> bool:
    try:
        make_site(asked(**changes), ClusterFile(cluster=Cluster.model_validate(cluster)))
    except ConfigError:
        return False
    return True


def test_way_out_that_does_not_lead_out_by_itself_is_not_named_alone() -> None:
    with pytest.raises(ConfigError, match=r"even with learner\.memory\.recompute = true") as refused:
        found({"accelerator": "H100", "count": 2}, model={"path": "qwen3-32b", "dtype": "bfloat16"}, learner={})
    assert re.search(r"take 1\d ", refused.value.remedy)
    with pytest.raises(ConfigError, match=r"needs [\d.]+ GB on each of any number of ranks") as refused:
        found(
            {"accelerator": "A10G", "count": 64},
            learner={"memory": {"recompute": True}, "tokens_per_microbatch": 2**20},
        )
    assert refused.value.remedy.startswith("lower learner.tokens_per_microbatch to ")


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b"])
def test_on_one_accelerator_engine_and_learner_take_turns(name: str) -> None:
    terms: dict[str, Any] = {"model": {"path": name, "dtype": "bfloat16"}, "learner": {"memory": {"recompute": True}}}
    site = make_site(asked(**terms), ClusterFile(cluster=Cluster(accelerator="H100", count=1)))
    assert not site.fit.beside
    made = plan(site, RealClock())
    assert made.requested.choice.shared
    assert made.best.choice.shared
    assert made.requested.outcome.max_age == 0
    words = " ".join(describe(made))
    assert "In turn: all 1 in turn" in words
    assert 'To take turns, set flow.max_age = 0 and sync.interrupt = "sleep"' in words
    set_so = {"flow": {**RUN["flow"], "max_age": 0}, "sync": {"interrupt": "sleep"}}
    site = make_site(asked(**terms, **set_so), ClusterFile(cluster=Cluster(accelerator="H100", count=1)))
    assert "The run is set to take turns" in " ".join(describe(plan(site, RealClock())))
    assert b">synchronous</text>" in draw_plan(made)
    with pytest.raises(ConfigError, match="take turns") as refused:
        plan(site, RealClock(), generation=1)
    assert refused.value.remedy == "leave --generation out"


def test_accelerators_that_are_no_whole_engines_or_leave_no_learner_are_refused() -> None:
    site = make_site(asked(), ClusterFile(cluster=Cluster(accelerator="H100", count=8)))
    with pytest.raises(ConfigError, match="--generation 99 is not possible on 8 × H100") as refused:
        plan(site, RealClock(), generation=99)
    assert f"at most {8 - site.fit.least_learner}" in refused.value.remedy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cluster]\naccelerator = 'H100'\ncount = 8\ngeneration_tok_s = 5\n", "without cluster.training_tok_s"),
        ("[cluster]\naccelerator = 'H100'\ncount = 8\ntraining_tok_s = 5\n", "without cluster.generation_tok_s"),
        ("[cluster]\naccelerator = 'H100'\ncount = 8\n[workload]\nsolved = [0, 1]\n", r"solved\[0\]=0"),
        ("[cluster]\naccelerator = 'H100'\ncount = 8\n[workload]\nturns = true\n", "turns=True"),
        (
            "[cluster]\naccelerator = 'H100'\ncount = 8\n[workload]\n"
            "answer_tokens = {kind = 'uniform', low = 9, high = 5}\n",
            "from low=9 to high=5",
        ),
        ("[cluster]\naccelerator = \n", r"cluster file .* is not TOML"),
    ],
)
def test_nonsense_in_a_cluster_file_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_cluster(file)
    with pytest.raises(ConfigError, match=r"cluster file .* does not exist"):
        load_cluster(tmp_path / "none.toml")


@pytest.mark.slow
def test_asynchrony_gains_where_answers_differ_and_loses_where_a_split_starves_the_learner() -> None:
    spread = {"answer_tokens": {"kind": "lognormal", "mean": 300, "cv": 1.0}}
    cluster = {"accelerator": "H100", "count": 16}
    gains = plan(
        make_site(asked(), ClusterFile(cluster=Cluster(**cluster), workload=Workload.model_validate(spread))),
        RealClock(),
    )
    assert gains.requested.tok_s > 1.1 * gains.synchronous.tok_s
    assert any("Asynchrony gains" in line for line in describe(gains))
    assert gains.best.tok_s >= gains.requested.tok_s * 0.98
    assert len(gains.tried) > 8
    # two accelerators, and generation is nearly free: half of them idle, while in turn both would train
    constant = {"accelerator": "H200", "count": 2, "generation_tok_s": 1e6, "training_tok_s": 5e3}
    small = {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}
    loses = plan(
        make_site(
            asked(model=small), ClusterFile(cluster=Cluster(**constant), workload=Workload.model_validate(spread))
        ),
        RealClock(),
    )
    said = " ".join(describe(loses))
    assert "Asynchrony loses" in said
    assert "learner-bound" in said
    assert "constant rates" in said
    assert loses.best.choice.shared
    assert b">best</text>" in draw_plan(loses)


def test_plan_of_a_run_without_a_bound_takes_no_longer_than_another() -> None:
    cluster = {"accelerator": "H100", "count": 16}
    far = {"policy": {"kind": "unbounded"}, "max_age": 10**9, "lead": 10**9}
    assert found(cluster, flow=far).requested.tok_s > 0
    assert found(cluster, flow={"max_age": 10**9}).requested.tok_s > 0


def test_line_of_a_dry_run_names_view_rate_and_what_holds_it_up() -> None:
    line = describe_verdict(found({"accelerator": "H100", "count": 16}))
    assert line.startswith("Plan (16 × H100; roofline: 60%")
    assert "trained tokens/s" in line
    assert "-bound" in line or "taking turns" in line


def test_plan_says_whether_it_counts_the_time_of_environments_and_rewards() -> None:
    cluster = {"accelerator": "H100", "count": 16}
    words = "The time of environments and rewards is not counted"
    for work, uncounted in (({}, True), ({"reward_s": 0.5}, False), ({"turn_s": 2.0}, False)):
        result = found(cluster, work)
        assert (words in describe_verdict(result)) == uncounted
        assert (words in describe(result)[0]) == uncounted


def test_program_prints_a_plan_as_words_and_as_json_and_refuses_in_words(tmp_path: Path) -> None:
    run, cluster = tmp_path / "run.toml", tmp_path / "cluster.toml"
    run.write_text(
        '[model]\npath = "qwen3-0.6b"\ndtype = "bfloat16"\n[engine]\nmax_new_tokens = 64\n'
        "[flow]\ngroups_per_step = 4\ngroup_size = 2\n[algo]\ncorrection = 'tis'\n"
    )
    cluster.write_text(
        '[cluster]\naccelerator = "H100"\ncount = 8\n[workload]\nanswer_tokens = 40\nprompt_tokens = 10\n'
    )
    runner = CliRunner()
    both = ["plan", str(run), "--cluster", str(cluster)]
    # model.path is made absolute in a run file: its last part is what the catalogue knows
    told = runner.invoke(app, [*both, "--generation", "4"])
    assert told.exit_code == 0, told.output
    assert "As asked: 4 generate" in told.output
    for nowhere in (tmp_path / "none" / "plan.svg", tmp_path, tmp_path / "plan.png"):
        refused = runner.invoke(app, [*both, "--picture", str(nowhere)])
        assert isinstance(refused.exception, ConfigError)
        assert "--picture" in refused.exception.problem
    tree = json.loads(runner.invoke(app, [*both, "--generation", "4", "--json"]).stdout)
    assert tree["asked"]["generation"] == 4
    assert {"view", "fit", "best", "synchronous", "tried", "words"} <= set(tree)
    cluster.write_text('[cluster]\naccelerator = "H100"\ncount = 8\nnodes = 2\n')
    refused = runner.invoke(app, both)
    assert isinstance(refused.exception, ConfigError)
    assert "cluster.nodes" in str(refused.exception)


def test_scores_are_counted_where_padded_attention_is_asked_for() -> None:
    model = {"path": "openai/gpt-oss-20b", "dtype": "bfloat16"}
    padded = {"attention": "padded", "tokens_per_microbatch": 8192, "share_prefixes": False}

    def score_bytes(**changes: Any) -> float:
        return learner_sizes(asked(**changes), 1024).score_bytes()

    assert score_bytes(model=model, learner={"tokens_per_microbatch": 8192}) == 0
    assert score_bytes(model=model, learner=padded) == 24 * 64 * 6 * 8192 * 1024
    assert score_bytes(learner=padded) == 0  # torch has a kernel for plain attention
    assert score_bytes(learner={**padded, "share_prefixes": True}) > 0  # and none with a mask


V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "vocab_size": 129280, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip


def learner_with(**settings: Any) -> dict[str, Any]:
    return {"memory": {"recompute": True}, "share_prefixes": False, **settings}


@pytest.mark.parametrize(
    ("shape", "tokens", "way", "ranks"),
    [(None, 131_072, "context", {"context": 8}), (V3, 8192, "expert", {"expert": 64, "data": 64})],
)
def test_a_learner_that_fits_by_its_other_ranks_is_planned_with_them(
    shape: dict[str, Any] | None, tokens: int, way: str, ranks: dict[str, int]
) -> None:
    def request(ranks: dict[str, int]) -> SizingRequest:
        made = asked(
            engine={**RUN["engine"], "max_context": tokens},
            learner=learner_with(tokens_per_microbatch=tokens, parallel=ranks),
        )
        return made if shape is None else replace(made, shape=parse_shape("v3", shape))

    cluster = Cluster(accelerator="H100", count=1024, per_node=64)
    division = fit(request(ranks), cluster, tokens)
    assert division.beside
    assert division.least_learner % ranks[way] == 0
    sizes = spread_sizes(request(ranks), tokens, 128)
    assert (sizes.config.parallel.world, getattr(sizes.config.parallel, way)) == (128, ranks[way])
    with pytest.raises(ConfigError, match="on each of any number of ranks") as refused:
        fit(request({}), cluster, tokens)
    assert f"learner.parallel.{way} = " in refused.value.remedy


def test_the_map_and_the_plan_tell_the_same_memory_of_a_rank() -> None:
    """The ranks of the run file are those that train: the plan changes nothing about them."""
    request = asked(learner=learner_with(parallel={"data": 2, "replicate": 2, "context": 2}))
    assert spread_sizes(request, 512, 8) == learner_sizes(request, 512)
    assert spread_sizes(request, 512, 11) == learner_sizes(request, 512)
    alone = asked(learner=learner_with(parallel={"data": 2, "context": 2}))
    assert learner_bytes(request) == 2 * learner_bytes(alone), "each replica has the whole learner"
    assert update_bytes(request) == 2 * update_bytes(alone)


def test_only_as_many_accelerators_train_as_the_ranks_of_the_run_divide() -> None:
    search = found({"accelerator": "H100", "count": 16}, learner=learner_with(parallel={"context": 8}))
    choice = search.requested.choice
    assert {search.site.trainers(replace(choice, generation=count, shared=False)) for count in range(1, 9)} == {8}
    assert search.site.trainers(replace(choice, shared=True)) == 16


def test_an_update_reads_and_writes_the_same_bytes_wherever_they_are_kept() -> None:
    plain = asked()
    moved = asked(learner={"memory": {"recompute": True, "offload_optimizer": True}, "reference": {"kind": "frozen"}})
    assert update_bytes(moved) == update_bytes(plain) == 18 * plain.shape.params
    assert learner_bytes(moved) == (2 + 2) * plain.shape.params


def test_the_reference_of_a_penalty_is_counted() -> None:
    without, penalty = asked(), asked(algo={"loss": {"kind": "grpo", "kl_coef": 0.1}})
    assert learner_bytes(penalty) == learner_bytes(without) + 2 * without.shape.params


def test_an_engine_in_turn_gets_what_the_learner_does_not_keep_between_its_steps() -> None:
    request = asked(model={"path": "qwen3-1.7b", "dtype": "bfloat16"})
    found = fit(request, Cluster(accelerator="H100", count=1), 512)
    free = 72e9 - learner_bytes(request) - engine_bytes(request)
    assert found.shared_tokens == pytest.approx(free / (2 * request.shape.kv_numbers))
    beside = fit(request, Cluster(accelerator="H100", count=2), 512)
    rank = spread_sizes(request, 512, 1)
    assert beside.pass_bytes == rank.footprint().total_bytes - learner_bytes(request) > 2 * request.shape.params
    assert f"{beside.pass_bytes / 1e9:.1f} GB for a pass on each" in str(beside)
