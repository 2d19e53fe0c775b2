"""One run as a row: what it learned in what time, who waited, how old tokens were, the waste, the sync.

Everything is read from the files of the run directory. Of a run that was resumed, all but the held-out rewards is of
its last life.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.run.observe.metrics import over_run
from headrace.run.observe.rundata import RunData, load_run


class RecipeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one recipe came to. ``None``: there is nothing to tell it from."""

    recipe: str
    status: str
    """``finished``, ``stopped`` or ``failed``."""
    cause: str = ""
    """Why it failed."""
    resumed: bool = False
    """Whether it was broken off and went on: its figures are those of the last part."""
    settings: dict[str, str] = {}
    """What the recipe decides, as the run had it."""
    steps: int = 0
    seconds: float = 0.0
    """From the first rollout to the last commit."""
    eval_before: float | None = None
    eval_after: float | None = None
    """Mean reward on the held-out rows."""
    reward_last: float | None = None
    """Mean reward over the last tenth of the steps."""
    gain: float | None = None
    """Held-out reward after less before; without held-out rows that of the last batches less that of the first."""
    gain_per_minute: float | None = None
    gain_per_mtok: float | None = None
    """Per million generated tokens."""
    generated_tok_s: float | None = None
    trained_tok_s: float | None = None
    engine_idle_frac: float | None = None
    learner_idle_frac: float | None = None
    age_mean: float | None = None
    """Over trained tokens, in versions."""
    age_max: int | None = None
    wasted_frac: float | None = None
    """Of the generated tokens, those that will never be trained; ``None`` of a resumed run, which drops what an earlier
    part has generated."""
    wasted_tokens: dict[str, int] = {}
    """The same by reason."""
    gap_p99_ms: float | None = None
    """How long the engine stood still per commit, of the worst."""
    exposed_sync_frac: float | None = None
    """Fraction of the time that the learner stood still for the sync."""
    commit_wait_ms: float | None = None
    """How long a commit waited for sequences that ran, at the mean."""
    sync_bytes: float | None = None
    """Of one version, at the mean."""
    carried_over: int = 0
    """Running sequences that went on under newer weights."""
    recomputed_tokens: int = 0
    """Cached tokens of theirs that were computed again."""
    run_dir: str = ""


def row_of(recipe: str, run_dir: Path) -> RecipeRow:
    """The row of the run in ``run_dir``. Raises :class:`~headrace.base.errors.DataError` where there is none."""
    run = load_run(run_dir)
    told, sums = run.figures, over_run(run.session)
    ages = {int(age): tokens for age, tokens in (told.get("age_histogram") or {}).items()}
    commits = sums.get("sync/commits", 0.0)
    last = run.session[-1] if run.session else None
    wasted = dict(last.wasted_tokens) if last is not None else {}
    generated = last.generated_tokens if last is not None else 0
    resumed = len(run.session) < len(run.steps)
    return RecipeRow(
        recipe=recipe,
        status=str(told.get("status", "stopped")),
        cause=str(told.get("cause", "")),
        resumed=resumed,
        settings=decided(run.config),
        steps=int(told.get("steps", 0)),
        seconds=float(told.get("wall_s") or 0.0),
        reward_last=run.measured("reward_last"),
        **_gains(run),
        **{name: run.measured(name) for name in _AS_TOLD},
        age_mean=sum(age * tokens for age, tokens in ages.items()) / sum(ages.values()) if ages else None,
        age_max=max(ages, default=None),
        wasted_frac=sum(wasted.values()) / generated if generated and not resumed else None,
        wasted_tokens=wasted,
        gap_p99_ms=(told.get("commit_gap_ms") or {}).get("p99"),
        commit_wait_ms=sums["sync/wait_s"] / commits * 1e3 if commits else None,
        sync_bytes=sums["sync/bytes"] / commits if commits else None,
        carried_over=int(sums.get("sync/carried_over", 0)),
        recomputed_tokens=int(sums.get("sync/recomputed_tokens", 0)),
        run_dir=str(run_dir),
    )


_AS_TOLD = ("generated_tok_s", "trained_tok_s", "engine_idle_frac", "learner_idle_frac", "exposed_sync_frac")


def _gains(run: RunData) -> dict[str, float | None]:
    """How much better it became, over time and over tokens; a resumed run has no time that this could be divided by."""
    before, after = run.measured("eval_before"), run.measured("eval_after")
    first, last = run.measured("reward_first"), run.measured("reward_last")
    whole = len(run.session) == len(run.steps)
    gain = None
    if before is not None and after is not None:
        gain = after - before
    elif before is None and first is not None and last is not None:
        gain = last - first
    seconds, tokens = run.measured("wall_s"), run.measured("tokens_generated")
    return {
        "eval_before": before,
        "eval_after": after,
        "gain": gain,
        "gain_per_minute": gain / seconds * 60 if gain is not None and seconds and whole else None,
        "gain_per_mtok": gain / tokens * 1e6 if gain is not None and tokens and whole else None,
    }


def decided(config: dict[str, Any]) -> dict[str, str]:
    """What recipes decide of a run's resolved settings, in words.

    >>> decided({"flow": {"policy": {"kind": "unbounded", "stale": "reject"}, "max_age": 4, "lead": 8}})
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
