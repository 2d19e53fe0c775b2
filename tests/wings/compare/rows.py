"""What every recipe's row of ``headrace recipes`` means for a run: written down from the words of the axes, not from
the settings, which are what is tested.

A run is looked at twice. With a busy learner its batches wait for it, and tokens become as old as the recipe lets them;
with a busy engine every commit meets running sequences.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from tests.wings.compare.seen import Seen

TASK = (
    *("flow.groups_per_step=8", "flow.group_size=4", "engine.temperature=4.0", "engine.max_new_tokens=32"),
    *("launch.engine_threads=1", "launch.learner_threads=1", "learner.lr=1e-4"),
)
"""Answers of widely spread lengths: at this temperature every token may be the last."""
BUSY_LEARNER = (*TASK, "engine.max_sequences=64", "learner.tokens_per_microbatch=40")
BUSY_ENGINE = (*TASK, "engine.max_sequences=3")
STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Promise:
    """One row, as a run has to keep it."""

    bound: int
    """No token is trained at a greater age."""
    ahead: int
    """How many batches generation runs ahead."""
    staleness: Literal["lockstep", "paced", "depth", "reject"]
    """What keeps the bound: whole batches in order; admission; the length of the queue, with a bound beyond it; or
    leaving what is too old."""
    running: Literal["none", "continue", "resume", "drain", "batch", "sleep"]
    """What becomes of running answers at a commit."""
    correction: tuple[str, ...]
    """How stale tokens are weighed: corrections, or a loss with a ratio of its own."""
    transport: str = "group"
    sent: Literal["full", "adapter"] = "full"

    @property
    def oldest(self) -> int:
        """The age that tokens reach where the learner is what everybody waits for."""
        return min(self.ahead, self.bound)


_ONE_AHEAD = Promise(bound=1, ahead=1, staleness="lockstep", running="batch", correction=("tis",))
_SYNC = Promise(bound=0, ahead=0, staleness="lockstep", running="none", correction=(), transport="shm")
_REJECT = Promise(bound=1, ahead=2, staleness="reject", running="continue", correction=("tis",))
_FOUR = Promise(bound=4, ahead=4, staleness="paced", running="resume", correction=("tis",))
PROMISES = {
    "default": Promise(
        bound=1, ahead=1, staleness="paced", running="continue", correction=("tis",), transport="shm"
    ),
    "areal": replace(_FOUR, correction=("decoupled",)),
    "art": replace(_SYNC, running="sleep", sent="adapter"),
    "atropos": Promise(
        bound=4, ahead=3, staleness="depth", running="batch", correction=("tis",), transport="files"
    ),
    "miles": replace(_ONE_AHEAD, running="resume", correction=("tis", "opsm")),
    "nemo-rl": _REJECT,
    "oat": _ONE_AHEAD,
    "open-instruct": replace(_FOUR, running="drain"),
    "pipelinerl": replace(_REJECT, bound=4, ahead=8, correction=("reinforce",)),
    "prime-rl": Promise(
        bound=2, ahead=1, staleness="paced", running="continue", correction=("dppo",), transport="files"
    ),
    "roll": Promise(bound=1, ahead=1, staleness="paced", running="batch", correction=("topr",)),
    "skyrl": _FOUR,
    "slime": replace(_ONE_AHEAD, running="resume", correction=("tis", "opsm")),
    "torchforge": replace(_REJECT, running="batch", transport="shm"),
    "trl-async": replace(_FOUR, bound=2, ahead=2),
    "trl-sync": _SYNC,
    "tunix": Promise(bound=1, ahead=1, staleness="paced", running="batch", correction=("tis",), transport="shm"),
    "verifiers-rl": _ONE_AHEAD,
    "verl": replace(_FOUR, bound=1, ahead=1),
}  # fmt: skip


def check_whatever_is_busy(promise: Promise, seen: Seen, model_bytes: int) -> None:
    """The bound, the depth, the books, the parts, what is sent."""
    assert seen.books_balance
    assert len(seen.steps) == STEPS
    assert max(seen.ages) <= promise.bound
    assert seen.lead <= promise.ahead
    assert seen.versions_rise
    parts = {role: pid for role, pid in seen.pids.items() if role in ("engine", "learner")}
    assert len({*parts.values(), os.getpid()}) == 3
    assert seen.sums.get("sync/commits", 0) >= STEPS - 1
    if promise.sent == "full":
        assert set(seen.sent_bytes) == {float(model_bytes)}
    else:
        assert 0 < max(seen.sent_bytes) < 0.25 * model_bytes
    assert seen.config["sync"]["transport"] == promise.transport
    said = [each["kind"] for each in seen.config["algo"]["correction"]] or [seen.config["algo"]["loss"]["kind"]]
    assert promise.correction in ((), tuple(said))
    assert ("correction_weight" in seen.sums) == (bool(seen.config["algo"]["correction"]))


def check_depth(promise: Promise, seen: Seen) -> None:
    """With a busy learner: tokens become as old as they may, and what is too old is treated as the row says."""
    assert seen.lead == promise.ahead
    assert max(seen.ages) == promise.oldest
    assert set(seen.dropped) == ({"stale"} if promise.staleness == "reject" else set())
    if promise.staleness == "lockstep":
        assert seen.in_order


def check_interrupt(promise: Promise, seen: Seen) -> None:
    """With a busy engine: what a commit does to running answers, and what becomes of partial ones."""
    carried, recomputed = seen.sums["sync/carried_over"], seen.sums["sync/recomputed_tokens"]
    waited_s = seen.sums["sync/wait_s"]
    if promise.running in ("continue", "resume"):  # partial answers continue, by their prefix or with their cache
        assert seen.across > 0
        assert carried > 0
        assert (recomputed > 0) == (promise.running == "resume")
    else:
        assert (seen.across, carried, recomputed) == (0, 0, 0)
    if promise.running in ("drain", "batch"):
        assert waited_s > 0.01
        assert (seen.held_back > 0) == (promise.running == "drain")
    if promise.running == "sleep":
        assert seen.naps == [0] * STEPS
    assert seen.sums.get("wasted_tokens/weight_update", 0) == 0
