"""Published configurations: simulated, and held against what was published."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.flow import FlowConfig
from headrace.wings.plan import SimulatedOutcome, Simulation, World
from headrace.wings.plan.catalogue import model
from headrace.wings.plan.costs import ConstantRate, Linear, Roofline, SyncCost, TrainingRate
from headrace.wings.plan.spread import ConstantSpread, Lognormal, Uniform
from headrace.wings.plan.workload import Workload

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "plan_cases.json").read_text())["cases"]
}
AT_ONCE = TrainingRate(tok_s=float("inf"))


def simulate(steps: int, flow: dict[str, Any], *, endless: bool = True, **parts: Any) -> SimulatedOutcome:
    return Simulation(World(flow=FlowConfig(**flow), steps=steps, endless=endless, **parts), seed=0).run()


@pytest.mark.parametrize("size", ["7B", "32B"])
@pytest.mark.parametrize("length", ["2K", "8K", "32K"])
def test_a_step_of_512_rollouts_takes_the_minutes_of_the_survey(size: str, length: str) -> None:
    case = CASES["survey_table"]
    given = case["inputs"]
    tokens = given["tokens_total_M"][length] * 1e6 / given["rollouts"]
    for engines, minutes in ((1, case["expect_minutes"][size][length]), (8, case["eight_gpus_32B_32K_minutes"])):
        if engines == 8 and (size, length) != ("32B", "32K"):
            continue
        outcome = simulate(
            1,
            {"policy": "synchronous", "groups_per_step": 64, "group_size": 8},
            engine=ConstantRate(tok_s=given["rate_tok_s"][size]), num_engines=engines, max_sequences=512,
            learner=AT_ONCE, workload=Workload(prompt_tokens=1, answer_tokens=ConstantSpread(value=tokens)),
        )  # fmt: skip
        assert outcome.seconds / 60 == pytest.approx(minutes, rel=case["tolerance"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTable:
    """A cost model from throughput measured at some batch sizes, interpolated linearly from 0 at batch size 0, and
    constant beyond the last."""

    nums: Sequence[int]
    """Batch sizes in sequences, ascending."""
    tok_s: Sequence[float]
    """Total tokens per second at each batch size."""
    prefill_tok_s: float = float("inf")

    def step_s(self, num: int, context: float) -> float:
        return num / float(np.interp(num, [0, *self.nums], [0.0, *self.tok_s]))

    def prefill_s(self, tokens: float) -> float:
        return tokens / self.prefill_tok_s


@pytest.mark.slow
def test_pipeline_of_128_gpus_is_as_much_faster_than_generating_and_training_in_turn_as_published() -> None:
    """A quarter of the cluster and of the batch: every ratio is the same."""
    case = CASES["pipelinerl_128"]
    given, part = case["inputs"], 4
    gpus, makers, batch = given["gpus"] // part, given["generation_gpus"] // part, given["batch"] // part
    held, tau = given["in_flight_per_gpu"], given["train_time_ratio_tau"]
    curve = RateTable(nums=(held,), tok_s=(given["U_at_192"],))
    work = Workload(prompt_tokens=1, answer_tokens=Uniform(high=1000))
    stream = simulate(
        600,
        {"groups_per_step": batch, "group_size": 1, "max_age": 400, "lead": 400, "capacity": held * makers},
        engine=curve, num_engines=makers, max_sequences=held, learner=TrainingRate(tok_s=(gpus - makers) / tau),
        workload=work,
    )  # fmt: skip
    late = stream.account(400)
    lag = max(age for step in stream.steps[400:] for age in step.ages)
    in_turn = simulate(
        2,
        {"policy": "synchronous", "groups_per_step": batch * max(case["expect"]["max_lag_steps"]), "group_size": 1},
        endless=False, engine=curve, num_engines=gpus, max_sequences=held, learner=TrainingRate(tok_s=gpus / tau),
        workload=work,
    ).account(0)  # fmt: skip
    speedup = late.per_second(late.trained_tokens) / in_turn.per_second(in_turn.trained_tokens)
    low, high = case["expect"]["max_lag_steps"]
    assert speedup == pytest.approx(case["expect"]["speedup_over_conventional"], rel=case["tolerance"])
    assert low * (1 - case["tolerance"]) <= lag <= high * (1 + case["tolerance"])


def areal(max_age: int, share: float, tok_s: float, steps: int) -> float:
    """Thousand trained tokens a second, of six engines and a learner: 1.5 billion parameters on an H800."""
    shape = model("qwen2.5-1.5b")
    engine = Roofline(
        weight_bytes=2.0 * shape.params, kv_bytes=2.0 * shape.kv_numbers, flop_per_token=2.0 * shape.active,
        bandwidth=share * 3.35e12, flops=share * 989e12, overhead_s=0.002,
    )  # fmt: skip
    flow = {"groups_per_step": 64, "group_size": 16, "max_age": max_age, "policy": "bounded"}
    outcome = simulate(
        steps, flow, engine=engine, num_engines=6, max_new_tokens=7936, cache_tokens=60e9 / engine.kv_bytes,
        learner=TrainingRate(tok_s=tok_s), sync=SyncCost(snapshot_s=0.1, travel_s=0.5, gap_s=0.1),
        workload=Workload(prompt_tokens=256, answer_tokens=Lognormal(mean=4000)),
    )  # fmt: skip
    return outcome.tok_s / 1e3


def test_throughput_at_every_age_follows_from_two_rows_of_areals_table() -> None:
    """The asynchronous row gives the learner's rate, the synchronous one how far the engines get of their roofline."""
    case = CASES["areal_8gpu_1.5B"]
    fit, predict = case["fit"], case["predict"]
    tok_s = 52e3
    for _ in range(2):
        tok_s *= fit["max_age_16_ktok_s"] / areal(16, 1.0, tok_s, 6)
    low, high = 0.1, 1.0
    for _ in range(5):
        share = (low * high) ** 0.5
        low, high = (share, high) if areal(0, share, tok_s, 3) < fit["max_age_0_ktok_s"] else (low, share)
    assert 0.3 < share < 0.8
    for age in (1, 2, 4):
        predicted = areal(age, share, tok_s, 8)
        assert predicted == pytest.approx(predict[f"max_age_{age}_ktok_s"], rel=case["tolerance"])


