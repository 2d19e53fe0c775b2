"""The summary and the metrics of a run on given rows."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.flow.ledger.base import Conservation

_SAMPLING_METRICS = (
    *("kl_mu_k1", "kl_mu_k3", "mismatch_k1", "mismatch_k3", "stale_k1", "stale_k3", "ratio_mu", "ratio_mu_squared"),
    *("ess", "chi2", "mismatch_kl", "mismatch_abs", "log_ratio_abs_max", "age_mean", "age_max"),
    *("staleness_k1", "staleness_k3", "sequence_ratio_mu", "sequence_ratio_mu_squared", "ess_sequences"),
)
"""Metrics that compare the learner with the policy that sampled the tokens; for given rows there is no such policy."""


def tuning_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step without the metrics that compare the learner with the policy that sampled the
    tokens."""
    return {name: value for name, value in metrics.items() if name.partition("/")[0] not in _SAMPLING_METRICS}


class TuningSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``summary.json`` of a run on given rows. Times and tokens count this life of the run; the ledger
    counts all its lives."""

    verb: str
    """``sft``, ``dpo`` or ``distill``."""
    status: str
    """``finished``, ``stopped`` (by a signal or an alarm) or ``failed``."""
    stopped_by: str = ""
    """The signal that stopped the run; empty if none did."""
    cause: str = ""
    """The reason why the run failed; empty otherwise."""
    steps: int
    """Number of optimizer steps that made the weights, in all lives of the run."""
    epochs: float
    """Number of rows trained, over the number of rows that there are."""
    loss_first: float | None
    """Loss of the first step of this life; ``None`` if there was none."""
    loss_last: float | None
    """Mean loss of the last tenth of the steps of this life; ``None`` if there was none."""
    eval_first: dict[str, float]
    """The metrics of the held-out rows when they were first measured in this life; empty without such rows."""
    eval_last: dict[str, float]
    """The metrics of the held-out rows when they were last measured in this life."""
    rewards_first: dict[str, float] = {}
    """The mean reward and pass@k of the first version that this life has measured by ``[eval]``; empty without."""
    rewards_last: dict[str, float] = {}
    """The mean reward and pass@k of the last version that this life has measured; empty without ``[eval]``."""
    tokens: int
    """Number of tokens of the rows that were trained, prompts included."""
    tokens_trained: int
    """Number of tokens that carried loss."""
    wall_s: float
    """Seconds since the first step of this life began; 0 if none began."""
    trained_tok_s: float
    """Number of tokens that carried loss per second of ``wall_s``."""
    rows_left_out: int
    """Number of rows that could not be trained and were left out."""
    rows_cut: int
    """Number of rows that were cut off at their limit."""
    ledger: Conservation
    """The conservation table of the ledger: groups are rows."""
    warnings: list[str]
    """The warnings of this life, in words."""
    verdict: str = ""
    """Always empty: such a run is sequential, so no part waits for another."""
    run_dir: str
