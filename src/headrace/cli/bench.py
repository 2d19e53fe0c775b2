"""``headrace bench``."""

from __future__ import annotations

import typer

from headrace.bench import BENCHMARKS
from headrace.cli.output import console, print_json

HELP = "\n\n".join(
    [
        "Measure this machine, and hold the figures against their targets.",
        *(f"[bold]{name}[/bold]  {what}" for name, what in BENCHMARKS.items()),
    ]
)
"""What the verb says of itself: every name, and what it measures."""


def bench(
    name: str = typer.Argument(help=f"Which: {', '.join(BENCHMARKS)}."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    threads: int = typer.Option(0, min=0, help="engine, learner, sync: threads of each side; 0 for its default."),
    quick: bool = typer.Option(
        False,
        "--quick",
        help="agents, distill, engine, fleet, fuzz, learner, ledger, plan, scoring, sync: only show that it runs.",
    ),
    vllm: str = typer.Option("", metavar="PYTHON", help="engine: an interpreter that has vLLM for CPUs, to compare."),
    runs: int = typer.Option(0, min=0, help="faults: how many runs; fuzz: how many inputs; 0 for the default."),
    seed: int = typer.Option(0, min=0, help="faults: of the first run, the next has the next; fuzz."),
) -> None:
    """Measure this machine, and hold the figures against their targets."""
    from headrace.bench import run_benchmark, show

    progress = console(stderr=True)
    given = {"threads": threads, "quick": quick, "vllm": vllm, "runs": runs, "seed": seed}
    result = run_benchmark(
        name,
        tell=lambda line: progress.print(line, style="dim"),
        **{option: value for option, value in given.items() if value},
    )
    if as_json:
        print_json(result)
    else:
        console().print(show(result))
    if not all(target.holds for target in result.targets):
        raise typer.Exit(1)
