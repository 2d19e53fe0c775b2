"""The summary, made from the run's state and its ledger."""

from __future__ import annotations

import numpy as np

from headrace.control.recording import account, tokens_generated, training_s
from headrace.control.state import RunState
from headrace.control.summary import CommitGap, LedgerSummary, Summary, UnitFates
from headrace.flow.ledger.base import Conservation, Fates


def summarize(
    state: RunState,
    books: Conservation,
    *,
    status: str,
    cause: str,
    eval_after: float | None,
) -> Summary:
    """What the run came to. ``eval_after`` is the held-out mean reward at its end."""
    tally = state.tally
    wall_s = training_s(state)
    rewards = [reward for reward in tally.rewards if reward is not None]
    last = rewards[-max(1, len(rewards) // 10) :]
    shares = account(state)
    generated = tokens_generated(state) if state.training_from_s is not None else 0
    gaps_ms = np.array(tally.commit_gaps_s or [0.0]) * 1e3
    return Summary(
        status=status,
        cause=cause,
        eval_before=tally.eval_before,
        eval_after=eval_after,
        reward_first=tally.reward_first,
        reward_last=sum(last) / len(last) if last else None,
        steps=state.flow.state.version,
        tokens_generated=generated,
        tokens_trained=tally.tokens_trained,
        wall_s=wall_s,
        generated_tok_s=generated / wall_s if wall_s else 0.0,
        trained_tok_s=tally.tokens_trained / wall_s if wall_s else 0.0,
        engine_idle_frac=shares.engine_idle,
        learner_idle_frac=shares.learner_idle,
        commit_gap_ms=CommitGap(p50=float(np.percentile(gaps_ms, 50)), p99=float(np.percentile(gaps_ms, 99))),
        exposed_sync_frac=shares.of_time(shares.exposed_sync_s),
        sequences_restarted=tally.restarted,
        max_token_age=max(tally.ages, default=0),
        age_histogram=dict(sorted(tally.ages.items())),
        mismatch_kl=tally.mismatch_kl,
        mismatch_abs=tally.mismatch_abs,
        ledger=ledger_summary(books),
        versions=[tally.versions[0], tally.versions[-1]] if tally.versions else [],
        reward_failures=dict(tally.rewarding.failing()),
        warnings=state.warnings,
        recoveries=[str(recovery) for recovery in tally.recoveries],
        verdict="",
        run_dir=str(state.parts.run_dir),
        stopped_by=state.stopped_by if status == "stopped" else "",
    )


def ledger_summary(books: Conservation) -> LedgerSummary:
    """The conservation table as it is written to files."""
    return LedgerSummary(groups=_unit(books.groups), episodes=_unit(books.episodes), tokens=_unit(books.tokens))


def _unit(fates: Fates) -> UnitFates:
    return UnitFates(
        submitted=fates.submitted, trained=fates.trained, dropped=dict(fates.dropped), in_flight=fates.in_flight
    )
