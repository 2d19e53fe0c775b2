from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.base.errors import ModelError
from headrace.base.types.recorded import Experts, Routing
from headrace.learner.parallel.load import keep_inputs_only
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PLAN, PackedPlan, forward
from headrace.models.mixtures import routes
from headrace.models.routing import RoutingRecorder, RoutingReplay, find_routing
from tests.models.families import family
from tests.models.routed import FAMILIES, HIDDEN, LAYERS, VOCAB, all_known, build, choose, find_routed, gates, perturb
from tools.families.tiny import write_model

QUICK = (
    *("afmoe", "ernie4_5_moe", "gemma4_moe", "jamba", "lfm2_moe", "llama4_text", "minimax_m2", "nemotron_h"),
    "qwen3_5_moe_text",
)
REPLAYED = (
    *QUICK,
    *("aria_text", "axk1", "beam", "cohere2_moe", "deepseek_v2", "dots1", "exaone_moe", "flex_olmo", "flint"),
    *(
        "glm4_moe_lite",
        "glm4v_moe",
        "glm_moe_dsa",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
    ),
    *("kolibri1", "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "minimax_m3_vl_text", "qwen2_moe"),
    *("qwen3_next", "qwen3_vl_moe", "solar_open"),
)
"""Families whose formula is found by what their routers compute, the first of them in every run of the tests."""

LENGTHS = [5, 9, 1, 7]
N = sum(LENGTHS)
IDS_N = torch.randint(0, VOCAB, (N,), generator=torch.Generator().manual_seed(1))


class Moe:
    """A model with a recorder and a replay, and what its routers are given."""

    def __init__(self, kind: str, **settings: Any) -> None:
        self.kind = kind
        self.model = build(kind, **settings)
        self.routed = find_routed(self.model)
        self.recorder = RoutingRecorder(self.routed)
        self.replay = RoutingReplay(self.routed)
        self.recorder.on = True
        self.hidden: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.routed.layers):
            layer.router.register_forward_pre_hook(self._watch(index))

    def run(self, ids: torch.Tensor = IDS_N, lengths: list[int] = LENGTHS) -> torch.Tensor:
        return forward(self.model, ids, PackedPlan(lengths))

    def recorded(self) -> Experts:
        with torch.inference_mode():
            self.run()
        return self.recorder.take()

    def logits(self, index: int) -> torch.Tensor:
        """What router ``index`` scored last, in float64, by hand."""
        router: Any = self.routed.layers[index].router
        logits = self.hidden[index].double() @ router.weight.double().T
        return logits + router.bias.double() if self.kind == "gpt_oss" else logits

    def _watch(self, index: int) -> Callable[..., None]:
        def note(router: Any, args: Any) -> None:
            self.hidden[index] = args[0].detach().reshape(-1, HIDDEN)

        return note


@pytest.fixture(params=sorted(FAMILIES))
def moe(request: pytest.FixtureRequest) -> Moe:
    return Moe(request.param)


def test_recorded_experts_are_those_that_the_logits_ask_for_best_first(moe: Moe) -> None:
    experts = moe.recorded()
    assert experts.shape == (N, LAYERS.get(moe.kind, 3), 2)
    assert experts.dtype == np.uint8
    assert moe.routed.problem(experts) == ""
    for index, layer in enumerate(moe.routed.layers):
        expected = choose(moe.kind, layer.router, moe.logits(index))
        found = experts[:, index].tolist()
        if moe.kind in {"deepseek_v3", "glm4_moe"}:  # their top-k does not sort
            found, expected = [sorted(row) for row in found], [sorted(row) for row in expected]
        assert found == expected


