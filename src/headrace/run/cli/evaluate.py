"""``headrace eval``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.run.cli.output import VISIBLE, console, print_json, readable, starting, table
from headrace.run.cli.train import SET_HELP

if TYPE_CHECKING:
    from headrace.control.estimates import IntervalEstimate
    from headrace.run.session import Evaluation


TOKEN_VARIABLE = "HEADRACE_EVAL_TOKEN"


def evaluate(
    where: Path = typer.Argument(help="A run file (TOML): its model; or a run directory: its newest checkpoint."),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    n: int = typer.Option(None, "--n", help="Attempts at each row; unset: run.eval_samples.", show_default=False),
    ks: list[int] = typer.Option(
        [], "--k", help="k of pass@k and pass^k (repeat); unset: 1, 2, 4, ... up to --n.", show_default=False
    ),
    temperature: float = typer.Option(
        None, "--temperature", help="Unset: run.eval_temperature; 0: the most likely token.", show_default=False
    ),
    pass_reward: float = typer.Option(1.0, "--pass-reward", help="An attempt passes that earns at least this."),
    out: Path = typer.Option(
        None, "--out", help="Where the pages go; unset: a new folder of the run, or under runs/.", show_default=False
    ),
    url: str = typer.Option(
        "", "--url", help="An OpenAI-compatible API (with /v1) that serves the model, in place of an engine of our own."
    ),
    served: str = typer.Option("", "--served", help="What that API calls the model; unset: its first."),
    token: str = typer.Option("", envvar=TOKEN_VARIABLE, help="The bearer token that it wants.", show_default=False),
    pages: int = typer.Option(1000, "--pages", min=0, help="Episodes that get a page."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Measure a model on the held-out rows, without training: avg@k, pass@k, pass^k, and a page for each episode."""
    starting(f"reading {where} and loading what an evaluation needs")
    from headrace.base.clock import RealClock
    from headrace.base.config.addresses import refuse_secret
    from headrace.base.heap import growing_heap

    with growing_heap():
        from headrace.engine.remote import Elsewhere
        from headrace.run.session import Measures
        from headrace.run.session import evaluate as measure
        from headrace.run.session.directory import choose_directory, run_file_of

    refuse_secret("--url", url, f"set {TOKEN_VARIABLE}", reason=VISIBLE)
    given = [] if n is None else [f"run.eval_samples={n}"]
    given += [] if temperature is None else [f"run.eval_temperature={temperature}"]
    directory = choose_directory("" if out is None else str(out), RealClock(), prefix="eval-")
    if out is None and where.is_dir():
        directory = where / directory.name
    elsewhere = Elsewhere(url=url, model=served, token=token) if url else None
    measures = Measures(
        ks=ks, pass_reward=pass_reward, directory=directory, max_pages=pages, elsewhere=elsewhere
    )  # fmt: skip
    result = measure(run_file_of(where), overrides=[*overrides, *given], measures=measures, tell=starting)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: Evaluation) -> None:
    out = console()
    for warning in result.warnings:
        out.print(f"warning: {readable(warning)}", style="yellow")
    out.print(
        f"mean reward {result.mean_reward:.4f} over {result.tasks} tasks × {result.samples}, temperature "
        f"{result.temperature:g}, {result.tokens:,} tokens in {result.seconds:.1f} s, model {readable(result.model)}"
    )
    shown = table("", "", "", "95 % interval")
    shown.add_row(f"avg@{result.samples}", f"{result.avg.value:.4f}", _interval(result.avg))
    for k, estimate in result.pass_at.items():
        shown.add_row(f"pass@{k}", f"{estimate.value:.4f}", _interval(estimate))
    for k, estimate in result.pass_hat.items():
        shown.add_row(f"pass^{k}", f"{estimate.value:.4f}", _interval(estimate))
    out.print(shown)
    out.print(f"pages    {readable(result.directory)}/index.html")


def _interval(estimate: IntervalEstimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.low:.4f} to {estimate.high:.4f}"
