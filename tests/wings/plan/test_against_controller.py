"""The simulator beside the real controller: the same groups of the same lengths, on fakes in virtual time."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace.wings.plan
from headrace.base.types.episode import EpisodeKey
from headrace.flow import Flow, FlowConfig
from headrace.flow.policies import Bounded, StalenessPolicy
from headrace.flow.state import FlowState
from headrace.flow.tuning import Concurrency
from headrace.rollout.runner import episode_seed
from headrace.testing import FakeEngine, FakeLearner, FakeScorer, fakes, lognormal_lengths
from headrace.wings.plan.costs import Linear, SyncCost, TrainingRate
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.simulator import Simulation
from headrace.wings.plan.spread import ConstantSpread, Spread
from headrace.wings.plan.workload import Workload
from headrace.wings.plan.world import World
from tests.control.lives import Life, Plan, live

LENGTH = lognormal_lengths(60, 1.0, 400)
STEPS, SIZE = 12, 4
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {"policy": "synchronous", "max_age": 0},
    "one ahead": {"policy": "one_ahead"},
    "bounded": {"max_age": 2},
    "bounded, less lead": {"max_age": 3, "lead": 1},
    "bounded, strict": {"max_age": 2, "order": "strict"},
    "windowed": {"policy": {"kind": "windowed", "window": 2}, "max_age": 3},
    "reject": {"policy": "unbounded", "max_age": 1, "lead": 4},
    "drop oldest": {"policy": {"kind": "unbounded", "stale": "drop_oldest"}, "max_age": 2, "lead": 1},
    "wait": {"policy": {"kind": "unbounded", "stale": "wait"}, "max_age": 2, "lead": 4},
    "redundant episodes": {"max_age": 2, "filters": [{"kind": "redundancy", "keep": 3}]},
}


class SameLengths(Spread):
    """The lengths that the fakes give, group by group."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        keys = [EpisodeKey(place // SIZE, place % SIZE) for place in range(count)]
        return np.array([LENGTH(episode_seed(0, key)) for key in keys], np.float64)


def flow_of(name: str) -> dict[str, Any]:
    return {"groups_per_step": 4, "group_size": SIZE, **POLICIES[name]}


def lived(run_dir: Path, name: str, token_s: float) -> Life:
    return live(
        Plan(run_dir=run_dir, steps=STEPS, num_tasks=4000, flow=flow_of(name), engine=lambda: FakeEngine(length=LENGTH),
             learner=lambda: FakeLearner(token_s=token_s), scorer=lambda: FakeScorer(seconds=0.3)),
    )  # fmt: skip


def simulated(name: str, token_s: float) -> SimulatedOutcome:
    work = Workload(prompt_tokens=ConstantSpread(value=1), reward_s=ConstantSpread(value=0.3))
    world = World(
        flow=Plan(run_dir=Path(), flow=flow_of(name)).settings().flow,
        steps=STEPS,
        engine=Linear(fixed_s=0.01),
        max_sequences=10_000,
        learner=TrainingRate(tok_s=1 / token_s),
        sync=SyncCost(snapshot_s=0.001, travel_s=0.011),
        workload=work.model_copy(update={"answer_tokens": SameLengths()}),
    )
    return Simulation(world, seed=0, check=True).run()


def shares(ages: dict[int, float]) -> dict[int, float]:
    total = sum(ages.values())
    return {age: tokens / total for age, tokens in ages.items()}


@pytest.mark.parametrize(
    ("name", "token_s"), [*((name, 0.0005) for name in POLICIES), ("bounded", 0.004)]
)  # fmt: skip
def test_simulator_and_controller_agree_on_time_ages_and_drops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, token_s: float
) -> None:
    monkeypatch.setattr(fakes, "CHUNK_TOKENS", 2)  # all tokens of a chunk have the version that the first has
    life, outcome = lived(tmp_path, name, token_s), simulated(name, token_s)
    assert outcome.seconds == pytest.approx(life.summary.wall_s, rel=0.005)
    dropped = life.summary.ledger.groups.dropped  # of two things at one moment either may be the reason
    assert sum(outcome.dropped_groups.values()) == pytest.approx(sum(dropped.values()), abs=1)
    assert sum(step.tokens for step in outcome.steps) == pytest.approx(life.summary.tokens_trained, rel=0.01)
    ages: dict[int, float] = {}
    for step in outcome.steps:
        for age, tokens in step.ages.items():
            ages[age] = ages.get(age, 0.0) + tokens
    assert max(ages) == life.summary.max_token_age
    mean = sum(age * share for age, share in shares(ages).items())
    lived_mean = sum(age * share for age, share in shares(dict(life.summary.age_histogram)).items())
    assert mean == pytest.approx(lived_mean, abs=0.015)
    waits = [record.wait_s for record in life.seen.steps]
    assert sum(step.wait_s for step in outcome.steps) == pytest.approx(sum(waits), rel=0.02, abs=0.1)


def test_simulator_asks_the_policies_that_a_run_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def spied(name: str) -> None:
        kept = getattr(Bounded, name)

        def spy(self: Bounded, state: FlowState) -> Any:
            asked.append(name)
            return kept(self, state)

        monkeypatch.setattr(Bounded, name, spy)

    for name in ("admit", "select"):
        spied(name)
    simulated("bounded", 0.0005)
    in_simulation = set(asked)
    asked.clear()
    lived(tmp_path, "bounded", 0.0005)
    assert in_simulation == set(asked) == {"admit", "select"}


def test_planner_has_no_flow_policy_or_filter_of_its_own() -> None:
    defined = {
        node.name
        for file in (Path(headrace.wings.plan.__file__).parent).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    decisions = {name for kind in (StalenessPolicy, Concurrency) for name in vars(kind) if not name.startswith("_")}
    assert {"admit", "select", "leave", "observe"} <= decisions
    assert not defined & decisions
    run = Simulation(World(flow=FlowConfig(), steps=1, engine=Linear(fixed_s=1), learner=TrainingRate(tok_s=1)), seed=0)
    assert type(run.flow) is Flow
    assert type(run.flow.state) is FlowState