def test_replaying_what_the_weights_would_choose_changes_no_bit(moe: Moe) -> None:
    live = moe.run()
    live.sum().backward()
    gradients = [parameter.grad for parameter in moe.model.parameters()]
    moe.model.zero_grad()
    routing = all_known(moe.recorder.take())
    with moe.replay(routing) as seen:
        replayed = moe.run()
    replayed.sum().backward()
    assert torch.equal(live, replayed)
    assert (seen.differing, seen.total) == (0, N * moe.routed.num_layers)
    for before, parameter in zip(gradients, moe.model.parameters(), strict=True):
        assert (before is None) == (parameter.grad is None)
        if before is not None:
            torch.testing.assert_close(parameter.grad, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "normalised"), [("qwen3_moe", False), ("olmoe", True), ("deepseek_v3", False), ("glm4_moe", False)]
)
def test_gates_follow_the_setting_that_normalises_them(kind: str, normalised: bool) -> None:
    moe = Moe(kind, norm_topk_prob=normalised)
    with torch.inference_mode():
        live = moe.run()
    with moe.replay(all_known(moe.recorder.take())), torch.inference_mode():
        assert torch.equal(moe.run(), live)


def test_replay_holds_when_the_trunk_is_run_without_its_head(moe: Moe) -> None:
    others = _others(moe.recorded(), 8)
    plan = PackedPlan(LENGTHS)
    with moe.replay(all_known(others)), torch.inference_mode():
        moe.model.model(
            input_ids=IDS_N[None], position_ids=plan.positions_N[None], use_cache=False, **{PLAN: plan}
        )  # fmt: skip
    assert (moe.recorder.take() == others).all()


def test_under_other_weights_replay_keeps_the_experts_that_live_routing_leaves(moe: Moe) -> None:
    experts = moe.recorded()
    perturb(moe.model)
    assert (moe.recorded() != experts).any()
    with moe.replay(all_known(experts)) as seen:
        replayed = moe.recorded()
    assert (replayed == experts).all()
    assert 0 < seen.differing < seen.total
    with moe.replay(all_known(experts), forced=False) as watched:
        live = moe.recorded()
    sets_differ = (np.sort(live, -1) != np.sort(experts, -1)).any(-1)
    assert watched.differing == sets_differ.sum()


def test_router_learns_from_the_gates_of_the_recorded_experts(moe: Moe) -> None:
    experts = moe.recorded()
    perturb(moe.model)
    given = _watch_gates(moe)
    with moe.replay(all_known(experts)):
        logits = moe.run()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    for index, layer in enumerate(moe.routed.layers):
        router: Any = layer.router
        chosen = torch.from_numpy(experts[:, index].astype(np.int64))
        scores = moe.logits(index).detach().requires_grad_()
        expected = gates(moe.kind, router, scores, chosen)
        torch.testing.assert_close(given[index].detach().double(), expected.detach(), rtol=1e-5, atol=1e-6)
        assert given[index].grad is not None
        (slope,) = torch.autograd.grad(expected, scores, given[index].grad.double())
        weight_grad = slope.T @ moe.hidden[index].double()
        scale = float(weight_grad.abs().max())
        assert scale > 1e-4
        torch.testing.assert_close(router.weight.grad.double(), weight_grad, rtol=1e-3, atol=1e-4 * scale)


def test_every_recorded_expert_has_a_gate_with_a_gradient_even_one_that_would_not_be_chosen(moe: Moe) -> None:
    live = moe.recorded()
    others = _others(live, moe.routed.num_experts)
    given = _watch_gates(moe)
    with moe.replay(all_known(others)):
        moe.run().square().sum().backward()
    for index, values in given.items():
        assert (values > 0).all()
        assert values.grad is not None
        assert (values.grad != 0).all()
        grad: Any = moe.routed.layers[index].router.weight.grad
        assert (grad[torch.from_numpy(np.unique(others[:, index])).long()] != 0).any(-1).all()


def test_one_tampered_row_is_seen(moe: Moe) -> None:
    experts = moe.recorded()
    experts[4, 1] = _others(experts, moe.routed.num_experts)[4, 1]
    with moe.replay(all_known(experts), forced=False) as seen, torch.inference_mode():
        moe.run()
    assert seen.differing == 1


def test_another_order_of_a_tokens_experts_is_the_same_choice(moe: Moe) -> None:
    experts = moe.recorded()[..., ::-1].copy()
    with moe.replay(all_known(experts)) as seen, torch.inference_mode():
        moe.run()
    assert seen.differing == 0


