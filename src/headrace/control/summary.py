"""What a run came to."""

from __future__ import annotations

import msgspec

from headrace.base.types.observation import Account
from headrace.control.rewarding import RewardFailures


class UnitFates(msgspec.Struct, frozen=True, kw_only=True):
    """submitted = trained + dropped + in flight."""

    submitted: int
    trained: int
    dropped: dict[str, int]
    in_flight: int


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The conservation table."""

    groups: UnitFates
    episodes: UnitFates
    tokens: UnitFates


class CommitGap(msgspec.Struct, frozen=True, kw_only=True):
    """How long the engine stood still per commit, in milliseconds: the median ``p50``, and ``p99`` of the worst."""

    p50: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``. Times and fractions are of the training phase: from the first rollout to the end of the last
    step of this life of the run; the ledger is of all its lives."""

    status: str
    """``finished``, ``stopped`` (by a signal or an alarm) or ``failed``."""
    stopped_by: str = ""
    """The signal that stopped it: ``SIGINT`` (Ctrl-C), ``SIGTERM`` or ``SIGHUP`` (its terminal was closed); empty where
    none did."""
    cause: str = ""
    """Why it failed, or finished before its last step; empty otherwise."""
    eval_before: float | None
    """Mean reward on the held-out rows before the run's first step; ``None`` without such rows."""
    eval_after: float | None
    """The same after training; ``None`` also where the run did not get that far."""
    reward_first: float | None
    """Mean reward of the run's first batch."""
    reward_last: float | None
    """Mean reward over the last tenth of the steps (at least one)."""
    steps: int
    """Optimizer steps that the weights have behind them, earlier lives of the run included."""
    tokens_generated: int
    """Sampled for training in this life."""
    tokens_trained: int
    """Tokens that carried loss, in this life."""
    wall_s: float
    generated_tok_s: float
    trained_tok_s: float
    engine_idle_frac: float
    learner_idle_frac: float
    commit_gap_ms: CommitGap
    exposed_sync_frac: float
    """Fraction of the time that the learner stood still for the sync: copying, or waiting for a free buffer."""
    sequences_restarted: int
    """By weight updates."""
    max_token_age: int
    """Greatest age at which a token was trained, in versions."""
    age_histogram: dict[int, int]
    """Trained tokens by age, of this life."""
    mismatch_kl: float | None
    """KL(μ‖π), estimator k3, between engine and learner at equal weights, measured at the start of this life."""
    mismatch_abs: float | None
    """Mean |log μ − log π| of the same tokens."""
    versions_agree: int | None = None
    """Of a replay: the versions whose weights are bit for bit those of the recorded run, which are all that it
    committed; ``None`` for any other run."""
    ledger: LedgerSummary
    versions: list[int]
    """The versions committed in this life: first and last."""
    reward_failures: dict[str, RewardFailures] = {}
    """The components of the reward that have failed in this life, by name: how often, of how many calls, and why
    first."""
    warnings: list[str]
    recoveries: list[str] = []
    """Parts that died and were started again in this life, in words."""
    verdict: str
    """What held the run up, in words."""
    account: Account | None = None
    """Where the time went, in numbers: what the verdict and the fractions above are made of; ``None`` before the end of
    the first step."""
    run_dir: str
