"""What a run says when it is over."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.output import console, table
from headrace.control.summary import Summary
from headrace.observe.words import number


def show_summary(summary: Summary) -> None:
    """The figures of a run that people ask for first, and where to look on."""
    out = console()
    out.print()
    out.print(f"{summary.status} after {summary.steps} steps", style="bold")
    rows = table("", "", "")
    rows.show_header = False
    rows.add_row("held-out mean reward", f"{number(summary.eval_before)} → {number(summary.eval_after)}")
    rows.add_row("reward of the batches", f"{number(summary.reward_first)} → {number(summary.reward_last)}")
    rows.add_row("training took", f"{summary.wall_s:.1f} s")
    rows.add_row("generated", f"{summary.tokens_generated:,} tokens, {summary.generated_tok_s:,.0f} per second")
    rows.add_row("trained", f"{summary.tokens_trained:,} tokens, {summary.trained_tok_s:,.0f} per second")
    rows.add_row("idle", f"engine {summary.engine_idle_frac:.0%}, learner {summary.learner_idle_frac:.0%}")
    gap = summary.commit_gap_ms
    rows.add_row("commit gap", f"median {gap.p50:.2f} ms, p99 {gap.p99:.2f} ms; {summary.sequences_restarted} restarts")
    rows.add_row("training stood still for sync", f"{summary.exposed_sync_frac:.2%} of the time")
    rows.add_row("oldest token trained", f"{summary.max_token_age} versions")
    rows.add_row("engine against learner", f"mean |Δ logprob| {number(summary.mismatch_abs)}")
    groups = summary.ledger.groups
    dropped = sum(groups.dropped.values())
    rest = f"{groups.trained} trained + {dropped} dropped + {groups.in_flight} in flight"
    rows.add_row("groups", f"{groups.submitted} submitted = {rest}")
    out.print(rows)
    if summary.verdict:
        out.print(summary.verdict)
    for warning in summary.warnings:
        out.print(f"warning: {warning}", style="yellow")
    report = Path(summary.run_dir) / "report" / "report.html"
    if report.exists():
        out.print(f"report   {report}")
    out.print(f"run      {summary.run_dir}")