def test_where_training_takes_nearly_all_of_a_step_asynchrony_gains_nothing() -> None:
    case = CASES["train_bound_no_gain"]
    step_s, generating = case["inputs"]["sync_step_s"], 0.03
    times = {}
    for max_age in (0, 1):
        outcome = simulate(
            8,
            {"groups_per_step": 16, "group_size": 4, "max_age": max_age, "policy": "bounded"},
            engine=Linear(fixed_s=step_s * generating / 100), learner=TrainingRate(tok_s=float("inf"),
            fixed_s=step_s * (1 - generating)), workload=Workload(prompt_tokens=1, answer_tokens=100),
        )  # fmt: skip
        times[max_age] = outcome.step_s
    assert times[0] == pytest.approx(step_s, rel=0.01)
    assert times[1] / times[0] == pytest.approx(case["predict"]["async_over_sync"], rel=case["tolerance"])


def test_a_32b_model_decodes_about_48_tokens_a_second_at_16k_on_one_card() -> None:
    shape = model("qwen2.5-32b")
    roof = Roofline(
        weight_bytes=2.0 * shape.params, kv_bytes=2.0 * shape.kv_numbers, flop_per_token=2.0 * shape.active,
        bandwidth=3.35e12, flops=989e12,
    )  # fmt: skip
    assert 1 / roof.step_s(1, 16_384) == pytest.approx(48, rel=0.03)


def verl(flow: dict[str, Any], *, share: float, engines: int, learner_s: float, steps: int) -> SimulatedOutcome:
    """7 billion parameters on H20s, answers of up to 28K tokens; a quarter of the cluster and of the batch."""
    shape = model("qwen2.5-7b")
    engine = Roofline(
        weight_bytes=2.0 * shape.params, kv_bytes=2.0 * shape.kv_numbers, flop_per_token=2.0 * shape.active,
        bandwidth=share * 4.0e12, flops=share * 148e12, overhead_s=0.003,
    )  # fmt: skip
    return simulate(
        steps, {"group_size": 16, **flow}, engine=engine, num_engines=engines, max_sequences=1024,
        max_new_tokens=27_648, cache_tokens=55e9 / engine.kv_bytes,
        learner=TrainingRate(tok_s=float("inf"), fixed_s=learner_s),
        sync=SyncCost(snapshot_s=0.5, travel_s=2.0, gap_s=0.3),
        workload=Workload(prompt_tokens=256, answer_tokens=Lognormal(mean=2000)),
    )  # fmt: skip


def test_asynchronous_step_follows_from_the_synchronous_one() -> None:
    """The time of generation says how far the engines get of their roofline. The update takes what it takes on 16
    GPUs: it is the asynchronous run that published 269.8 s. Its steps take 128 prompts, four of them one batch of the
    synchronous run, and half a batch more may be in flight."""
    case = CASES["verl_fully_async_32"]
    sync, whole = case["inputs"]["sync_s"], {"policy": "synchronous", "groups_per_step": 128}
    low, high = 0.1, 1.0
    for _ in range(5):
        share = (low * high) ** 0.5
        first = verl(whole, share=share, engines=8, learner_s=1.0, steps=1)
        low, high = (share, high) if first.steps[0].wait_s > sync["generate"] else (low, share)
    rest_s = sync["step"] - sync["generate"]
    in_turn = verl(whole, share=share, engines=8, learner_s=rest_s, steps=2).account(0).seconds / 2
    assert in_turn == pytest.approx(sync["step"], rel=0.05)
    streamed = {"groups_per_step": 32, "lead": 5, "max_age": 12}
    predicted = 4 * verl(streamed, share=share, engines=4, learner_s=sync["update"] / 4, steps=40).step_s
    assert predicted == pytest.approx(case["predict"]["async_step_s"], rel=case["tolerance"])