def test_unknown_tokens_are_routed_live(moe: Moe) -> None:
    live = moe.recorded()
    with torch.inference_mode():
        logits = moe.run()
    known = np.arange(N) % 3 == 0
    others = _others(live, moe.routed.num_experts)
    with moe.replay(Routing.unknown(N, num_layers=live.shape[1], top_k=2)) as nothing, torch.inference_mode():
        assert torch.equal(moe.run(), logits)
    assert (nothing.differing, nothing.total) == (0, 0)
    with moe.replay(Routing(known_T=known, experts_RLK=others[known])) as seen:
        used = moe.recorded()
    assert (used[known] == others[known]).all()
    assert (used[~known, 0] == live[~known, 0]).all()  # nothing before the first layer was replayed
    assert seen.total == known.sum() * live.shape[1]


def test_sequences_may_be_packed_in_another_order(moe: Moe) -> None:
    experts = moe.recorded()
    perturb(moe.model)
    with moe.replay(all_known(experts)), torch.inference_mode():
        together = moe.run()
    order = [3, 0, 2, 1]
    spans = np.split(np.arange(N), np.cumsum(LENGTHS)[:-1])
    places = np.concatenate([spans[sequence] for sequence in order])
    with moe.replay(all_known(experts).take(places)), torch.inference_mode():
        shuffled = moe.run(IDS_N[torch.from_numpy(places)], [LENGTHS[sequence] for sequence in order])
    torch.testing.assert_close(shuffled, together[torch.from_numpy(places)], rtol=1e-4, atol=1e-4)


