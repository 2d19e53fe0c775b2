"""The registry of the metrics that a run reports: the name, the unit, the meaning and the aggregation of each.

Metric writers, charts, alarms and documents use these entries, and a test compares them with the metrics that runs
report. A name may contain one label in braces, such as an environment, an agent or a reason: ``env/{env}/reward_mean``.
Metrics of a user's own loss keep the names that the loss gives them.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


class Aggregation(enum.StrEnum):
    """The function that combines the values of a metric in several steps into one value."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"
    """The latest value, for a running total or a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The description of one metric."""

    name: str
    unit: str
    """The unit; empty for a plain number, ``frac`` for a number between 0 and 1."""
    aggregation: Aggregation
    """How the values of several steps are combined into one value."""
    meaning: str
    """The meaning, as a phrase for charts and documents."""

    @property
    def stem(self) -> str:
        """Return the name without its label, such as ``env_reward_mean``, for systems that store labels separately."""
        return re.sub(r"[^A-Za-z0-9]+", "_", re.sub(r"/?\{\w+\}", "", self.name)).strip("_")

    @property
    def label(self) -> str:
        """Return the name of the label, such as ``env`` for ``env/{env}/reward_mean``; empty for a metric without a
        label."""
        braces = re.search(r"\{(\w+)\}", self.name)
        return braces[1] if braces else ""


MEAN, SUM, MAX, LAST = Aggregation.MEAN, Aggregation.SUM, Aggregation.MAX, Aggregation.LAST


def _rows(*rows: tuple[str, str, Aggregation, str]) -> tuple[Metric, ...]:
    """Return the metrics for a table whose rows contain name, unit, aggregation and meaning."""
    return tuple(
        Metric(name=name, unit=unit, aggregation=aggregation, meaning=meaning)
        for name, unit, aggregation, meaning in rows
    )


