"""Costs that are read off one run predict another one with other settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.errors import DataError
from headrace.base.types.trace import Span
from headrace.flow import FlowConfig
from headrace.run.observe.trace import union
from headrace.testing import FakeEngine, FakeLearner, FakeScorer, lognormal_lengths
from headrace.wings.plan import Simulation, World
from headrace.wings.plan.calibration import RunRecording, calibrate
from headrace.wings.plan.costs import TrainingRate
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.system import Measured
from tests.control.lives import Life, Plan, live

LENGTH = lognormal_lengths(60, 0.8, 300)
SIZES = {"groups_per_step": 4, "group_size": 4}
STEPS = 30


def lived(run_dir: Path, max_age: int, steps: int = STEPS) -> Life:
    run_dir.mkdir(exist_ok=True)
    return live(
        Plan(run_dir=run_dir, steps=steps, num_tasks=2000, flow={**SIZES, "max_age": max_age},
             engine=lambda: FakeEngine(length=LENGTH), learner=lambda: FakeLearner(token_s=0.0008),
             scorer=lambda: FakeScorer(seconds=0.2)),
    )  # fmt: skip


def recorded(life: Life) -> RunRecording:
    """What its directory would hold: fakes tell no spans of the engine, which works while an episode runs."""
    spans = life.seen.all_spans
    episodes = [(span.start_s, span.end_s) for span in spans if span.lane == "rollout"]
    engine = [Span(lane="engine", name="generate", start_s=begin, end_s=end) for begin, end in union(episodes)]
    lengths = [int(length) - 1 for batch in life.learner.batches for length in batch.lengths_S]
    return RunRecording(
        name="runs/one", steps=life.seen.steps, spans=[*spans, *engine], lengths=lengths, config={"flow": SIZES}
    )  # fmt: skip


def predicted(measured: Measured, max_age: int) -> SimulatedOutcome:
    world = World(
        flow=FlowConfig(**SIZES, max_age=max_age), steps=STEPS, engine=measured.engine, max_sequences=10_000,
        learner=TrainingRate(tok_s=measured.train_tok_s, fixed_s=measured.train_fixed_s), sync=measured.sync,
        workload=measured.workload,
    )  # fmt: skip
    return Simulation(world, seed=0).run()


def test_one_run_predicts_throughput_and_ages_of_runs_with_other_settings(tmp_path: Path) -> None:
    measured = calibrate([recorded(lived(tmp_path / "1", 1))])
    assert measured.engine.step_s(30, 0) == pytest.approx(0.01, rel=0.08)
    assert measured.workload.reward_s.draw(None, 1)[0] == pytest.approx(0.2, rel=0.01)  # type: ignore[arg-type]
    for max_age in (0, 2, 4):
        life = lived(tmp_path / f"age-{max_age}", max_age)
        outcome = predicted(measured, max_age)
        assert outcome.seconds == pytest.approx(life.summary.wall_s, rel=0.1)
        ages = life.summary.age_histogram
        mean = sum(age * tokens for age, tokens in ages.items()) / sum(ages.values())
        total: dict[int, float] = {}
        for step in outcome.steps:
            for age, tokens in step.ages.items():
                total[age] = total.get(age, 0.0) + tokens
        assert sum(a * t for a, t in total.items()) / sum(total.values()) == pytest.approx(mean, rel=0.15, abs=0.02)


def test_run_that_is_too_short_or_has_no_trace_is_refused_in_words(tmp_path: Path) -> None:
    whole = recorded(lived(tmp_path, 1, steps=12))
    with pytest.raises(DataError, match="runs/one has 5 steps: too few to calibrate with") as refused:
        calibrate([replace(whole, steps=whole.steps[:5])])
    assert "12 steps" in refused.value.remedy
    with pytest.raises(DataError, match="has no trace of its engine"):
        calibrate([replace(whole, spans=[])])


def test_engines_curve_is_a_line_where_runs_differ_in_what_they_did_at_once(tmp_path: Path) -> None:
    def made(num: int, step_s: float) -> RunRecording:
        """``num`` sequences at once, each step of the engine ``step_s`` long."""
        base = recorded(lived(tmp_path / str(num), 1, steps=14))
        records: list[Any] = []
        for index, record in enumerate(base.steps):
            tokens = round(index * num / step_s)
            records.append(msgspec.structs.replace(record, clock_s=float(index), generated_tokens=tokens))
        engine = [Span(lane="engine", name="generate", start_s=0.0, end_s=13.0)]
        episodes = [Span(lane="rollout", name="episode", start_s=0.0, end_s=13.0)] * num
        return replace(base, steps=records, spans=[*engine, *episodes])

    measured = calibrate([made(10, 0.02), made(40, 0.05)])
    for num, step_s in ((10, 0.02), (40, 0.05), (20, 0.03)):
        assert measured.engine.step_s(num, 0) == pytest.approx(step_s, rel=0.02)


def test_a_controller_that_is_busy_with_every_episode_is_read_off_and_holds_a_larger_run_up(tmp_path: Path) -> None:
    whole = recorded(lived(tmp_path, 1))
    assert calibrate([whole]).episode_s == 0.0, "nobody has read its processor time"
    busy = [msgspec.structs.replace(step, metrics={**step.metrics, "cpu/controller": 0.5}) for step in whole.steps]
    measured = calibrate([replace(whole, steps=busy)])
    rate = len([span for span in whole.spans if span.lane == "rollout"]) / whole.steps[-1].clock_s
    assert measured.episode_s == pytest.approx(0.5 / rate, rel=0.2)
    world = World(
        flow=FlowConfig(groups_per_step=40, group_size=4, max_age=2), steps=STEPS, engine=measured.engine,
        max_sequences=10_000, learner=TrainingRate(tok_s=1e9), workload=measured.workload, episode_s=0.01,
    )  # fmt: skip
    assert Simulation(world, seed=0).run().step_s == pytest.approx(160 * 0.01, rel=0.02)
