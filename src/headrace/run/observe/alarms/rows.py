"""The table of Headrace's alarms (:data:`ALARMS`), and the observer that checks them (:class:`AlarmWatch`).

An *alarm* goes off when a problem begins. Each is built from a function ``problem``, which returns a sentence about the
problem in the metrics of a step (``Numbers``: value by name) or in the present state of the run (``Moment``), or an
empty string. A ``Lasting`` alarm goes off after ``patience`` such steps in a row, a ``Now`` alarm at once; ``Baseline``
measures the normal value of a metric over the first steps.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from headrace.base.types.observation import LiveState, StepRecord
from headrace.control.observer import Observer
from headrace.run.observe.alarms.base import (
    OFFERED,
    Alarm,
    AlarmsConfig,
    Baseline,
    Lasting,
    Moment,
    Now,
    Numbers,
    Raised,
)
from headrace.run.observe.metrics import flat
from headrace.run.observe.words import duration, number


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRow:
    """One kind of alarm, of Headrace or of an installed package: a function that creates the alarm, and the advice to
    the user."""

    make: Callable[[AlarmsConfig], Alarm]
    """The function that creates the alarm for one run, from the settings."""
    advice: str
    """The advice to the user when the alarm goes off."""


def _make_entropy_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``entropy`` with the thresholds in ``config``, which goes off when the policy's entropy stays
    below a fraction of its baseline: such a policy explores no longer."""
    baseline = Baseline("entropy", config.baseline_steps)

    def problem(numbers: Numbers) -> str:
        """Return a sentence if the entropy is less than the configured fraction of the entropy in the first steps, else
        an empty string."""
        values = baseline(numbers)
        if values is None or values[0] >= config.entropy_frac * values[1]:
            return ""
        return f"the policy's entropy has collapsed to {number(values[0])} nats, from {number(values[1])}"

    return Lasting(problem, patience=config.patience)


def _make_zero_variance_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``zero_variance`` with the thresholds in ``config``, which goes off when too many groups have
    equal rewards for all their episodes: their advantages are 0, and nothing is learned from them."""

    lowest = math.inf

    def problem(numbers: Numbers) -> str:
        """Return a sentence if too many groups have equal rewards, unless nearly all tasks are solved: at least nine in
        ten episodes have the largest reward, and an episode of this or an earlier step had a lower reward."""
        nonlocal lowest
        share = numbers.get("zero_variance_frac", 0.0)
        minimum, tenth, maximum = (numbers.get(f"reward_{name}") for name in ("min", "p10", "max"))
        lowest = min(lowest, math.inf if minimum is None else minimum)
        nearly_solved = maximum is not None and tenth == maximum > lowest
        if share < config.zero_variance_frac or nearly_solved:
            return ""
        return f"in {share:.0%} of the groups all rewards are equal"

    return Lasting(problem, patience=config.patience)


def _make_rewards_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``rewards``, which goes off when the calls of a reward component fail too often. The metric
    ``reward_failed/COMPONENT`` is the fraction of failed calls."""
    prefix = "reward_failed/"

    def problem(numbers: Numbers) -> str:
        """Return in words the reward components that fail for too large a share of their calls, with the share; an
        empty string if there is no such component."""
        shares = {name.removeprefix(prefix): share for name, share in numbers.items() if name.startswith(prefix)}
        failing = {name: share for name, share in shares.items() if share > config.max_reward_failed}
        return "; ".join(f"the reward {name!r} fails for {share:.0%} of its calls" for name, share in failing.items())

    return Lasting(problem, patience=config.patience)