_OUTCOME = _rows(
    ("reward_mean", "", MEAN, "Mean reward of the episodes that the step trained on"),
    ("reward_std", "", MEAN, "Their standard deviation"),
    ("reward_min", "", MEAN, "Least of them"),
    ("reward_p10", "", MEAN, "A tenth of them earned no more"),
    ("reward_p90", "", MEAN, "A tenth of them earned at least this"),
    ("reward_max", "", MAX, "Greatest of them"),
    ("reward_sampled", "", MEAN, "Mean reward of all episodes scored since the last step, dropped ones included"),
    ("reward/{component}", "", MEAN, "Mean of one component of the reward, not weighted"),
    ("reward_failed/{component}", "frac", MEAN, "Calls of a component of the reward since the last step that failed"),
    ("logged/{name}", "", MEAN, "Mean of what reward functions gave to log_metric since the last step"),
    ("eval_accuracy", "", LAST, "Mean reward on held-out tasks, where a measurement ended since the last step"),
    ("eval_version", "version", LAST, "The version that was committed when that measurement began"),
    ("zero_variance_frac", "frac", MEAN, "Groups of several episodes with equal rewards: nothing to prefer in them"),
    ("truncated_frac", "frac", MEAN, "Episodes of the batch with a turn that ran into engine.max_new_tokens"),
    ("repetition", "frac", MEAN, "Of 8 episodes' last 4,096 tokens: 4-grams that stood in them before"),
)
_SHAPE = _rows(
    ("length_mean", "tokens", MEAN, "Sampled tokens per episode of the batch"),
    ("length_p10", "tokens", MEAN, "A tenth of the episodes are no longer"),
    ("length_p90", "tokens", MEAN, "A tenth of the episodes are at least this long"),
    ("length_max", "tokens", MAX, "The longest episode"),
    ("length_submitted_mean", "tokens", MEAN, "Sampled tokens per episode ended since the last step, dropped or not"),
    ("length_submitted_p90", "tokens", MEAN, "A tenth of those are at least this long: length_p90 tells survivor bias"),
    ("turns_mean", "turns", MEAN, "Sampled turns per episode of the batch"),
    ("turns_max", "turns", MAX, "Most turns of one"),
)
_LABELLED = tuple(
    row
    for of, who in (("env", "environment (a task's column that observe.env_column names)"), ("agent", "agent"))
    for row in _rows(
        (f"{of}/{{{of}}}/episodes", "episodes", SUM, f"Episodes of the batch, by {who}"),
        (f"{of}/{{{of}}}/reward_mean", "", MEAN, f"Mean reward of the batch, by {of}"),
        (f"{of}/{{{of}}}/reward_p10", "", MEAN, f"A tenth earned no more, by {of}"),
        (f"{of}/{{{of}}}/reward_p90", "", MEAN, f"A tenth earned at least this, by {of}"),
        (f"{of}/{{{of}}}/reward_max", "", MAX, f"Greatest reward, by {of}"),
        (f"{of}/{{{of}}}/length_mean", "tokens", MEAN, f"Sampled tokens per episode, by {of}"),
        (f"{of}/{{{of}}}/length_p10", "tokens", MEAN, f"A tenth are no longer, by {of}"),
        (f"{of}/{{{of}}}/length_p90", "tokens", MEAN, f"A tenth are at least this long, by {of}"),
        (f"{of}/{{{of}}}/length_max", "tokens", MAX, f"The longest, by {of}"),
        (f"{of}/{{{of}}}/turns_mean", "turns", MEAN, f"Sampled turns per episode, by {of}"),
    )
) + _rows(
    ("agent/{agent}/grad_norm", "", MEAN, "Norm of the gradient, before clipping, of an agent's own adapter"),
    ("agent/{agent}/grad_alignment", "", MEAN, "Cosine of this gradient and the one before (learner.alignment)"),
    ("agent/{agent}/grad_projected", "frac", MEAN, "Updates of this adapter whose cosine was reduced"),
    ("agent/{agent}/grad_skipped", "frac", MEAN, "Updates of this adapter that were skipped"),
)
_FLOW = _rows(
    ("trained_tokens", "tokens", SUM, "Tokens that carried loss in the step"),
    ("generated_tokens", "tokens", LAST, "Tokens sampled since the run started"),
    ("tokens", "tokens", SUM, "Tokens of the batch, prompts included"),
    ("trained_tok_s", "tokens/s", MEAN, "Tokens that carried loss, over the time since the last step"),
    ("generated_tok_s", "tokens/s", MEAN, "Tokens sampled since the last step, over that time"),
    ("queue/submitted", "groups", LAST, "Groups known and not yet admitted"),
    ("queue/running", "groups", LAST, "Groups being generated or scored"),
    ("queue/ready", "groups", LAST, "Groups scored and waiting to be trained"),
    ("age_mean", "versions", MEAN, "Mean age of the tokens that carried loss"),
    ("age_p90", "versions", MEAN, "A tenth of them are at least this old"),
    ("age_max", "versions", MAX, "Age of the oldest"),
    ("age/{age}", "tokens", SUM, "Tokens that carried loss, by age"),
    ("turns_s", "s", SUM, "Time that the step would have taken if generation and training took turns, at most"),
    ("turns_least_s", "s", SUM, "The same, if batches that share the engine delay each other"),
    ("version_spread", "versions", MEAN, "Newest minus oldest version of the tokens that carried loss"),
    ("version_std", "versions", MEAN, "Standard deviation of their versions"),
    ("max_age", "versions", LAST, "The staleness bound, where the run tunes it"),
    ("capacity", "groups", LAST, "Groups that may run at once, where the run tunes it"),
    ("pivots/{count}", "", SUM, "Since the last step: pivots of failed episodes, their branches, what became of them"),
    ("dropped_groups/{reason}", "groups", LAST, "Groups dropped since the run started"),
    ("set_aside_episodes/{reason}", "episodes", LAST, "Episodes left out of kept groups, or masked, in this life"),
    ("dropped_tokens/{reason}", "tokens", LAST, "Tokens of trained groups without loss, in this life of the run"),
    ("wasted_tokens/{reason}", "tokens", LAST, "Tokens sampled and never to be trained, in this life of the run"),
)
_TIME = _rows(
    ("wall_s", "s", LAST, "Since this life of the run started"),
    ("seconds", "s", SUM, "Forward, backward and update"),
    ("forward_backward_s", "s", SUM, "Forward and backward"),
    ("optim_s", "s", SUM, "Clipping and update"),
    ("wait_s", "s", SUM, "The learner waited for the step's batch"),
    ("straggler_s", "s", SUM, "Of that, nine in ten episodes of the batch had ended"),
    ("held_back_s", "s", SUM, "flow.capacity kept groups from running, and no request waited for the engine"),
    ("exposed_sync_s", "s", SUM, "The learner was blocked by the sync after the step"),
    ("commit_gap_s", "s", MEAN, "The engine stood still to commit the latest version"),
    ("sync/commits", "", SUM, "Versions committed since the last step"),
    ("sync/bytes", "bytes", SUM, "What of them was sent, or read where it lies"),
    ("sync/wait_s", "s", SUM, "Commits waited for sequences to finish, or exchanged weights while these continued"),
    ("sync/carried_over", "sequences", SUM, "Had begun, and continued under newer weights"),
    ("sync/recomputed_tokens", "tokens", SUM, "Of these, in the cache, and to be computed again"),
    ("engine_busy_frac", "frac", MEAN, "The engine had requests and worked, of the time since the last step"),
    ("learner_busy_frac", "frac", MEAN, "The learner trained or copied, of the time since the last step"),
    ("prefill_frac", "frac", MEAN, "Of the engine's busy time, reading prompts"),
    ("cost_s_per_episode", "s", MEAN, "Time since the last step per episode trained: its cost in machine time"),
    ("engine_s_per_episode", "s", MEAN, "Busy time of the engine since the last step per episode trained"),
    ("learner_s_per_episode", "s", MEAN, "Busy time of the learner per episode trained"),
)
_PARTS = _rows(
    ("engine_steps", "steps", SUM, "Of the engines, since the last step of the learner; a served one's are messages"),
    ("engines", "", LAST, "Engines of the policy that were ready; headrace engines adds and removes them"),
    ("engine_running", "sequences", LAST, "Sequences in the engine's batch at the end of the step"),
    ("engine_waiting", "requests", LAST, "Requests that had not joined it"),
    ("cache_used_frac", "frac", MEAN, "Blocks of the key-value cache that sequences hold"),
    ("cache_hit_frac", "frac", MEAN, "Prompt tokens since the last step that the prefix cache served"),
    ("cache_bytes", "bytes", LAST, "Memory of the key-value cache"),
    ("draft_accepted_frac", "frac", MEAN, "Drafted tokens since the last step that were drawn (engine.speculation)"),
    ("passes_by_token", "", MEAN, "Passes of a sequence by its sampled tokens since the last step; 1 without drafts"),
    ("preempted", "times", LAST, "Sequences that left a full cache and continued later, since the engine started"),
    ("memory/{part}", "bytes", LAST, "Memory that a process of the run holds (its resident set)"),
    ("cpu/{part}", "cores", MEAN, "Processor time of a process over time"),
    ("cpu_queued/{part}", "frac", MEAN, "A thread of a process could have run, and had no processor (Linux)"),
    ("cpu_used_frac", "frac", MEAN, "Processors in use by the run's processes, of those that they may use"),
    ("disk_free_bytes", "bytes", LAST, "Room on the disk of the run directory"),
)
_LEARNING = _rows(
    ("loss", "", MEAN, "What was minimised"),
    ("grad_norm", "", MEAN, "Global norm of the gradient before clipping"),
    ("lr", "", LAST, "Learning rate of the update"),
    ("lr_damping", "", MEAN, "What learner.damping multiplied it by"),
    ("grad_alignment", "", MEAN, "Cosine of the gradient and that of the update before, where they are compared"),
    ("grad_projected", "frac", MEAN, "Updates whose gradient learner.alignment has changed to reduce it"),
    ("grad_skipped", "frac", MEAN, "Updates that learner.alignment has skipped"),
    ("expert_load_max", "", MEAN, "Load of the most used expert of any layer of a mixture; 1 is an even load"),
    ("expert_load_min", "", MEAN, "The same of the least used one"),
    ("experts_idle", "frac", MEAN, "Experts that no token of the step chose"),
    ("balance_loss", "", MEAN, "Load-balancing loss, before its coefficient; the number of experts per token is even"),
    ("router_z_loss", "", MEAN, "Mean squared log-sum-exp of the routers' logits, before its coefficient"),
    ("expert_bias_spread", "", LAST, "Largest less smallest bias of an expert in any layer, where biases move"),
    ("epoch", "", LAST, "Passes over the rows so far, of a run on given rows"),
    ("eval/{metric}", "", LAST, "The same metric on the held-out rows, where it was measured before the step"),
    ("eval_pass/{k}", "frac", LAST, "Held-out tasks that one of k attempts solved in that measurement"),
)
LOSS_METRICS = _rows(
    ("clip_frac", "frac", MEAN, "Tokens at a bound of the loss"),
    ("clip_frac/{age}", "frac", MEAN, "The same by age"),
    ("entropy", "nats", MEAN, "Mean entropy of π, where it is known"),
    ("kl_ref", "nats", MEAN, "KL(π‖π_ref) by the penalty's estimator; by k3 where there is a reference and no penalty"),
    ("kl_teacher", "nats", MEAN, "Mean of log μ − log ν, with the advantage reverse_kl: KL(μ‖ν)"),
    ("teacher_version", "version", LAST, "Newest version in the weights of a teacher that is this model's own past"),
    ("kl_mu_k1", "nats", MEAN, "KL(μ‖π): mean of −log w, w = π/μ"),
    ("kl_mu_k3", "nats", MEAN, "KL(μ‖π): mean of w − 1 − log w"),
    ("kl_mu_k3/{age}", "nats", MEAN, "The same by age"),
    ("mismatch_k1", "nats", MEAN, "The same before the step, over tokens of age 0: engine against learner"),
    ("mismatch_k3", "nats", MEAN, "The same by k3"),
    ("mismatch_kl", "nats", MEAN, "KL(μ‖π) by k3 over tokens of age 0"),
    ("mismatch_abs", "nats", MEAN, "Mean |log π − log μ| of them; inflight commits add to it by the cache they keep"),
    ("stale_k1", "nats", MEAN, "As mismatch_k1, over tokens of higher age"),
    ("stale_k3", "nats", MEAN, "As mismatch_k3, over tokens of higher age"),
    ("staleness_k1", "nats", MEAN, "stale_k1 − mismatch_k1: what age added, where both were measured"),
    ("staleness_k3", "nats", MEAN, "stale_k3 − mismatch_k3: what age added, where both were measured"),
    ("ratio_mu", "", MEAN, "Mean of w"),
    ("ratio_mu/{age}", "", MEAN, "The same by age"),
    ("ratio_mu_squared", "", MEAN, "Mean of w²"),
    ("ratio_mu_squared/{age}", "", MEAN, "The same by age"),
    ("ess", "frac", MEAN, "Effective sample size as a fraction, E[w]²/E[w²]"),
    ("ess/{age}", "frac", MEAN, "The same by age"),
    ("sequence_ratio_mu", "", MEAN, "Mean of the product of w over a sequence"),
    ("sequence_ratio_mu_squared", "", MEAN, "Mean of its square"),
    ("ess_sequences", "frac", MEAN, "Effective sample size of whole sequences, as a fraction"),
    ("chi2", "", MEAN, "E[w²]/E[w]² − 1 = 1/ess − 1"),
    ("log_ratio_abs_max", "nats", MAX, "Greatest |log π − log μ| of a token"),
    ("correction_weight", "", MEAN, "Mean factor of the corrections"),
    ("correction_rejected", "frac", MEAN, "Tokens whose factor is 0"),
    (
        "explained_variance",
        "",
        MEAN,
        "Of a critic, before it learns from the batch: 1 − Var(R − V)/Var(R), R discounted to the token",
    ),
    ("value_loss", "", MEAN, "Mean of ½·(V − return)²"),
    ("value_mean", "", MEAN, "Mean of V"),
    ("critic_grad_norm", "", MEAN, "Norm of the critic's gradient"),
    ("routing_differs", "frac", MEAN, "Pairs of token and layer whose router would now choose other experts"),
    ("dpo_accuracy", "frac", MEAN, "Pairs whose chosen side gained more"),
    ("dpo_dropped", "frac", MEAN, "Pairs left out"),
    ("pair_accuracy", "frac", MEAN, "Pairs whose chosen side is ahead, of losses over pairs but dpo"),
    ("pair_margin", "", MEAN, "How far it is ahead: what the loss takes the sigmoid or the square of"),
    ("kto_baseline", "nats", MEAN, "KL from the reference of an answer to another prompt, at least 0"),
    ("kto_good", "", MEAN, "Implied reward of good answers: β times their log-ratio to the reference"),
    ("kto_bad", "", MEAN, "The same of bad answers"),
)
"""The metrics that losses, corrections and critics report of a batch. w is π/μ."""

