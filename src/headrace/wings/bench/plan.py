"""The planner, which predicts the performance of a run by simulation: the time to simulate a large run, and the errors
of its predictions for runs on this machine.

There are two tasks: answers of geometric lengths, and the demo with its answers of three digits. For each task, the
costs are calibrated from two runs, and six runs are predicted. Four of these differ from the calibration runs in a
setting: the staleness bound, the batch size, or a slow reward. Measurement and simulation both cover the time from the
end of the third step to the end of the last step.
"""

from __future__ import annotations

import json
import random
import string
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.flow import FlowConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.bench.base import Report, Row, Target, at_most, make_report
from headrace.wings.bench.program import train_quietly
from headrace.wings.plan import SimulatedOutcome, Simulation, Workload, World
from headrace.wings.plan.calibration import SKIPPED, RunRecording, calibrate_from, read_recording
from headrace.wings.plan.costs import Roofline, SyncCost, TrainingRate
from headrace.wings.plan.spread import Lognormal, Uniform
from headrace.wings.plan.system import Measured
from headrace.wings.recipes.demo import build_demo

ENGINES, GROUPS, GROUP_SIZE, BATCH = 8_000, 62_464, 16, 1024
"""The sizes of the large run: 8,000 accelerators generate, 2,000 train; about a million episodes."""
SLOW = "slow reward"
"""The part of a run's name that marks a run with a slow reward."""
REWARDS = Path(__file__).with_name("user_code.py")
ROWS = 2048
LONG = """
[model]
path = "model"
[data]
path = "rows.jsonl"
[engine]
max_new_tokens = 256
max_sequences = 128
[flow]
groups_per_step = 16
group_size = 4
[learner]
lr = 1e-6
[run]
seed = 0
"""
"""The run file of the first task. Its answers have 62 tokens on average, and training hardly changes their length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTask:
    """A task of this benchmark, of which six runs are measured and predicted by the planner."""

    name: str
    make: Callable[[Path], Path]
    """The function that creates model, rows and run file in a directory, and returns the path of the run file."""
    slow: str
    """The name of the slow reward function in ``user_code.py``."""
    groups: int
    """The number of groups in a step."""
    steps: int
    """The number of steps of each run."""

    @property
    def runs(self) -> dict[str, tuple[str, ...]]:
        """Return the overrides ``section.key=value`` of each run, by the name of the run. The costs are calibrated from
        the first two runs."""
        return {
            f"{self.name}, max_age 1": ("flow.max_age=1",),
            f"{self.name}, max_age 0": ("flow.max_age=0",),
            f"{self.name}, max_age 2": ("flow.max_age=2",),
            f"{self.name}, half the batch": ("flow.max_age=1", f"flow.groups_per_step={self.groups // 2}"),
            f"{self.name}, {SLOW}, max_age 1": ("flow.max_age=1",),
            f"{self.name}, {SLOW}, max_age 0": ("flow.max_age=0",),
        }


def _create_long_task(directory: Path) -> Path:
    """Create the task of long answers in ``directory``: rows, and a model whose answers have very different lengths.
    Return the run file."""
    letters = string.ascii_letters + string.digits
    spec = TinySpec(
        vocab=letters, hidden_size=256, num_layers=4, intermediate_size=512, even_ends=True,
        extra={"tie_word_embeddings": True},
    )  # fmt: skip
    make_tiny(directory / "model", spec)
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choices(letters, k=16)), "answer": 0} for _ in range(ROWS)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "run.toml").write_text(f'{LONG}[env]\nreward = "{REWARDS}:odd"\n')
    return directory / "run.toml"


def _create_demo(directory: Path) -> Path:
    """Create the demo in ``directory`` and return its run file."""
    return build_demo(directory, seed=0).run_file


TASKS = (
    PlannedTask(name="long answers", make=_create_long_task, slow="slow_odd", groups=16, steps=30),
    PlannedTask(name="demo", make=_create_demo, slow="slow_sum", groups=64, steps=60),
)


def measure(on_progress: Callable[[str], None], *, quick: bool = False) -> Report:
    """Measure the time in which the planner simulates a run of 10,000 accelerators, and the errors of its predictions
    for runs on this machine. Return a report with a row for each run, and the targets. With ``quick`` everything is
    small and the figures mean nothing. ``on_progress`` is called with lines of progress."""
    rows: list[Row] = []
    clock = RealClock()
    on_progress("a million episodes")
    start_s = clock.now()
    large = _simulate_large(quick=quick)
    seconds = clock.now() - start_s
    rows.append({"what": "large run", "seconds": seconds, "episodes": large.num_episodes, "engines": ENGINES,
                 "simulated_s": large.seconds, "trained_tok_s": large.tok_s})  # fmt: skip
    targets = [at_most("10,000 accelerators, a million episodes", seconds, 60, "s")]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        for task in TASKS:
            on_progress(f"{task.name}: the model")
            run_file = task.make(directory / task.name)
            for name, settings in task.runs.items():
                on_progress(name)
                reward = (f"env.reward={REWARDS}:{task.slow}",) if SLOW in name else ()
                more = ("data.eval_path=", f"run.steps={14 if quick else task.steps}", *settings, *reward)
                train_quietly(run_file, directory / name, *more)
            measured = calibrate_from(*(directory / name for name in list(task.runs)[:2]))
            for name in task.runs:
                row, more_targets = _compare(name, read_recording(directory / name), measured)
                rows.append(row)
                targets += more_targets
    return make_report(rows, targets)


def _simulate_large(*, quick: bool) -> SimulatedOutcome:
    """Simulate a run with about a million episodes on 10,000 accelerators, and return the outcome; with ``quick`` only
    its first step."""
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


def _compare(name: str, run: RunRecording, measured: Measured) -> tuple[Row, list[Target]]:
    """Simulate the run ``name``, whose recording is ``run``, with the costs that were ``measured`` in the calibration
    runs. Return a row with throughput and mean age of the simulation and of the recording, and targets for both
    errors."""
    flow = run.config["flow"]
    reward_s = Uniform(low=0.05, high=0.5) if SLOW in name else measured.workload.reward_s
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
    measured_s = run.steps[-1].clock_s - run.steps[SKIPPED].clock_s
    simulated_s = simulated.steps[-1].end_s - simulated.steps[SKIPPED].end_s
    measured_age = _mean_age([{age: float(n) for age, n in step.ages.items()} for step in run.steps[SKIPPED + 1 :]])
    simulated_age = _mean_age([step.ages for step in simulated.steps[SKIPPED + 1 :]])
    tokens = sum(step.trained_tokens for step in run.steps[SKIPPED + 1 :])
    row: Row = {"what": name, "measured_tok_s": tokens / measured_s, "simulated_tok_s": tokens / simulated_s,
                "measured_age": measured_age, "simulated_age": simulated_age}  # fmt: skip
    age_error = abs(simulated_age - measured_age) / measured_age if measured_age else simulated_age
    return row, [
        at_most(f"{name}: throughput, simulated against measured", abs(measured_s / simulated_s - 1), 0.10, "fraction"),
        at_most(f"{name}: mean age, simulated against measured", age_error, 0.15, "fraction"),
    ]


def _mean_age(steps: list[dict[int, float]]) -> float:
    """Return the mean age of all trained tokens, in versions. ``steps`` has for each step the number of tokens by
    age."""
    total = sum(tokens for ages in steps for tokens in ages.values())
    return sum(age * tokens for ages in steps for age, tokens in ages.items()) / max(total, 1e-9)
