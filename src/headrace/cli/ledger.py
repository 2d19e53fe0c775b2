"""``headrace ledger``."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.cli.output import console, print_json, readable, table


def ledger(
    run_dir: Path = typer.Argument(help="The run's directory."),
    as_json: bool = typer.Option(False, "--json", help="Print it as JSON."),
) -> None:
    """Show what became of every group, episode and token, and whether the books balance."""
    from headrace.control.summing import ledger_summary
    from headrace.flow.ledger import SqliteLedger
    from headrace.session.directory import LEDGER_FILE

    book = SqliteLedger.open(run_dir / LEDGER_FILE)
    try:
        conservation, ages = book.conservation(), book.ages()
        notes = [{"kind": kind, "detail": detail, "at_s": at_s} for kind, detail, at_s in book.notes()]
    finally:
        book.close()
    summary = ledger_summary(conservation)
    if as_json:
        print_json({"conservation": summary, "holds": conservation.holds, "ages": ages, "notes": notes})
        return
    out = console()
    rows = table("conservation", "", "submitted", "trained", "dropped", "in flight", "balance")
    units = {"groups": conservation.groups, "episodes": conservation.episodes, "tokens": conservation.tokens}
    for name, fates in units.items():
        dropped = sum(fates.dropped.values())
        counts = (fates.submitted, fates.trained, dropped, fates.in_flight, fates.balance)
        rows.add_row(name, *(f"{count:,}" for count in counts))
    out.print(rows)
    reasons = {reason for fates in units.values() for reason in fates.dropped}
    if reasons:
        fates_table = table("\ndropped, by reason", "reason", *units)
        for reason in sorted(reasons):
            fates_table.add_row(readable(reason), *(f"{fates.dropped.get(reason, 0):,}" for fates in units.values()))
        out.print(fates_table)
    if ages:
        age_table = table("\ntrained tokens, by age in versions", "age", "tokens")
        for age, tokens in ages.items():
            age_table.add_row(str(age), f"{tokens:,}")
        out.print(age_table)
    out.print("\nthe books balance" if conservation.holds else "\nTHE BOOKS DO NOT BALANCE", style="bold")
    if not conservation.holds:
        raise typer.Exit(1)
