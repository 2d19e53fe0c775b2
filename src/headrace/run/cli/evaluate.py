"""``headrace eval``: measure a model on the held-out rows.

Each row is attempted several times. avg@n is the mean reward over n attempts, pass@k the probability that at least one
of k attempts passes, pass^k that all of them do. A *harness* is an evaluation program of another library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry
from headrace.run.cli.commands import USE, Verb
from headrace.run.cli.output import VISIBLE, console, print_json, readable, starting, table
from headrace.run.cli.train import SET_HELP

if TYPE_CHECKING:
    from headrace.control.evaluation import IntervalEstimate
    from headrace.run.session import Evaluation


HARNESSES: Registry[Callable[[Path, Sequence[str]], int]] = Registry(group="headrace.harnesses", setting="--harness")
"""Functions that run an evaluation harness on the weights of a run, with its arguments, and return its exit code."""
SOURCE_HELP = "A run file (TOML), for its model; or a run directory, for its last checkpoint."
TOKEN_VARIABLE = "HEADRACE_EVAL_TOKEN"
"""The environment variable with the bearer token for ``--url``: a secret must not be a command-line argument."""


def evaluate(
    source: Path = typer.Argument(metavar="WHERE", help=SOURCE_HELP),
    arguments: list[str] = typer.Argument(None, help="After --: what a harness reads.", metavar="[-- ARGUMENT...]"),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    n: int = typer.Option(None, "--n", help="Attempts at each row; unset: run.eval_samples.", show_default=False),
    ks: list[int] = typer.Option(
        [], "--k", help="k of pass@k and pass^k (repeat); unset: 1, 2, 4, ... up to --n.", show_default=False
    ),
    temperature: float = typer.Option(
        None, "--temperature", help="Unset: run.eval_temperature; 0: the most likely token.", show_default=False
    ),
    pass_reward: float = typer.Option(1.0, "--pass-reward", help="The smallest reward with which an attempt passes."),
    out: Path = typer.Option(
        None, "--out", help="Directory of the pages; unset: a new one, in the run's or in runs/.", show_default=False
    ),
    url: str = typer.Option(
        "", "--url", help="An OpenAI-compatible API (with /v1) that serves the model; no engine is then started."
    ),
    served: str = typer.Option("", "--served", help="The model's name in that API; unset: the first that it lists."),
    token: str = typer.Option("", envvar=TOKEN_VARIABLE, help="The bearer token of that API.", show_default=False),
    pages: int = typer.Option(1000, "--pages", min=0, help="Largest number of episodes that get a page."),
    harness: str = typer.Option(
        "", "--harness", help="Let a harness measure instead: lm-eval or inspect.", show_default=False
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Measure a model on the held-out rows, without training: avg@k, pass@k, pass^k, and a page for each episode."""
    ignored = {"n": n, "set": overrides, "k": ks, "temperature": temperature, "out": out, "url": url}
    _run_harness_if_named(harness, source, arguments or [], ignored)
    starting(f"reading {source} and loading what an evaluation needs")
    from headrace.base.clock import RealClock
    from headrace.base.config.addresses import refuse_secret
    from headrace.base.heap import gc_disabled

    with gc_disabled():
        from headrace.engine.remote import RemoteEndpoint
        from headrace.run.session import Measures
        from headrace.run.session import evaluate as measure
        from headrace.run.session.directory import choose_directory, find_run_file

    refuse_secret("--url", url, f"set {TOKEN_VARIABLE}", reason=VISIBLE)
    settings = {"run.eval_samples": n, "run.eval_temperature": temperature}
    overrides = [*overrides, *(f"{name}={value}" for name, value in settings.items() if value is not None)]
    directory = choose_directory("" if out is None else str(out), RealClock(), prefix="eval-")
    if out is None and source.is_dir():
        directory = source / directory.name
    endpoint = RemoteEndpoint(url=url, model=served, token=token) if url else None
    measures = Measures(ks=ks, pass_reward=pass_reward, directory=directory, max_pages=pages, running_engine=endpoint)
    result = measure(find_run_file(source), overrides=overrides, measures=measures, on_progress=starting)
    print_json(result) if as_json else _show(result)


def _run_harness_if_named(harness: str, source: Path, arguments: Sequence[str], ignored: Mapping[str, object]) -> None:
    """Run the evaluation harness named ``harness``, a program of another library such as lm-eval, and exit with its
    exit code; return if ``harness`` is empty. ``source`` is the run, and ``arguments`` are passed to the harness.

    ``ignored`` contains the options of this command, by name, that a harness ignores. Raises
    :class:`~headrace.base.errors.ConfigError` if the user has set such an option for a harness, and for arguments
    without a harness.
    """
    if not harness and arguments:
        raise ConfigError(f"{arguments[0]!r} is for a harness, and there is none", remedy="name one: --harness lm-eval")
    if not harness:
        return
    given = next((name for name, value in ignored.items() if value not in (None, "", [])), None)
    if given is not None:
        raise ConfigError(f"--{given} is not read by a harness", remedy="give the harness its own arguments after --")
    run = HARNESSES.load(harness)
    starting(f"serving the weights of {source} for {harness}")
    raise typer.Exit(run(source, arguments))


def _show(result: Evaluation) -> None:
    """Print the result of an evaluation: warnings, a line of totals, a table of avg@n, pass@k and pass^k with their
    intervals, and the path of the pages."""
    out = console()
    for warning in result.warnings:
        out.print(f"warning: {readable(warning)}", style="yellow")
    out.print(
        f"mean reward {result.mean_reward:.4f} over {result.tasks} tasks × {result.samples}, temperature "
        f"{result.temperature:g}, {result.tokens:,} tokens in {result.seconds:.1f} s, model {readable(result.model)}"
    )
    shown = table("", "", "", "95 % interval")
    for name, estimate in result.figures().items():
        shown.add_row(name, f"{estimate.value:.4f}", _format_interval(estimate))
    out.print(shown)
    out.print(f"pages    {readable(result.directory)}/index.html")


def _format_interval(estimate: IntervalEstimate) -> str:
    """Return the 95 % interval of an estimate as text; a dash if the estimate has no interval."""
    if estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.low:.4f} to {estimate.high:.4f}"


VERB = Verb(run=evaluate, group=USE, place=10)
