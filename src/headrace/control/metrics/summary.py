"""The summary of a run: the keys of ``summary.json``."""

from __future__ import annotations

import msgspec

from headrace.base.types.observation import Account
from headrace.control.metrics.rewards import RewardFailures
from headrace.flow.ledger.base import Conservation, UnitCounts


class UnitFates(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all units of one kind (groups, episodes or tokens), as counts: submitted = trained + dropped + in
    flight."""

    submitted: int
    trained: int
    dropped: dict[str, int]
    """Number of dropped units, by reason."""
    in_flight: int


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The conservation table of the ledger: what became of all groups, episodes and tokens of the run."""

    groups: UnitFates
    episodes: UnitFates
    tokens: UnitFates


class CommitGap(msgspec.Struct, frozen=True, kw_only=True):
    """The time for which the engine stood still for a commit, in milliseconds: the median ``p50`` and the 99th
    percentile ``p99``."""

    p50: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``summary.json``. Times (``_s``) are in seconds, and times and fractions are of the training
    phase: from the first rollout to the end of the last step of this life of the run. The ledger is that of all its
    lives."""

    status: str
    """``finished``, ``stopped`` (by a signal or an alarm) or ``failed``."""
    stopped_by: str = ""
    """The signal that stopped the run: ``SIGINT`` (Ctrl-C), ``SIGTERM`` or ``SIGHUP`` (its terminal was closed); empty
    if none did."""
    cause: str = ""
    """The reason why the run failed, or finished before its last step; empty otherwise."""
    eval_before: float | None
    """Mean reward on the held-out rows before the run's first step; ``None`` without such rows."""
    eval_after: float | None
    """Mean reward on the held-out rows after training; ``None`` without such rows, or if the run did not get that
    far."""
    reward_first: float | None
    """Mean reward of the run's first batch; ``None`` if it had none."""
    reward_last: float | None
    """Mean reward over the last tenth of the steps (at least one); ``None`` without rewards."""
    steps: int
    """Number of optimizer steps behind the weights, including those of earlier lives of the run."""
    tokens_generated: int
    """Number of tokens sampled for training in this life."""
    tokens_trained: int
    """Number of tokens that carried loss in this life."""
    wall_s: float
    """Length of the training phase in seconds."""
    generated_tok_s: float
    """Tokens sampled for training per second."""
    trained_tok_s: float
    """Tokens that carried loss per second."""
    engine_idle_frac: float
    """Fraction of the time in which the engine had nothing to do."""
    learner_idle_frac: float
    """Fraction of the time in which the learner neither trained, copied its weights nor saved them."""
    commit_gap_ms: CommitGap
    exposed_sync_frac: float
    """Fraction of the time in which the learner waited for the weight sync: to copy, or for a free buffer."""
    sequences_restarted: int
    """Number of sequences that began again because of a weight update."""
    max_token_age: int
    """Greatest age at which a token was trained, in versions."""
    age_histogram: dict[int, int]
    """Number of trained tokens by age, in this life."""
    mismatch_kl: float | None
    """KL(μ‖π), estimator k3, between the logprobs of engine (μ) and learner (π) at equal weights, measured at the start
    of this life; ``None`` if it was not measured."""
    mismatch_abs: float | None
    """Mean |log μ − log π| of the same tokens; ``None`` if it was not measured."""
    mismatch_abs_most: float | None = None
    """The greatest mean |log μ − log π| of any step, over tokens that the step's own version sampled; ``None`` where no
    step had such tokens."""
    versions_agree: int | None = None
    """For a replay, the number of versions whose weights are equal to those of the recorded run, bit for bit, which is
    the number that it committed; ``None`` for any other run."""
    ledger: LedgerSummary
    """What became of all groups, episodes and tokens of the run."""
    versions: list[int]
    """The first and the last version that were committed in this life; empty if none was."""
    reward_failures: dict[str, RewardFailures] = {}
    """The components of the reward that have failed in this life, by name: number of failures and of calls, and the
    first cause."""
    warnings: list[str]
    """The warnings of this life, one for each kind."""
    recoveries: list[str] = []
    """The parts that died and were started again in this life, in words."""
    verdict: str
    """What limited the speed of the run, in words."""
    account: Account | None = None
    """How the time was spent, in numbers, from which the verdict and the fractions above are computed; ``None`` before
    the end of the first step."""
    run_dir: str
    """The run's directory."""


def ledger_summary(books: Conservation) -> LedgerSummary:
    """Return the ledger's conservation counts in the form in which they are written to files."""
    return LedgerSummary(groups=_unit(books.groups), episodes=_unit(books.episodes), tokens=_unit(books.tokens))


def _unit(fates: UnitCounts) -> UnitFates:
    """Return the counts of one kind of unit in the form in which they are written to files."""
    return UnitFates(
        submitted=fates.submitted, trained=fates.trained, dropped=dict(fates.dropped), in_flight=fates.in_flight
    )
