"""``headrace init``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from headrace.base.errors import ConfigError, HeadraceError
from headrace.run.cli.output import complain, console, readable

if TYPE_CHECKING:
    from headrace.run.session.first_run import Data

T = TypeVar("T")


def init(
    model: str = typer.Option("", help="Directory of a Hugging Face causal language model, or its name on a hub."),
    data: str = typer.Option("", help="Rows to train on: .jsonl, .csv or .parquet."),
    reward: str = typer.Option("", help="file.py:function; unset: reward.py is written, which compares with a column."),
    eval_data: Path = typer.Option(None, "--eval", help="Held-out rows.", show_default=False),
    prompt_column: str = typer.Option("", help="Column of the prompts; unset: prompt, question, ..."),
    answer_column: str = typer.Option("", help="Column of the expected answer, for reward.py; unset: answer, ..."),
    out: Path = typer.Option(Path("run.toml"), help="The run file to write."),
    force: bool = typer.Option(False, "--force", help="Write over it."),
) -> None:
    """Write a first run file, and check model, rows and reward while doing so.

    What no option says is asked, on a terminal.
    """
    from headrace.run.session.first_run import FirstRun, check_reward, find_data, find_model, refuse_existing

    refuse_existing(out, force=force)
    said = console()
    found = _told(model, "--model", "Model (a directory, or OWNER/NAME on a hub)", find_model)
    said.print(f"model    {readable(found.path)}: context {found.context:,}, chat template: {_yes(found.chats)}")
    rows = _told(data, "--data", "Rows to train on (a file)", lambda path: find_data(Path(path), found, prompt_column))
    columns = ", ".join(map(readable, rows.columns))
    said.print(f"rows     {len(rows.rows):,}, columns {columns}; prompts up to {rows.longest:,} tokens")
    for note in rows.notes:
        said.print(f"note     {readable(note)}", style="yellow")
    chosen, written = reward, False
    if not chosen:
        chosen, written = _own_reward(rows, answer_column, out.parent / "reward.py")
    check_reward(chosen, rows)
    said.print(f"reward   {readable(chosen)}{', written: look at it' if written else ''}")
    FirstRun(model=found, data=rows, reward=chosen, eval_path=eval_data).write(out, force=force)
    file = shlex.quote(str(out))
    said.print(f"written  {readable(str(out))}, and read by a dry run. Now:\n", style="bold")
    said.print(f"headrace train {readable(file)} --dry-run")
    said.print(f"headrace train {readable(file)}")


def _told(given: str, option: str, question: str, find: Callable[[str], T]) -> T:
    """What ``find`` makes of an option; where that says nothing, of an answer on a terminal, until it is right."""
    if given:
        return find(given)
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is not given, and nobody can be asked", remedy=f"give {option}")
    while True:
        try:
            return find(str(typer.prompt(question)).strip())
        except HeadraceError as error:
            complain(error)


def _own_reward(rows: Data, column: str, path: Path) -> tuple[str, bool]:
    """The reference of a reward, and whether its file was made."""
    from headrace.run.session.first_run import answer_column, write_reward

    answers = column or answer_column(rows)
    if not answers and sys.stdin.isatty():
        answers = str(typer.prompt(f"Column of the expected answer ({', '.join(rows.columns)})")).strip()
    if answers not in rows.columns or not answers.isidentifier():
        raise ConfigError(
            f"no reward is given, and no column of the rows ({', '.join(rows.columns)}) is "
            f"{f'called {answers!r}' if answers else 'known to hold the expected answer'}",
            remedy="give --reward file.py:function, or --answer-column NAME",
        )
    there = path.exists()
    return write_reward(path, answers), not there


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