def _make_kl_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``kl``, which goes off when the KL divergence, in nats per token, of the trained policy π from
    μ, the distribution that sampled its tokens, or from the reference π_ref is large."""

    def problem(numbers: Numbers) -> str:
        """Return the larger of the two divergences in words if it is above the limit, else an empty string."""
        kls = {"KL(μ‖π)": numbers.get("kl_mu_k3", 0.0), "KL(π‖π_ref)": numbers.get("kl_ref", 0.0)}
        name = max(kls, key=lambda each: kls[each])
        return f"{name} is {number(kls[name])} nats per token" if kls[name] > config.max_kl else ""

    return Lasting(problem, patience=config.patience)


def _make_mismatch_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``mismatch``, which goes off when engine and learner compute different logprobs for fresh
    tokens, which the learner's present weights have sampled."""

    def problem(numbers: Numbers) -> str:
        """Return a sentence if the KL divergence between engine and learner is above the limit, else an empty
        string."""
        kl = numbers.get("mismatch_kl", 0.0)
        if kl <= config.max_mismatch:
            return ""
        return f"engine and learner disagree about fresh tokens: KL {number(kl)}, above {config.max_mismatch:g}"

    return Lasting(problem, patience=config.patience)


def _make_length_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``length``, which goes off when episodes have many times as many sampled tokens as at the
    beginning of the run."""
    baseline = Baseline("length_mean", config.baseline_steps)

    def problem(numbers: Numbers) -> str:
        """Return a sentence if episodes are many times as long as in the first steps, else an empty string."""
        values = baseline(numbers)
        if values is None or values[0] < config.length_times * values[1]:
            return ""
        times = values[0] / max(values[1], 1.0)
        return f"episodes have {number(values[0])} tokens, {times:.1f} times as many as in the beginning"

    return Lasting(problem, patience=config.patience)


def _make_repetition_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``repetition``, which goes off when too many 4-grams (four tokens in a row) of an episode have
    occurred earlier in the same episode."""
    baseline = Baseline("repetition", config.baseline_steps)

    def problem(numbers: Numbers) -> str:
        """Return a sentence if the share of repeated 4-grams is at least the limit and at least twice its value in the
        first steps, else an empty string."""
        values = baseline(numbers)
        if values is None or values[0] < config.max_repetition or values[0] < 2 * values[1]:
            return ""
        return f"{values[0]:.0%} of the 4-grams of an episode stood in it before, in the beginning {values[1]:.0%}"

    return Lasting(problem, patience=config.patience)


