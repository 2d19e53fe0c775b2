"""``headrace ledger``: print how many groups, episodes and tokens of a run were trained, dropped, or are in flight.

The *ledger* is the durable record of a run. Its books *balance* (conservation) if every group, episode and token that
was submitted is trained, dropped for a known reason, or in flight.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import console, print_json, readable, starting, table

if TYPE_CHECKING:
    from headrace.flow.ledger import Conservation, Ledger, UnitCounts
    from headrace.flow.ledger.survivors import Survivors


def ledger(
    run_dir: Path = typer.Argument(help="The run's directory."),
    as_json: bool = typer.Option(False, "--json", help="Print the counts as JSON."),
    replay: bool = typer.Option(
        False, "--replay", help="Train a fresh learner on the recorded batches, and compare its weights."
    ),
) -> None:
    """Show what became of every group, episode and token, and whether the books balance."""
    starting(f"reading {run_dir}")
    from headrace.flow.ledger.opening import has_ledger, open_ledger

    if not has_ledger(run_dir):
        from headrace.run.session.directory import refuse_no_ledger

        refuse_no_ledger(run_dir)
    book = open_ledger(run_dir)
    try:
        agrees = _replay(run_dir, book, as_json) if replay else _show(run_dir, book, as_json)
    finally:
        book.close()
    if not agrees:
        raise typer.Exit(1)


def _show(run_dir: Path, book: Ledger, as_json: bool) -> bool:
    """Print the counts, the ages of trained tokens and the lengths of episodes in the ledger ``book`` of the run in
    ``run_dir``, and the sizes of its files, as tables or with ``as_json`` as JSON. Return whether the books balance."""
    from headrace.base.store import COLUMNS, directory_bytes
    from headrace.flow.ledger.opening import ledger_bytes
    from headrace.flow.ledger.survivors import survivors
    from headrace.run.observe.words import plural

    conservation, ages, bias = book.conservation(), book.ages(), survivors(book.lengths())
    updates = book.updates()
    columns_bytes = directory_bytes(run_dir / COLUMNS)
    if as_json:
        tree: dict[str, Any] = {
            "conservation": conservation,
            "holds": conservation.holds,
            "steps": len(updates),
            "updates": sum(updates.values()),
            "ages": ages,
            "ledger_bytes": ledger_bytes(run_dir),
            "columns_bytes": columns_bytes,
            "survivors": None if bias is None else {**msgspec.structs.asdict(bias), "biased": bias.biased},
            "notes": [{"kind": kind, "detail": detail, "at_s": at_s} for kind, detail, at_s in book.notes()],
        }
        print_json(tree)
        return conservation.holds
    out = console()
    _show_books(out, conservation)
    out.print(f"\n{plural(len(updates), 'step')}, {plural(sum(updates.values()), 'update')} of the weights")
    if ages:
        age_table = table("\ntrained tokens, by age in versions", "age", "tokens")
        for age, tokens in ages.items():
            age_table.add_row(str(age), f"{tokens:,}")
        out.print(age_table)
    if bias is not None:
        _show_survivors(out, bias)
    stored = f", and kept-sets and experts {columns_bytes / 1e6:,.1f} MB" if columns_bytes else ""
    out.print(f"\nthe ledger's files have {ledger_bytes(run_dir) / 1e6:,.1f} MB{stored}")
    out.print("\nthe books balance" if conservation.holds else "\nTHE BOOKS DO NOT BALANCE", style="bold")
    return conservation.holds


def _show_books(out: Console, conservation: Conservation) -> None:
    """Print two tables to ``out``: how many groups, episodes and tokens were submitted, trained and dropped and are in
    flight, and how many were dropped for each reason."""
    rows = table("conservation", "", "submitted", "trained", "dropped", "in flight", "balance")
    units: dict[str, UnitCounts] = {
        "groups": conservation.groups,
        "episodes": conservation.episodes,
        "tokens": conservation.tokens,
    }
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


def _show_survivors(out: Console, bias: Survivors) -> None:
    """Print to ``out`` how the lengths of trained episodes differ from the lengths of all submitted episodes, in
    tokens, and whether a statistical test finds that training favours some lengths (survivor bias)."""
    rows = table("\ntokens of an episode whose group was trained or dropped", "", "submitted", "trained")
    rows.add_row("episodes", f"{bias.num_submitted:,}", f"{bias.num_trained:,}")
    rows.add_row("mean", *(f"{mean:,.1f}" for mean in bias.mean))
    for quantile, lengths in bias.quantiles.items():
        rows.add_row(f"quantile {quantile}", *(f"{length:,.0f}" for length in lengths))
    out.print(rows)
    if bias.num_withdrawn:
        out.print(f"{bias.num_withdrawn:,} more were withdrawn before they ended: their full length is not known")
    verdict = "some lengths survive" if bias.biased else "no sign that some lengths survive"
    test = f"two-sample Kolmogorov–Smirnov: distance {bias.ks:.3f}, p = {bias.p_value:.2g}"
    out.print(f"{verdict} more often than others ({test})")


def _replay(run_dir: Path, book: Ledger, as_json: bool) -> bool:
    """Train a fresh learner on the batches that the ledger ``book`` of the run in ``run_dir`` has recorded, and print
    which versions of its weights are equal, bit for bit, to the run's. Return whether all versions are equal."""
    from headrace.run.observe.words import plural
    from headrace.run.session.replaying import replay

    out = console()
    result = replay(run_dir, book, on_progress=lambda line: None if as_json else out.print(line))
    trained_again = f"{plural(result.steps, 'step')} trained again"
    if as_json:
        print_json({**msgspec.structs.asdict(result), "first_difference": result.first_difference})
    elif result.first_difference is None:
        out.print(f"{trained_again}: the weights of {plural(len(result.agree), 'version')} agree bit for bit")
    else:
        out.print(
            f"{trained_again}: the weights differ from version {result.first_difference} on "
            "(other software, settings or threads than the run's, or steps of a run that was resumed with others)"
        )
    return result.first_difference is None


VERB = Verb(run=ledger, group=LOOK, place=50)
