"""The verb ``headrace bench``: run one benchmark of this machine, and print its report."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from headrace.run.cli.commands import PLAN, Verb
from headrace.run.cli.output import console, print_json, starting
from headrace.wings.bench import BENCHMARKS

HELP = "\n\n".join(
    [
        "Measure this machine and compare the results with their targets.",
        *(f"[bold]{name}[/bold]  {what}" for name, what in BENCHMARKS.items()),
    ]
)
"""The help text of the command: the name of every benchmark and what it measures."""


def bench(
    name: str = typer.Argument(help=f"Benchmark to run: {', '.join(BENCHMARKS)}."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    threads: int = typer.Option(
        0, min=0, help="engine, learner, speculation, sync: threads per process; 0: the benchmark's default."
    ),
    quick: bool = typer.Option(False, "--quick", help="Small sizes, as a trial; a benchmark without them refuses it."),
    vllm: str = typer.Option(
        "", metavar="PYTHON", help="engine, gpu: an interpreter that has vLLM (engine: for CPUs), to compare."
    ),
    stages: str = typer.Option("", metavar="NAME,NAME", help="gpu: stages to run; all by default."),
    budget: float = typer.Option(0.0, min=0.0, metavar="SECONDS", help="gpu: time for all stages; 600 by default."),
    compare: str = typer.Option("", metavar="FILE", help="gpu: a file of --out of another day, to compare with."),
    pretend: bool = typer.Option(
        False, "--pretend", help="gpu: run all stages without a GPU, on tiny models: a trial of the program."
    ),
    out: str = typer.Option(
        "", metavar="FILE", help="gpu: the JSON file, written after each stage; gpu-DATE-TIME.json by default."
    ),
    before: str = typer.Option("", metavar="PYTHON", help="controller: an interpreter of an earlier headrace, beside."),
    seeds: str = typer.Option("", metavar="N,N", help="learning: seeds; 0,1,2,3,4 by default."),
    ages: str = typer.Option("", metavar="N,N", help="learning: flow.max_age of the runs; 0,1,2,4,8 by default."),
    tasks: str = typer.Option("", metavar="NAME,NAME", help="learning: demo, slow, long, gym."),
    parts: str = typer.Option(
        "",
        metavar="NAME,NAME",
        help="learning: variants of the settings: default; eager (groups start at once); idle clip (algo.old=learner); "
        "former (both, as the defaults were before); sampled (algo.old=sampled); ess, age (learner.damping.kind); "
        "alignment (learner.alignment).",
    ),
    steps: int = typer.Option(0, min=0, help="learning: steps of a run; 0: as many as the task sets."),
    directory: str = typer.Option(
        "",
        metavar="DIR",
        help="learning: keep models, datasets and figures here: a call continues where one before it stopped.",
    ),
) -> None:
    """Run one benchmark on this machine, print its report, and exit with status 1 if a target does not hold. Options
    that the benchmark does not have are refused; :data:`HELP` is the text of ``--help``."""
    given = {
        "threads": threads, "quick": quick, "vllm": vllm, "before": before,
        "stages": stages, "budget": budget, "compare": compare, "pretend": pretend, "out": out,
        "seeds": seeds, "ages": ages, "tasks": tasks, "parts": parts, "steps": steps, "directory": directory,
    }  # fmt: skip
    _run(name, {option: value for option, value in given.items() if value}, as_json=as_json)


def _run(name: str, options: Mapping[str, object], *, as_json: bool) -> None:
    """Run the benchmark ``name`` with its options, print its report, and exit with status 1 if a target does not hold.
    With ``as_json``, the report is printed as one JSON object."""
    starting(f"loading what the benchmark {name} needs")
    from headrace.wings.bench import run_benchmark
    from headrace.wings.bench.base import format_report

    progress = console(stderr=True)
    result = run_benchmark(name, on_progress=lambda line: progress.print(line, style="dim"), **options)
    if as_json:
        print_json(result)
    else:
        console().print(format_report(result))
    if not all(target.holds for target in result.targets):
        raise typer.Exit(1)


VERB = Verb(run=bench, group=PLAN, place=30, help=HELP)
