"""The account of a run: the record of where its time and tokens went, which the verdict reads.

A *span* is what one part did between two moments; its *lane* names the part, such as ``learner``. :func:`make_account`
computes the account of one interval; :class:`Accountant` adds up such accounts, step by step, while a run is running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import msgspec

from headrace.base.types.observation import Account, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.control.observer import Observer
from headrace.run.observe.advice import UNKNOWN, VerdictSettings
from headrace.run.observe.system import Usage
from headrace.run.observe.trace import WAIT_BATCH, Interval, is_engine, make_span_account, union
from headrace.run.observe.verdict import judge

EPISODES = "rollout"
"""The lane that has one span for each episode."""
LATE_S = 1.0
"""The time, in seconds, after which all spans of a moment have arrived: engines report spans every quarter of a
second."""


def make_account(
    spans: Sequence[Span], steps: Sequence[StepRecord], within: Interval, known: Iterable[str] = ()
) -> Account:
    """Return the account of the interval ``within`` (start and end in seconds of the spans' clock). Its times come from
    ``spans``, its token counts and all other values from ``steps``, the records of the steps that ended in it.

    Generated and wasted tokens are copied from the last record, which counts them since the start of the run. ``known``
    names lanes that exist, although they may have no span in the interval.
    """
    measured = [step for step in steps if "turns_s" in step.metrics]
    return msgspec.structs.replace(
        make_span_account(spans, within, known),
        straggler_s=sum(step.straggler_s for step in steps),
        held_back_s=sum(step.held_back_s for step in steps),
        generated_tokens=steps[-1].generated_tokens if steps else 0,
        trained_tokens=sum(step.trained_tokens for step in steps),
        wasted_tokens=dict(steps[-1].wasted_tokens) if steps else {},
        aged_tokens=sum(sum(step.ages.values()) for step in steps),
        trained_ages=sum(age * tokens for step in steps for age, tokens in step.ages.items()),
        turns_s=sum(step.metrics["turns_s"] or 0.0 for step in measured),
        turns_least_s=sum(step.metrics["turns_least_s"] or 0.0 for step in measured),
        turned_s=sum(step.seconds + step.wait_s for step in measured),
    )


LONG_S = 5.0
"""After this time without the end of a step, the present step is added to the account that is displayed, in seconds."""


class Accountant(Observer):
    """An observer that computes the account of a run while the run is running, for its live view and its summary.

    A step is added to the account once all spans of its time have arrived, which is some time after its end; until then
    the step is pending. Memory does not grow with the length of the run: only the spans of about two steps are kept.
    """

    def __init__(self, settings: VerdictSettings = UNKNOWN) -> None:
        """Start an empty account. ``settings`` are the values of the run's settings that the verdict's advice names;
        by default no value is known."""
        self._settings = settings
        self._spans: list[Span] = []
        """The spans that end after the time that the account covers."""
        self._lanes: set[str] = set()
        """The lanes that have had a span, without the engines that were removed."""
        self._pending: list[StepRecord] = []
        """The records of steps that have ended and are not added to the account yet, in order."""
        self._last: StepRecord | None = None
        """The last step that was added to the account; ``None`` before the first."""
        self._newest: StepRecord | None = None
        """The last step that has ended, added or pending."""
        self._closed_s: float | None = None
        """The end of the time that the account covers, on the spans' clock; ``None`` before the first step."""
        self._total = Account()
        """The account of all steps that were added."""
        self._throughput: list[float] = []
        """The trained tokens per second of every step."""
        self._waited: list[float] = []
        """The fraction of the time of every step in which the learner waited."""

    def spans(self, spans: Sequence[Span]) -> None:
        """Keep the spans until their time is added to the account. The spans of episodes, of which there are thousands,
        are first merged into their union, since only the time in which any episode ran is needed."""
        kept_spans = [span for span in spans if span.lane != EPISODES]
        episodes = union((span.start_s, span.end_s) for span in spans if span.lane == EPISODES)
        kept_spans += [Span(lane=EPISODES, name="episode", start_s=start_s, end_s=end_s) for start_s, end_s in episodes]
        self._lanes.update(span.lane for span in kept_spans)
        self._spans += kept_spans

    def set_engines(self, names: Collection[str]) -> None:
        """Receive the names of the engines that the run has now. An engine that was removed does not count as idle from
        now on, and advice names the number of engines."""
        self._lanes = {lane for lane in self._lanes if not is_engine(lane) or lane in names}
        if len(names) != self._settings.engines:
            self._settings = replace(self._settings, engines=len(names))

    def step(self, record: StepRecord) -> None:
        """Receive the record of a step that has ended: store its rate of training and its share of waiting, add the
        earlier steps whose spans have all arrived to the account, and keep this step as pending."""
        if self._closed_s is None:
            self._closed_s = record.clock_s - record.seconds - record.wait_s
        since_s = self._pending[-1].clock_s if self._pending else self._closed_s
        length_s = max(record.clock_s - since_s, 1e-9)
        self._throughput.append(record.trained_tokens / length_s)
        self._waited.append(min(1.0, record.wait_s / length_s))
        if record.clock_s - self._closed_s >= 2 * LATE_S:
            complete = [earlier for earlier in self._pending if record.clock_s - earlier.clock_s >= LATE_S]
            self._add_steps(complete)
        self._pending.append(record)
        self._newest = record

    def add_usage(self, usage: Usage) -> None:
        """Add the processor time that the run's processes used between two readings, both made during training, to the
        account."""
        self._total += Account(
            observed_s=usage.seconds,
            processors_s=usage.processors_s,
            used_s=dict(usage.used_s),
            queued_s=dict(usage.queued_s),
        )

    def complete(self) -> Account:
        """Return the account from the wait for the first batch to the end of the last step. All pending steps are added
        first, and a span that arrives later is not counted; so call this method only at the end of the run."""
        self._add_steps(list(self._pending))
        return self._total

    def judge_total(self) -> str:
        """Return the verdict on the account of :meth:`complete`, which names the bottleneck of the run, in words; empty
        before the first step."""
        total = self.complete()
        return str(judge(total, self._settings)) if total.seconds else ""

    def add_account(self, state: LiveState) -> LiveState:
        """Return a copy of the run's present ``state`` with the account so far, the verdict on it, and two values for
        each step: the tokens trained per second, and the share of its time in which the learner waited.

        The present step is part of the account only if no step has ended for :data:`LONG_S` seconds of training.
        """
        so_far = self._total
        newest = self._newest
        if newest is not None and state.phase == "training" and state.wall_s - newest.wall_s >= LONG_S:
            so_far += self._make_present_account(state, newest)
        return msgspec.structs.replace(
            state,
            account=so_far if so_far.seconds else state.account,
            verdict=str(judge(so_far, self._settings)) if so_far.seconds else "",
            throughput=tuple(self._throughput),
            waited=tuple(self._waited),
        )

    def _make_present_account(self, state: LiveState, newest: StepRecord) -> Account:
        """Return the account of the time since the last step that was added, up to :data:`LATE_S` before now.

        ``newest`` is the step that ended last; ``state``, the present state of the run, contains the present time. The
        learner's spans arrive only at the end of its step: until then the learner counts as working, unless ``state``
        contains a wait of the learner for a batch.
        """
        assert self._closed_s is not None
        now_s = newest.clock_s + state.wall_s - newest.wall_s
        waits = [wait.since_s for wait in state.waits if wait.loop == "learner" and wait.state == "waiting"]
        waits_s = waits[0] if waits else 0.0
        working = Span(lane="learner", name="step", start_s=newest.clock_s, end_s=max(newest.clock_s, now_s - waits_s))
        waiting = Span(lane="learner", name=WAIT_BATCH, start_s=working.end_s, end_s=max(working.end_s, now_s))
        within = (self._closed_s, now_s - LATE_S)
        return msgspec.structs.replace(
            make_span_account([*self._spans, working, waiting], within, self._lanes),
            generated_tokens=newest.generated_tokens - (0 if self._last is None else self._last.generated_tokens),
            trained_tokens=sum(record.trained_tokens for record in self._pending),
        )

    def _add_steps(self, steps: list[StepRecord]) -> None:
        """Add ``steps`` to the account as one interval, which begins where the account ends, and discard their spans.
        ``steps`` are the first of the pending steps, in order; an empty list changes nothing."""
        if not steps:
            return
        assert self._closed_s is not None
        record = steps[-1]
        del self._pending[: len(steps)]
        within = (self._closed_s, max(record.clock_s, self._closed_s))
        added = make_account(self._spans, steps, within, self._lanes)
        generated = record.generated_tokens - (0 if self._last is None else self._last.generated_tokens)
        added = msgspec.structs.replace(added, generated_tokens=generated, wasted_tokens={})
        self._total = msgspec.structs.replace(self._total + added, wasted_tokens=dict(record.wasted_tokens))
        self._last, self._closed_s = record, within[1]
        self._spans = [span for span in self._spans if span.end_s > within[1]]
