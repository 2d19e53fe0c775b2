"""What tracing and metrics cost the demo, and whether its trace tells what the operating system tells."""

import random
import statistics
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.control.loops import feeding
from headrace.control.metrics import RunMetrics, batch
from headrace.control.observer import BusyLane, Observers
from headrace.control.state import RunState
from headrace.run.observe import Accountant, SystemWatch, load_run
from headrace.run.observe.trace import make_span_account
from headrace.run.session import load_config, train
from headrace.run.session.watching import RunWatchers
from headrace.wings.recipes.demo import build_demo

STEPS = 40
EPISODES = 256
"""Of a step of the demo."""
pytestmark = pytest.mark.slow


class Meter:
    """Processor time of this thread within the functions that it wraps, nested ones counted once, without what the
    measuring itself takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sum = 0.0
        self._calls = 0
        self._inside = False
        self._patch = monkeypatch
        self._small: list[Beside] = []
        idle = SimpleNamespace(nothing=_nothing)
        self.wrap(idle, "nothing")
        for _ in range(20_000):
            idle.nothing()
        self._own, self._sum, self._calls = self._sum / self._calls, 0.0, 0

    @property
    def seconds(self) -> float:
        return self._sum - self._calls * self._own + sum(each.seconds for each in self._small)

    def wrap(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside = True
            start = _thread_s()
            try:
                return inner(*args, **kwargs)
            finally:
                self._sum += time.thread_time() - start
                self._calls += 1
                self._inside = False

        self._patch.setattr(owner, name, timed)

    def wrap_small(self, owner: Any, name: str) -> None:
        """One that takes less than to measure it: see :class:`Beside`."""
        inner: Callable[..., Any] = getattr(owner, name)
        beside = Beside()
        self._small.append(beside)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside = True
            try:
                return beside.call(inner, args, kwargs)
            finally:
                self._inside = False

        self._patch.setattr(owner, name, timed)


class Beside:
    """A function that is called for every episode, beside one that does nothing: at each call chance decides which of
    the two is timed, so that both meet the same caches. The difference, and a call of a function that does nothing, is
    what the function takes."""

    def __init__(self) -> None:
        self._chance = random.Random(0)
        self._took: dict[bool, list[float]] = {False: [], True: []}

    def call(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._chance.random() < 0.5
        function = inner if own else _nothing
        start = _thread_s()
        result = function(*args, **kwargs)
        self._took[own].append(time.thread_time() - start)
        return result if own else inner(*args, **kwargs)

    @property
    def seconds(self) -> float:
        if min(map(len, self._took.values())) < 2:
            return sum(self._took[True])
        a_call_s = timeit.timeit(_nothing, number=10_000) / 10_000
        beyond_s = statistics.fmean(self._took[True]) - statistics.fmean(self._took[False])
        return sum(map(len, self._took.values())) * (max(0.0, beyond_s) + a_call_s)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes what a call takes."""


def _thread_s() -> float:
    """The thread's processor time. Read twice: the first time brings the clock's own code into the caches, which is no
    cost of watching."""
    time.thread_time()
    return time.thread_time()


class Clocks:
    """Processor time of the main threads of engine and learner, their waits for a processor included: how long they
    would have been at work on a machine of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[float, dict[str, float]]] = []
        inner = RunWatchers.update

        def update(watching: RunWatchers, controller: Any, components: Any) -> Any:
            if controller.state.phase == "training":
                pids = {part.role: part.pid for part in components if part.role in ("engine", "learner")}
                self.seen.append((time.monotonic(), {role: _at_work_s(pid) for role, pid in pids.items()}))
            return inner(watching, controller, components)

        monkeypatch.setattr(RunWatchers, "update", update)


def _at_work_s(pid: int) -> float:
    on_processor, waited_for_one, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return (int(on_processor) + int(waited_for_one)) / 1e9


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo(tmp_path_factory.mktemp("demo"), seed=0).run_file


def run(run_file: Path, run_dir: Path) -> None:
    settings = (f"run.steps={STEPS}", f"run.dir={run_dir}", "observe.view=none", "observe.report=false")
    one_thread = ("launch.engine_threads=1", "launch.learner_threads=1")  # so that it is the main thread that computes
    train(load_config(run_file, [*settings, *one_thread, "data.eval_path="]))


def test_tracing_and_metrics_cost_less_than_a_hundredth_of_the_demo_and_two_kilobytes_an_episode(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(monkeypatch)
    for name in ("step", "event", "update"):
        meter.wrap(Observers, name)
    for owner, name in ((SystemWatch, "read"), (Accountant, "shown")):
        meter.wrap(owner, name)
    small = ((RunState, "span"), (Observers, "span"), (Observers, "spans"), (BusyLane, "__enter__"))
    events = ((RunMetrics, "episode_ended"), (RunMetrics, "group_started"))
    for owner, name in (*small, (BusyLane, "__exit__"), *events):
        meter.wrap_small(owner, name)
    assert feeding.batch_stats is batch.batch_stats
    meter.wrap(RunMetrics, "step_done")
    meter.wrap(feeding, "batch_stats")
    run(run_file, tmp_path / "run")
    told = load_run(tmp_path / "run")
    wall_s = told.loop[1] - told.loop[0]
    share = meter.seconds / wall_s
    files = ("metrics.jsonl", "trace.jsonl", "events.jsonl", "live.json")
    size = sum((tmp_path / "run" / name).stat().st_size for name in files) / (STEPS * EPISODES)
    print(f"watching takes {share:.2%} of {wall_s:.1f} s, and {size:.0f} bytes an episode")
    assert share < 0.01
    assert size < 2048


def test_busy_and_idle_of_the_trace_agree_with_the_operating_system_within_three_points(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    run(run_file, tmp_path / "run")
    (start_s, before), (end_s, after) = clocks.seen[1], clocks.seen[-2]
    told = make_span_account(load_run(tmp_path / "run").spans, (start_s, end_s))
    traced = {"engine": told.engine_busy_s / told.seconds, "learner": told.learner_busy_s / told.seconds}
    measured = {part: (after[part] - before[part]) / (end_s - start_s) for part in traced}
    print(f"busy by the trace: {traced}; by the operating system: {measured}")
    assert traced == pytest.approx(measured, abs=0.03)
