"""The rows of a comparison, one per run: figures on learning, speed, idle time, age of tokens, waste and weight sync.

All figures are read from the files of the run directory. For a run that was resumed, all figures except the held-out
rewards cover only the part after the last resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.run.observe.metrics import combine_over_run
from headrace.run.observe.rundata import RunData, load_run


class RecipeRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one recipe: one row of the table. A figure is ``None`` if the run has not recorded the data from
    which it is computed."""

    recipe: str
    """Name of the recipe."""
    status: str
    """``finished``, ``stopped`` or ``failed``."""
    cause: str = ""
    """Reason of the failure; empty for a run that has not failed."""
    resumed: bool = False
    """Whether the run was interrupted and resumed, so that its figures cover only the part after the last resume."""
    settings: dict[str, str] = {}
    """The values in the run of the settings that recipes decide, as text, by name of the setting."""
    steps: int = 0
    """Number of optimizer steps."""
    seconds: float = 0.0
    """Time from the first rollout to the last commit."""
    eval_before: float | None = None
    """Mean reward on the held-out rows before training."""
    eval_after: float | None = None
    """Mean reward on the held-out rows after training."""
    reward_last: float | None = None
    """Mean reward over the last tenth of the steps."""
    gain: float | None = None
    """Held-out reward after training minus held-out reward before; without held-out rows, mean reward of the last
    batches minus mean reward of the first batches."""
    gain_per_minute: float | None = None
    """Gain per minute of ``seconds``; ``None`` for a resumed run."""
    gain_per_mtok: float | None = None
    """Gain per million generated tokens; ``None`` for a resumed run."""
    generated_tok_s: float | None = None
    trained_tok_s: float | None = None
    engine_idle_frac: float | None = None
    learner_idle_frac: float | None = None
    age_mean: float | None = None
    """Mean age of trained tokens, in versions."""
    age_max: int | None = None
    """Largest age of a trained token, in versions."""
    wasted_frac: float | None = None
    """Fraction of the generated tokens that will never be trained; ``None`` for a resumed run, which may also drop
    tokens that were generated before the resume."""
    wasted_tokens: dict[str, int] = {}
    """Number of wasted tokens by the reason for which they were dropped."""
    gap_p99_ms: float | None = None
    """99th percentile of the commit gap in milliseconds."""
    exposed_sync_frac: float | None = None
    """Fraction of the learner's time in which it was blocked by the weight sync."""
    commit_wait_ms: float | None = None
    """Mean time in milliseconds that a commit waited for running sequences."""
    sync_bytes: float | None = None
    """Mean number of bytes that one version transferred."""
    carried_over: int = 0
    """Number of running sequences that continued under newer weights."""
    recomputed_tokens: int = 0
    """Number of cached tokens of these sequences that were computed again."""
    run_dir: str = ""


def read_recipe_row(recipe: str, run_dir: Path) -> RecipeRow:
    """Return the row of ``recipe``, read from the files of its run in ``run_dir``.

    Raises :class:`~headrace.base.errors.DataError` if ``run_dir`` contains no run.
    """
    run = load_run(run_dir)
    figures, sums = run.figures, combine_over_run(run.session)
    ages = {int(age): tokens for age, tokens in (figures.get("age_histogram") or {}).items()}
    commits = sums.get("sync/commits", 0.0)
    last = run.session[-1] if run.session else None
    wasted = dict(last.wasted_tokens) if last is not None else {}
    generated = last.generated_tokens if last is not None else 0
    resumed = len(run.session) < len(run.steps)
    return RecipeRow(
        recipe=recipe,
        status=str(figures.get("status", "stopped")),
        cause=str(figures.get("cause", "")),
        resumed=resumed,
        settings=select_decided(run.config),
        steps=int(figures.get("steps", 0)),
        seconds=float(figures.get("wall_s") or 0.0),
        reward_last=run.figure("reward_last"),
        **_compute_gains(run),
        **{name: run.figure(name) for name in _COPIED_FIGURES},
        age_mean=sum(age * tokens for age, tokens in ages.items()) / sum(ages.values()) if ages else None,
        age_max=max(ages, default=None),
        wasted_frac=sum(wasted.values()) / generated if generated and not resumed else None,
        wasted_tokens=wasted,
        gap_p99_ms=(figures.get("commit_gap_ms") or {}).get("p99"),
        commit_wait_ms=sums["sync/wait_s"] / commits * 1e3 if commits else None,
        sync_bytes=sums["sync/bytes"] / commits if commits else None,
        carried_over=int(sums.get("sync/carried_over", 0)),
        recomputed_tokens=int(sums.get("sync/recomputed_tokens", 0)),
        run_dir=str(run_dir),
    )


_COPIED_FIGURES = ("generated_tok_s", "trained_tok_s", "engine_idle_frac", "learner_idle_frac", "exposed_sync_frac")


def _compute_gains(run: RunData) -> dict[str, float | None]:
    """Return five fields of the row of a run: the held-out rewards before and after training, and the gain in total,
    per minute and per million tokens. The last two are ``None`` for a resumed run, because its time and tokens are
    known only for the part after the last resume."""
    before, after = run.figure("eval_before"), run.figure("eval_after")
    first, last = run.figure("reward_first"), run.figure("reward_last")
    whole = len(run.session) == len(run.steps)
    gain = None
    if before is not None and after is not None:
        gain = after - before
    elif before is None and first is not None and last is not None:
        gain = last - first
    seconds, tokens = run.figure("wall_s"), run.figure("tokens_generated")
    return {
        "eval_before": before,
        "eval_after": after,
        "gain": gain,
        "gain_per_minute": gain / seconds * 60 if gain is not None and seconds and whole else None,
        "gain_per_mtok": gain / tokens * 1e6 if gain is not None and tokens and whole else None,
    }


def select_decided(config: dict[str, Any]) -> dict[str, str]:
    """Return the settings that recipes decide, as text by name. ``config`` contains all settings of a run, defaults
    included; a setting without a value is left out.

    >>> select_decided({"flow": {"policy": {"kind": "unbounded", "stale": "reject"}, "max_age": 4, "lead": 8}})
    {'policy': 'unbounded, reject', 'max_age': '4', 'lead': '8'}
    """
    flow, sync, algo = (config.get(name) or {} for name in ("flow", "sync", "algo"))
    policy = flow.get("policy") or {}
    corrections = [each["kind"] for each in algo.get("correction") or ()]
    words = {
        "policy": ", ".join(str(policy[key]) for key in ("kind", "stale") if key in policy),
        "max_age": flow.get("max_age"),
        "lead": flow.get("max_age") if flow.get("lead") is None else flow.get("lead"),
        "interrupt": sync.get("interrupt"),
        "transport": sync.get("transport"),
        "codec": sync.get("codec"),
        "loss": (algo.get("loss") or {}).get("kind"),
        "correction": " and ".join(corrections) or ("none" if algo else None),
    }
    return {name: str(value) for name, value in words.items() if value not in (None, "")}