def _make_stall_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``stall`` with the thresholds in ``config``, which goes off when the run is training and no step
    has ended for a long time."""
    ends_s: list[float] = []  # the times at which the last steps ended, in seconds since the start of the run
    steps = 0

    def problem(now: Moment) -> str:
        """Return a sentence, with what the learner waits for, if no step has ended for ``stall_s`` seconds and for five
        times as long as steps usually take; else an empty string. The function is called once a second and remembers
        when the last steps ended."""
        nonlocal steps
        state = now.state
        if state.phase != "training":
            ends_s.clear()  # evaluations and saves do not count as steps
        if not ends_s or state.steps_done != steps:
            steps = state.steps_done
            ends_s.append(state.wall_s)
            del ends_s[:-32]
        still_s = state.wall_s - ends_s[-1]
        usual_s = median(later - earlier for earlier, later in pairwise(ends_s)) if ends_s[1:] else 0.0
        if still_s < max(config.stall_s, 5 * usual_s):
            return ""
        waits = [wait for wait in state.waits if wait.state == "waiting" and wait.loop == "learner"]
        cause = f"; the learner waits for {waits[0].what}, which {waits[0].unblocked_by} brings" if waits else ""
        return f"no step has ended for {duration(still_s)}{cause}"

    return Now(problem)


def _make_disk_alarm(config: AlarmsConfig) -> Alarm:
    """Return the alarm ``disk``, which goes off when the disk of the run directory is nearly full."""

    def problem(now: Moment) -> str:
        """Return a sentence if fewer gigabytes are free than ``min_free_gb``, else an empty string."""
        free_gb = now.free_bytes / 1e9
        return f"{free_gb:.2f} GB are left on the disk of the run" if free_gb < config.min_free_gb else ""

    return Now(problem)


ALARMS: Mapping[str, AlarmRow] = {
    "entropy": AlarmRow(
        make=_make_entropy_alarm,
        advice="The policy has stopped exploring: raise algo.loss.clip_high or engine.temperature, lower learner.lr, "
        "or add a penalty (algo.loss.kl_coef).",
    ),
    "zero_variance": AlarmRow(
        make=_make_zero_variance_alarm,
        advice="There is nothing to prefer: take easier or harder tasks (data.curriculum), raise flow.group_size, or "
        "leave such groups out (flow.filters, kind = 'dynamic_sampling').",
    ),
    "rewards": AlarmRow(
        make=_make_rewards_alarm,
        advice="Answers are credited with its default, or lost: headrace status RUN says why it fails; fix what it "
        "calls, or raise its retries or timeout_s.",
    ),
    "kl": AlarmRow(
        make=_make_kl_alarm,
        advice="The policy moves far from what sampled its tokens: lower learner.lr or flow.max_age, or clip harder.",
    ),
    "mismatch": AlarmRow(
        make=_make_mismatch_alarm,
        advice="Compare the numbers of engine and learner: model.dtype, engine.kernels, learner.keep_routing and "
        "learner.keep_sampling_mask; a correction (algo.correction) hides it, and does not heal it.",
    ),
    "length": AlarmRow(
        make=_make_length_alarm,
        advice="Read some completions: a reward may pay for length. Add a length penalty, or lower "
        "engine.max_new_tokens.",
    ),
    "repetition": AlarmRow(
        make=_make_repetition_alarm,
        advice="Read some completions: a reward may pay for loops. Lower learner.lr, or add a penalty to the reward.",
    ),
    "stall": AlarmRow(
        make=_make_stall_alarm,
        advice="headrace status says who waits for whom; the logs of the parts are in logs/ of the run directory.",
    ),
    "disk": AlarmRow(
        make=_make_disk_alarm,
        advice="Make room, or keep fewer checkpoints (run.keep_checkpoints, run.checkpoint_every).",
    ),
}
"""Headrace's alarms by name, in the order in which they are checked."""


class AlarmWatch(Observer):
    """An observer that checks every alarm that is switched on, after each step and once a second, and reports the
    alarms that go off."""

    def __init__(self, config: AlarmsConfig, run_dir: Path, on_alarm: Callable[[Raised, bool], None]) -> None:
        """Create the alarms that ``config`` switches on. ``on_alarm`` is called for each alarm that goes off, with its
        message and with whether the run must stop. ``run_dir`` is the run directory, on whose disk the free space is
        measured."""
        self._stop_on = config.stop_on
        self._run_dir = run_dir
        self._on_alarm = on_alarm
        self._rows = {name: row for name, row in ALARMS.items() if name not in config.off}
        self._rows |= {name: OFFERED.load(name) for name in config.on}
        """The kinds of the alarms that are switched on, by name."""
        self._alarms = {name: row.make(config) for name, row in self._rows.items()}

    def step(self, record: StepRecord) -> None:
        """Check the alarms on the metrics of a step that has ended, and report the alarms that go off."""
        numbers = flat(record)
        for name, alarm in self._alarms.items():
            self._report(name, alarm.step(numbers))

    def update(self, state: LiveState) -> None:
        """Check the alarms on the present state of the run and on the free space of its disk, and report the alarms
        that go off."""
        now = Moment(state=state, free_bytes=shutil.disk_usage(self._run_dir).free)
        for name, alarm in self._alarms.items():
            self._report(name, alarm.moment(now))

    def _report(self, name: str, words: str) -> None:
        """Call ``on_alarm`` for the alarm ``name`` if the alarm went off. ``words`` is its problem; empty if the alarm
        did not go off."""
        if words:
            self._on_alarm(Raised(name=name, words=words, advice=self._rows[name].advice), name in self._stop_on)
