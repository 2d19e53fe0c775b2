"""The summary of a run: the record that is written to ``summary.json``. A *life* of a run is the time from one start or
resumption to its end."""

from __future__ import annotations

import msgspec

from headrace.base.types.observation import Account
from headrace.control.metrics.rewards import RewardFailures
from headrace.flow.ledger.base import Conservation


class CommitGap(msgspec.Struct, frozen=True, kw_only=True):
    """The time for which the engine's step loop paused for a commit, in milliseconds: the median ``p50`` and the 99th
    percentile ``p99``."""

    p50: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``summary.json``. Times (``_s``) are in seconds. Times and fractions refer to the training phase
    of this life of the run, from the first rollout to the end of the last step; the counts in ``ledger`` refer to all
    lives."""

    status: str
    """``finished``, ``stopped`` (by a signal or an alarm) or ``failed``."""
    stopped_by: str = ""
    """The signal that stopped the run: ``SIGINT`` (Ctrl-C), ``SIGTERM`` or ``SIGHUP`` (its terminal was closed); empty
    if no signal did."""
    cause: str = ""
    """The reason why the run failed, or finished before its last step; empty otherwise."""
    eval_before: float | None
    """Mean reward on the held-out rows before the run's first step; ``None`` without such rows."""
    eval_after: float | None
    """Mean reward on the held-out rows after training; ``None`` without such rows, or if the run ended before this
    evaluation."""
    reward_first: float | None
    """Mean reward of the run's first batch; ``None`` if this batch had no rewards."""
    reward_last: float | None
    """Mean reward over the last tenth of the steps (at least one); ``None`` without rewards."""
    steps: int
    """Number of optimizer steps behind the weights, including steps of earlier lives of the run."""
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
    """Fraction of the time in which the engine was idle."""
    learner_idle_frac: float
    """Fraction of the time in which the learner neither trained, copied its weights nor saved them."""
    commit_gap_ms: CommitGap
    exposed_sync_frac: float
    """Fraction of the time in which the learner waited for the weight sync: to copy, or for a free buffer."""
    sequences_restarted: int
    """Number of sequences that restarted because of a weight update."""
    max_token_age: int
    """Maximum age at which a token was trained, in versions."""
    age_histogram: dict[int, int]
    """Number of trained tokens by age, in this life."""
    mismatch_kl: float | None
    """KL(μ‖π), estimator k3, between the logprobs of engine (μ) and learner (π) at equal weights, measured at the start
    of this life; ``None`` if it was not measured."""
    mismatch_abs: float | None
    """Mean |log μ − log π| of the same tokens; ``None`` if it was not measured."""
    mismatch_abs_most: float | None = None
    """The largest mean |log μ − log π| of any step, over tokens that the step's own version sampled; ``None`` if no
    step had such tokens."""
    versions_agree: int | None = None
    """For a replay, the number of committed versions, whose weights are all equal to the recorded run's, bit for bit;
    ``None`` for any other run."""
    ledger: Conservation
    """The number of groups, episodes and tokens of the run by outcome."""
    versions: list[int]
    """The first and the last version that were committed in this life; empty if no version was."""
    reward_failures: dict[str, RewardFailures] = {}
    """The components of the reward that have failed in this life, by name, with the number of failures and of calls and
    the first cause."""
    warnings: list[str]
    """The warnings of this life, one for each kind."""
    recoveries: list[str] = []
    """The parts of the run that died and were restarted in this life, in words."""
    verdict: str
    """What limited the speed of the run, in words."""
    account: Account | None = None
    """The numbers on how the time was spent, from which the verdict and the fractions above are computed; ``None``
    before the end of the first step."""
    run_dir: str
    """The run's directory."""
