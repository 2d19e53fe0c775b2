"""What a run says when it is over."""

from __future__ import annotations

from pathlib import Path

from headrace.control.summary import Summary
from headrace.run.cli.output import console, readable
from headrace.run.observe.words import duration, number, percent, plural


def show_summary(summary: Summary) -> None:
    """The figures of a run that people ask for first, and where to look on."""
    out = console()
    out.print()
    out.print(f"{summary.status} after {plural(summary.steps, 'step')}", style="bold")
    for name, figure in _figures(summary):
        out.print(f"  {name:<28} {figure}")
    if summary.verdict:
        out.print(readable(summary.verdict))
    for name, counts in summary.reward_failures.items():
        share = f"{counts.failed:,} of {counts.calls:,} calls failed"
        out.print(f"reward {readable(name)}: {share}; the first: {readable(counts.first_cause)}", style="yellow")
    for warning in summary.warnings:
        out.print(f"warning: {readable(warning)}", style="yellow")
    report = Path(summary.run_dir) / "report" / "report.html"
    if report.exists():
        out.print(f"report   {report}")
    out.print(f"run      {readable(summary.run_dir)}")


def _figures(summary: Summary) -> list[tuple[str, str]]:
    gap, groups = summary.commit_gap_ms, summary.ledger.groups
    dropped = sum(groups.dropped.values())
    rest = f"{groups.trained:,} trained + {dropped:,} dropped + {groups.in_flight:,} in flight"
    restarts = plural(summary.sequences_restarted, "restart")
    return [
        ("held-out mean reward", f"{number(summary.eval_before)} → {number(summary.eval_after)}"),
        ("mean reward of the batches", f"{number(summary.reward_first)} → {number(summary.reward_last)}"),
        ("training took", duration(summary.wall_s)),
        ("generated", f"{plural(summary.tokens_generated, 'token')}, {summary.generated_tok_s:,.0f} per second"),
        ("trained", f"{plural(summary.tokens_trained, 'token')}, {summary.trained_tok_s:,.0f} per second"),
        ("idle", f"engine {percent(summary.engine_idle_frac)}, learner {percent(summary.learner_idle_frac)}"),
        ("commit gap", f"median {duration(gap.p50 / 1e3)}, p99 {duration(gap.p99 / 1e3)}; {restarts}"),
        ("stood still for the sync", f"{summary.exposed_sync_frac:.2%} of the learner's time"),
        ("oldest token trained", plural(summary.max_token_age, "version")),
        ("engine against learner", f"mean |Δ logprob| {number(summary.mismatch_abs)} at equal weights"),
        ("groups", f"{groups.submitted:,} submitted = {rest}"),
    ]