REGISTRY: tuple[Metric, ...] = (*_OUTCOME, *_SHAPE, *_LABELLED, *_FLOW, *_TIME, *_PARTS, *_LEARNING, *LOSS_METRICS)
"""Every metric, in the order of the documentation."""

_PLAIN = {row.name: row for row in REGISTRY if not row.label}
"""The metrics without a label, by name."""
_PATTERNS = [
    (re.compile(re.escape(row.name).replace(rf"\{{{row.label}\}}", "([^/]+)")), row) for row in REGISTRY if row.label
]
"""The metrics with a label, each with a pattern of its names whose group is the value of the label."""


@lru_cache(maxsize=4096)
def find(name: str) -> tuple[Metric, str] | None:
    """Return the metric called ``name`` and the value of its label ("" if the metric has none); ``None`` if there is no
    such metric, as for a metric of a user's own loss.

    >>> row, label = find("env/maths/reward_p90")
    >>> row.stem, row.label, label
    ('env_reward_p90', 'env', 'maths')
    """
    if name in _PLAIN:
        return _PLAIN[name], ""
    for pattern, row in _PATTERNS:
        if match := pattern.fullmatch(name):
            return row, match[1]
    return None


def as_label(text: str) -> str:
    """Return ``text``, such as the name of an environment, as a valid label of a metric. The text may come from data or
    from a model, and be empty.

    >>> as_label("GSM8K (train)/easy"), as_label("")
    ('GSM8K_train_easy', 'none')
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text[:200]).strip("_")[:40] or "none"


def combine(name: str, values: Sequence[float]) -> float:
    """Combine the values of the metric ``name`` in several steps into one number, by the aggregation of the metric; an
    unknown metric is averaged. ``values`` must not be empty, and is in the order of the steps.

    >>> combine("trained_tokens", [2.0, 3.0]), combine("reward_mean", [0.0, 1.0]), combine("lr", [2.0, 1.0])
    (5.0, 0.5, 1.0)
    """
    found = find(name)
    match found[0].aggregation if found else Aggregation.MEAN:
        case Aggregation.SUM:
            return sum(values)
        case Aggregation.MAX:
            return max(values)
        case Aggregation.LAST:
            return values[-1]
        case _:
            return sum(values) / len(values)


def last_tenth(rewards: Sequence[float]) -> float | None:
    """Return the mean of the last tenth of ``rewards``, the mean rewards of a run's steps in order, as the final reward
    of the run. At least one value is used; the result is ``None`` for an empty sequence.

    >>> last_tenth([0.0, 0.5, 1.0]), last_tenth([])
    (1.0, None)
    """
    last = rewards[-max(1, len(rewards) // 10) :]
    return sum(last) / len(last) if last else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile ``share`` (0 to 1) of ``ordered``, a sequence in ascending order that must not be empty: the
    smallest element that is not less than this fraction of the elements.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.9)
    (2, 4)
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
