"""Where the time and the tokens of a run went, from its spans and its steps: the record that the verdict reads.

The same function makes the account of a whole run from its files and, step by step, that of a run which goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headrace.base.types.observation import Account, Event, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.run.observe.settings import UNKNOWN, VerdictSettings
from headrace.run.observe.system import Usage
from headrace.run.observe.trace import WAIT_BATCH, Interval, account, union
from headrace.run.observe.verdict import judge

EPISODES = "rollout"
"""The lane that has a span for every episode."""
LATE_S = 1.0
"""Spans of what happened this long ago have arrived: engines report what they do every quarter of a second."""


def account_of(
    spans: Sequence[Span], steps: Sequence[StepRecord], within: Interval, known: Iterable[str] = ()
) -> Account:
    """The account of ``within``, in which ``steps`` ended: all steps of this life of the run up to then. ``known``: as
    in :func:`~headrace.run.observe.trace.account`."""
    return msgspec.structs.replace(
        account(spans, within, known),
        straggler_s=sum(step.straggler_s for step in steps),
        held_back_s=sum(step.held_back_s for step in steps),
        generated_tokens=steps[-1].generated_tokens if steps else 0,
        trained_tokens=sum(step.trained_tokens for step in steps),
        wasted_tokens=dict(steps[-1].wasted_tokens) if steps else {},
    )


LONG_S = 5.0
"""Where no step has ended for this long, the time since then is looked at too."""


class Accountant:
    """Keeps the account of a run that goes on: an observer. What spans say of a step is added when they have arrived.

    A run of any length costs it as much memory as two steps.
    """

    def __init__(self, settings: VerdictSettings = UNKNOWN) -> None:
        """``settings``: of the run, as far as advice depends on them."""
        self._settings = settings
        self._spans: list[Span] = []
        self._lanes: set[str] = set()
        self._open: list[StepRecord] = []
        """Steps that are yet to be added, after the last that was."""
        self._last: StepRecord | None = None
        """The last step that was added."""
        self._newest: StepRecord | None = None
        """The last step that was told."""
        self._closed_s: float | None = None
        """Up to here everything is added, on the spans' clock."""
        self._total = Account()
        self._throughput: list[float] = []
        self._waited: list[float] = []

    def spans(self, spans: Sequence[Span]) -> None:
        """Keep those that an account is made of, until their time is accounted for."""
        kept = [span for span in spans if span.lane != EPISODES]
        episodes = union((span.start_s, span.end_s) for span in spans if span.lane == EPISODES)  # of thousands, a few
        kept += [Span(lane=EPISODES, name="episode", start_s=start_s, end_s=end_s) for start_s, end_s in episodes]
        self._lanes.update(span.lane for span in kept)
        self._spans += kept

    def event(self, event: Event) -> None:
        """Nothing."""

    def step(self, record: StepRecord) -> None:
        """A step has ended; those before it are added if nothing more can come of them."""
        if self._closed_s is None:
            self._closed_s = record.clock_s - record.seconds - record.wait_s
        before = self._open[-1].clock_s if self._open else self._closed_s
        length_s = max(record.clock_s - before, 1e-9)
        self._throughput.append(record.trained_tokens / length_s)
        self._waited.append(min(1.0, record.wait_s / length_s))
        if record.clock_s - self._closed_s >= 2 * LATE_S:
            late = [earlier for earlier in self._open if record.clock_s - earlier.clock_s >= LATE_S]
            self._add(late)
        self._open.append(record)
        self._newest = record

    def update(self, state: LiveState) -> None:
        """Nothing."""

    def usage(self, usage: Usage) -> None:
        """Add what the run's processes took of the machine during some seconds of its training."""
        self._total += Account(
            observed_s=usage.seconds,
            processors_s=usage.processors_s,
            used_s=dict(usage.used_s),
            queued_s=dict(usage.queued_s),
        )

    def total(self) -> Account:
        """Up to the end of the last step, as far as is known."""
        self._add(list(self._open))
        return self._total

    def verdict(self) -> str:
        """The verdict on all that :meth:`total` tells, in words; empty before the first step."""
        return str(judge(self.total(), self._settings)) if self.total().seconds else ""

    def shown(self, state: LiveState) -> LiveState:
        """``state`` with where the time went, in numbers and in words."""
        so_far = self._total
        newest = self._newest
        if newest is not None and state.phase == "training" and state.wall_s - newest.wall_s >= LONG_S:
            so_far += self._present(state, newest)
        return msgspec.structs.replace(
            state,
            account=so_far if so_far.seconds else state.account,
            verdict=str(judge(so_far, self._settings)) if so_far.seconds else "",
            throughput=tuple(self._throughput),
            waited=tuple(self._waited),
        )

    def _present(self, state: LiveState, newest: StepRecord) -> Account:
        """The time that no added step tells of: where steps are long, most of it. Spans of the learner come when it is
        done; until then it works unless it waits."""
        assert self._closed_s is not None
        now_s = newest.clock_s + state.wall_s - newest.wall_s
        waits = [wait.since_s for wait in state.waits if wait.loop == "learner" and wait.state == "waiting"]
        waits_s = waits[0] if waits else 0.0
        at_it = Span(lane="learner", name="step", start_s=newest.clock_s, end_s=max(newest.clock_s, now_s - waits_s))
        waiting = Span(lane="learner", name=WAIT_BATCH, start_s=at_it.end_s, end_s=max(at_it.end_s, now_s))
        made = account([*self._spans, at_it, waiting], (self._closed_s, now_s - LATE_S), self._lanes)
        return msgspec.structs.replace(
            made,
            generated_tokens=newest.generated_tokens - (0 if self._last is None else self._last.generated_tokens),
            trained_tokens=sum(record.trained_tokens for record in self._open),
        )

    def _add(self, steps: list[StepRecord]) -> None:
        """Add the first of the open steps, all at once."""
        if not steps:
            return
        assert self._closed_s is not None
        record = steps[-1]
        del self._open[: len(steps)]
        within = (self._closed_s, max(record.clock_s, self._closed_s))
        made = account_of(self._spans, steps, within, self._lanes)
        before = 0 if self._last is None else self._last.generated_tokens
        made = msgspec.structs.replace(made, generated_tokens=record.generated_tokens - before, wasted_tokens={})
        self._total = msgspec.structs.replace(self._total + made, wasted_tokens=dict(record.wasted_tokens))
        self._last, self._closed_s = record, within[1]
        self._spans = [span for span in self._spans if span.end_s > within[1]]