def test_activations_computed_again_route_as_they_did(moe: Moe) -> None:
    experts = moe.recorded()
    perturb(moe.model)

    def gradients(routing: Routing) -> list[torch.Tensor | None]:
        moe.model.zero_grad()
        with moe.replay(routing) as seen:
            first = moe.run()
        with moe.replay(all_known(_others(experts, 8))):  # another pass, before the backward of the first
            moe.run()
        before = seen.differing
        first.square().mean().backward()
        assert seen.differing == before
        return [parameter.grad for parameter in moe.model.parameters()]

    plain = gradients(all_known(experts))
    keep_inputs_only(moe.model)
    calls: list[int] = []
    moe.routed.layers[0].router.register_forward_hook(lambda *args: calls.append(1))
    again = gradients(all_known(experts))
    assert len(calls) == 3  # two passes, and one of them again
    for one, other in zip(plain, again, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_replay_holds_however_experts_are_computed(implementation: str) -> None:
    moe = Moe("qwen3_moe")
    experts = moe.recorded()
    perturb(moe.model)
    with moe.replay(all_known(experts)), torch.inference_mode():
        expected = moe.run()
    moe.model.set_experts_implementation(implementation)
    with moe.replay(all_known(experts)), torch.inference_mode():
        torch.testing.assert_close(moe.run(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gates_keep_the_precision_of_the_router(moe: Moe, dtype: torch.dtype) -> None:
    other = Moe(moe.kind, dtype=dtype)
    other.model.set_experts_implementation("eager")  # the others do not know float64
    with torch.inference_mode():
        live = other.run()
    with other.replay(all_known(other.recorder.take())) as seen, torch.inference_mode():
        assert torch.equal(other.run(), live)
    assert seen.differing == 0


def test_more_than_256_experts_are_recorded_in_two_bytes() -> None:
    moe = Moe("qwen3_moe", num_experts=300, moe_intermediate_size=4, num_experts_per_tok=6)
    experts = moe.recorded()
    assert experts.dtype == np.uint16 == moe.routed.dtype
    assert experts.max() >= 256
    assert experts[:, 2].tolist() == choose("qwen3_moe", moe.routed.layers[2].router, moe.logits(2))
    perturb(moe.model)
    with moe.replay(all_known(experts)):
        assert (moe.recorded() == experts).all()


def test_layers_without_experts_are_not_counted() -> None:
    routed = find_routed(build("qwen3_moe", mlp_only_layers=[1]))
    assert routed.num_layers == 2
    assert (routed.top_k, routed.num_experts) == (2, 8)


def test_dense_model_has_no_routing() -> None:
    assert find_routing(build("qwen3")) is None
    assert find_routing(build("qwen3_moe", mlp_only_layers=[0, 1, 2])) is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("jetmoe", {"num_local_experts": 4, "kv_channels": 8}), ("phimoe", {"num_local_experts": 4})],
)
def test_routers_of_an_unknown_formula_are_refused_by_name(kind: str, settings: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=8, **sizes, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    words = rf"{type(model).__name__} is a mixture of experts \((?s:.)*Router|Gating(?s:.)*keep_routing = false"
    with pytest.raises(ModelError, match=words):
        find_routing(model)
    with pytest.raises(ModelError, match=words):
        routes(config)


class HalfOfASigmoid(torch.nn.Module):
    """A router that no family has."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.num_experts = config.num_experts_per_tok, config.num_experts
        self.routed_scaling_factor = 0.5
        self.weight = torch.nn.Parameter(torch.randn(config.num_experts, config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_NE = hidden_states @ self.weight.T
        scores_NK, experts_NK = logits_NE.sigmoid().topk(self.top_k, dim=-1)
        return logits_NE, self.weigh(scores_NK), experts_NK

    def weigh(self, scores_NK: torch.Tensor) -> torch.Tensor:
        return scores_NK / (scores_NK.sum(-1, keepdim=True) + 1e-6) * self.routed_scaling_factor


class SquaredRouter(HalfOfASigmoid):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_NE, scores_NK, experts_NK = super().forward(hidden_states)
        return logits_NE, scores_NK**2, experts_NK


class HalfRouter(HalfOfASigmoid):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(hidden_states)


def test_formula_of_an_unknown_family_is_found_by_what_its_router_computes() -> None:
    model = build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate = HalfRouter(model.config)
    known = find_routed(model).known
    assert (known.top_k, known.num_experts, known.gives_logits, known.chooses_by_logits) == (2, 8, True, True)
    router, logits_NE = model.model.layers[0].mlp.gate, torch.randn(9, 8)
    experts_NK = torch.randint(0, 8, (9, 2))
    expected = router.weigh(logits_NE.sigmoid().gather(1, experts_NK))
    assert torch.equal(known.gates(router, logits_NE, experts_NK), expected)
    for layer in model.model.layers:
        layer.mlp.gate = SquaredRouter(model.config)
    with pytest.raises(ModelError, match=r"\(SquaredRouter\) whose routing can be neither"):
        find_routing(model)


@pytest.mark.parametrize(
    "kind", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in REPLAYED]
)
def test_every_family_replays_its_own_experts_bit_for_bit_and_others_where_they_are_given(
    kind: str, tmp_path: Path
) -> None:
    path = str(write_model(tmp_path / "model", kind) if kind != "gemma4_moe" else family(tmp_path / "model", kind))
    model = load_model(ModelConfig(path=path))
    assert routes(model.config)
    routed = find_routed(model)
    if kind in QUICK:
        assert routed.known.chooses_by_logits == (kind in {"gemma4_moe", "jamba", "llama4_text", "qwen3_5_moe_text"})
        assert routed.known.gives_logits == (kind != "gemma4_moe")
    recorder, replay = RoutingRecorder(routed), RoutingReplay(routed)
    recorder.on = True

    def run(routing: Routing | None = None) -> tuple[torch.Tensor, Experts]:
        with nullcontext() if routing is None else replay(routing):
            logits_NV = forward(model, IDS_N, PackedPlan(LENGTHS))
        return logits_NV, recorder.take()

    def gradients() -> list[torch.Tensor | None]:
        model.zero_grad()
        given = run(all_known(others))[0]
        run(all_known(experts))  # another pass, before the backward of the first
        given.backward(weights_NV)
        return [parameter.grad for parameter in model.parameters()]

    with torch.inference_mode():
        live, experts = run()
        assert torch.equal(run(all_known(experts))[0], live)
        others = ((experts + 1) % routed.num_experts).astype(experts.dtype)
        given, used = run(all_known(others))
    if routed.known.dense:  # weights of all experts have no order
        used, others = np.sort(used, -1), np.sort(others, -1)
    assert (used == others).all()
    assert not torch.allclose(given, live, atol=1e-3)
    weights_NV = torch.randn(live.shape, generator=torch.Generator().manual_seed(2))
    plain = gradients()
    keep_inputs_only(model)
    for one, other in zip(plain, gradients(), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


def test_wrapping_the_model_leaves_its_routing_where_it_is() -> None:
    model = build("qwen3_moe")
    wrapped = torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": model})})
    expected = find_routed(model)
    assert find_routed(wrapped) == expected
    router = expected.layers[1].router
    router.__class__ = type("FSDPRouter", (type(router),), {})  # what fully_shard does to a module
    assert find_routed(wrapped) == expected


def test_recorder_takes_each_pass_once_and_only_when_on() -> None:
    moe = Moe("mixtral")
    moe.recorded()
    with pytest.raises(ModelError, match="no routing was recorded in 3 of 3 layers"):
        moe.recorder.take()
    moe.recorder.on = False
    moe.run()
    with pytest.raises(ModelError, match=r"set recorder\.on"):
        moe.recorder.take()


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (np.zeros((2, 3, 3), np.uint8), r"shape \(2, 3, 3\) for 3 layers of 2 experts"),
        (np.zeros((2, 4, 2), np.uint8), r"shape \(2, 4, 2\) for 3 layers of 2 experts"),
        (np.array([[[0, 1]] * 3, [[0, 1], [0, 8], [0, 1]]], np.uint8), "row 1, layer 1: expert 8 of 8"),
        (np.array([[[0, 1]] * 3, [[0, 1], [0, 1], [5, 5]]], np.uint8), r"row 1, layer 2: the experts \[5, 5\]"),
        (np.array([[[0, 1]] * 3] * 2, np.int64), "dtype int64"),
    ],
)
def test_routing_that_the_model_cannot_have_chosen_is_refused(experts: Experts, words: str) -> None:
    moe = Moe("mixtral")
    with pytest.raises(ModelError, match=words), moe.replay(all_known(experts)):
        pytest.fail("it was not refused")


def test_routing_of_other_tokens_is_refused() -> None:
    moe = Moe("mixtral")
    routing = all_known(moe.recorded()[:-1])
    with pytest.raises(ModelError, match=rf"{N} tokens under the routing of {N - 1}"), moe.replay(routing):
        moe.run()


def test_replay_without_a_pass_is_an_error() -> None:
    moe = Moe("mixtral")
    with (
        pytest.raises(ModelError, match="reached 0 of 3 routers"),
        moe.replay(Routing.unknown(N, num_layers=3, top_k=2)),
    ):
        pass


def test_after_the_block_nothing_is_replayed() -> None:
    moe = Moe("olmoe")
    live = moe.recorded()
    with moe.replay(all_known(_others(live, 8))):
        assert (moe.recorded() != live).any()
    assert (moe.recorded() == live).all()


def _others(experts_NLK: Experts, num_experts: int) -> Experts:
    """For each choice of two experts two that are in it at most once, and not the same."""
    first = (experts_NLK.max(-1) + 1) % num_experts
    first = np.where((first[..., None] == experts_NLK).any(-1), (first + 1) % num_experts, first)
    return np.stack([first, experts_NLK[..., 0]], axis=-1).astype(experts_NLK.dtype)


def _watch_gates(moe: Moe) -> dict[int, torch.Tensor]:
    """What the routers give from now on; keeps the gradient."""
    given: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        def note(router: Any, args: Any, output: Any) -> None:
            output[1].retain_grad()
            given[index] = output[1]

        return note

    for index, layer in enumerate(moe.routed.layers):
        layer.router.register_forward_hook(keep(index))
    return given
