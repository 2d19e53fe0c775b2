"""The planner: how large a run it simulates in a minute, and how well it predicts runs of the demo on this machine.

Two runs of the demo are read for what things cost here; six are predicted, of which four have settings that the two did
not: another bound, another batch, rewards that take their time. Measured and simulated alike from the end of the third
step to the end of the last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from headrace.bench.base import Report, Row, Target, at_most, report
from headrace.clock import RealClock
from headrace.flow import FlowConfig
from headrace.observe.calibrating import calibrated, recording
from headrace.plan import Outcome, Simulation, Workload, World
from headrace.plan.calibration import SKIPPED, Recording
from headrace.plan.costs import Roofline, SyncCost, TrainingRate
from headrace.plan.spread import Lognormal, Uniform
from headrace.plan.system import Measured
from headrace.recipes.demo import Demo, build_demo
from headrace.session import load_config, train

STEPS = 60
ENGINES, GROUPS, GROUP_SIZE, BATCH = 8_000, 62_464, 16, 1024
"""Of the large run: 8,000 accelerators generate, 2,000 train; about a million episodes."""
SLOW = "slow reward"
RUNS: dict[str, tuple[str, ...]] = {
    "max_age 1": ("flow.max_age=1",),
    "max_age 0": ("flow.max_age=0",),
    "max_age 2": ("flow.max_age=2",),
    "half the batch": ("flow.max_age=1", "flow.groups_per_step=32"),
    f"{SLOW}, max_age 1": ("flow.max_age=1",),
    f"{SLOW}, max_age 0": ("flow.max_age=0",),
}
"""What is measured; the first two are what costs are read from."""


def measure(tell: Callable[[str], None], *, quick: bool = False) -> Report:
    """Both. ``quick`` shows that it runs, its figures say nothing."""
    rows: list[Row] = []
    clock = RealClock()
    tell("a million episodes")
    start_s = clock.now()
    large = _large(quick=quick)
    seconds = clock.now() - start_s
    rows.append({"what": "large run", "seconds": seconds, "episodes": large.num_episodes, "engines": ENGINES,
                 "simulated_s": large.seconds, "trained_tok_s": large.tok_s})  # fmt: skip
    targets = [at_most("10,000 accelerators, a million episodes", seconds, 60, "s")]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        tell("the demo's model")
        demo = build_demo(directory / "demo", seed=0)
        for name in RUNS:
            tell(name)
            _run(demo, directory / name, name, 14 if quick else STEPS)
        measured = calibrated(*(directory / name for name in list(RUNS)[:2]))
        for name in RUNS:
            row, held = _compared(name, recording(directory / name), measured)
            rows.append(row)
            targets += held
    return report(rows, targets)


def _large(*, quick: bool) -> Outcome:
    world = World(
        flow=FlowConfig(groups_per_step=BATCH, group_size=GROUP_SIZE, max_age=2),
        steps=(GROUPS // BATCH) if not quick else 1,
        engine=Roofline(
            weight_bytes=16e9, kv_bytes=147_456, flop_per_token=16e9, bandwidth=2e12, flops=6e14, overhead_s=0.002
        ),
        num_engines=ENGINES,
        cache_tokens=4e5,
        max_new_tokens=32_768,
        learner=TrainingRate(tok_s=2e7),
        sync=SyncCost(snapshot_s=0.05, travel_s=0.5, gap_s=0.01),
        workload=Workload(prompt_tokens=200, answer_tokens=Lognormal(mean=4000), reward_s=0.3),
    )
    return Simulation(world, seed=0).run()


def _run(demo: Demo, run_dir: Path, name: str, steps: int) -> None:
    quiet = ("observe.view=none", "observe.report=false", "data.eval_path=", f"run.dir={run_dir}", f"run.steps={steps}")
    with as_file(files("headrace.bench") / "slow_reward.py") as slow:
        reward = (f"env.reward={slow}:reward",) if name.startswith(SLOW) else ()
        train(load_config(demo.run_file, [*quiet, *RUNS[name], *reward]))


def _compared(name: str, run: Recording, measured: Measured) -> tuple[Row, list[Target]]:
    """One run, and what two others said it would be."""
    flow = run.config["flow"]
    reward_s = Uniform(low=0.05, high=0.5) if name.startswith(SLOW) else measured.workload.reward_s
    world = World(
        flow=FlowConfig(
            groups_per_step=flow["groups_per_step"], group_size=flow["group_size"], max_age=flow["max_age"]
        ),
        steps=len(run.steps),
        engine=measured.engine,
        max_sequences=run.config["engine"]["max_sequences"],
        learner=TrainingRate(tok_s=measured.train_tok_s, fixed_s=measured.train_fixed_s),
        sync=measured.sync,
        workload=measured.workload.model_copy(update={"reward_s": reward_s}),
        episode_s=measured.episode_s,
    )
    simulated = Simulation(world, seed=0).run()
    seen_s = run.steps[-1].clock_s - run.steps[SKIPPED].clock_s
    told_s = simulated.steps[-1].end_s - simulated.steps[SKIPPED].end_s
    seen_age = _mean_age([{age: float(n) for age, n in step.ages.items()} for step in run.steps[SKIPPED + 1 :]])
    told_age = _mean_age([step.ages for step in simulated.steps[SKIPPED + 1 :]])
    tokens = sum(step.trained_tokens for step in run.steps[SKIPPED + 1 :])
    row: Row = {"what": name, "measured_tok_s": tokens / seen_s, "simulated_tok_s": tokens / told_s,
                "measured_age": seen_age, "simulated_age": told_age}  # fmt: skip
    off_age = abs(told_age - seen_age) / seen_age if seen_age else told_age
    return row, [
        at_most(f"{name}: throughput, simulated against measured", abs(seen_s / told_s - 1), 0.10, "fraction"),
        at_most(f"{name}: mean age, simulated against measured", off_age, 0.15, "fraction"),
    ]


def _mean_age(steps: list[dict[int, float]]) -> float:
    total = sum(tokens for ages in steps for tokens in ages.values())
    return sum(age * tokens for ages in steps for age, tokens in ages.items()) / max(total, 1e-9)
