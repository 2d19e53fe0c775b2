"""``headrace init``: write a first run file, from options or by questions on a terminal.

A *run file* (TOML) names the model, the rows (the data of the tasks) and the reward. A *held-out* row is never trained
on; evaluations use it to measure progress.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from headrace.base.errors import ConfigError, HeadraceError
from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import complain, console, readable, starting

if TYPE_CHECKING:
    from headrace.run.session.first_run import Data, RewardChoice

T = TypeVar("T")
NAMES = ("file", "exact", "math", "code")
"""The values of ``--reward`` that are names, instead of ``file.py:function``."""
NONE = "none"
"""The answer with which the user chooses to have no held-out rows."""


def init(
    model: str = typer.Option("", help="Directory of a Hugging Face causal language model, or its name on a hub."),
    data: str = typer.Option("", help="Rows to train on: .jsonl, .csv or .parquet."),
    reward: str = typer.Option("", help="file.py:function; or file, to write a reward.py; or exact, math, code."),
    eval_data: Path = typer.Option(None, "--eval", help="Held-out rows.", show_default=False),
    prompt_column: str = typer.Option("", help="Column of the prompts; unset: prompt, question, ..."),
    answer_column: str = typer.Option("", help="Column of the expected answer; unset: answer, solution, ..."),
    out: Path = typer.Option(Path("run.toml"), help="The run file to write."),
    force: bool = typer.Option(False, "--force", help="Overwrite the run file."),
) -> None:
    """Write a first run file, and check model, rows and reward while doing so.

    On a terminal, a question is asked for every option that is not given; Enter accepts the value in brackets.
    """
    starting("loading the readers of models and rows")
    from headrace.run.session.first_run import FirstRun, check_reward, find_data, find_model, refuse_existing

    refuse_existing(out, force=force)
    out_console = console()
    model_facts = _option_or_answer(model, "--model", "Model (a directory, or OWNER/NAME on a hub)", find_model)
    out_console.print(
        f"model    {readable(model_facts.path)}: context {model_facts.context:,}, chat template: "
        f"{'yes' if model_facts.chats else 'no'}"
    )
    rows = _option_or_answer(
        data, "--data", "Rows to train on (a file)", lambda path: find_data(Path(path), model_facts, prompt_column)
    )
    columns = ", ".join(map(readable, rows.columns))
    out_console.print(f"rows     {len(rows.rows):,}, columns {columns}; prompts up to {rows.longest:,} tokens")
    for note in rows.notes:
        out_console.print(f"note     {readable(note)}", style="yellow")
    chosen_reward, description = _choose_reward(reward, rows, answer_column, out.parent / "reward.py")
    if isinstance(chosen_reward, str):
        check_reward(chosen_reward, rows)
    out_console.print(f"reward   {readable(description)}")
    held_out = eval_data or _choose_held_out(rows)
    out_console.print(f"held out {readable(str(held_out)) if held_out else 'none'}")
    FirstRun(model=model_facts, data=rows, reward=chosen_reward, eval_path=held_out).write(out, force=force)
    file = shlex.quote(str(out))
    out_console.print(f"written  {readable(str(out))}, and read by a dry run. Now:\n", style="bold")
    out_console.print(f"headrace train {readable(file)} --dry-run")
    out_console.print(f"headrace train {readable(file)}")


def _option_or_answer(
    given: str, option: str, question: str, find: Callable[[str], T], default: str | None = None
) -> T:
    """Return ``find(given)``, where ``given`` is the value of a command-line option. ``find`` converts a text, and
    raises an error for a text that it does not accept.

    If ``given`` is empty, ask ``question`` on the terminal, with ``default`` as the answer for Enter, until ``find``
    accepts the answer. Raises :class:`~headrace.base.errors.ConfigError`, which names ``option``, if there is no
    terminal.
    """
    if given:
        return find(given)
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is not given, and there is no terminal to ask on", remedy=f"give {option}")
    while True:
        try:
            return find(str(typer.prompt(question, default=default)).strip())
        except HeadraceError as error:
            complain(error)


def _choose_reward(given: str, rows: Data, answer_column: str, path: Path) -> tuple[str | RewardChoice, str]:
    """Return the reward that the user chooses, and a description of this reward. The reward is ``file.py:function``, or
    a built-in reward that fits the columns of ``rows``. ``given`` is the value of ``--reward``; if it is empty, the
    user answers on the terminal. If the choice is ``file``, write an example to ``path``. ``answer_column`` names the
    column of the expected answer; if it is empty, the column is found by its name."""
    from headrace.run.session.first_run import check_reward, find_user_rewards, list_possible_rewards, write_reward

    column = _choose_answer_column(given, rows, answer_column)
    fitting = {choice.name: choice for choice in list_possible_rewards(rows, column)}

    def find(answer: str) -> tuple[str | RewardChoice, str]:
        """Return the reward that the user's ``answer`` chooses, and the text that describes it. The answer is the name
        or the number of a reward that fits the rows, or ``file.py:function``."""
        by_number = dict(zip(map(str, range(1, len(fitting) + 1)), fitting, strict=True))
        choice = fitting.get(by_number.get(answer, answer))
        if choice is None:
            if answer in NAMES:
                has = ", ".join(rows.columns)
                raise ConfigError(
                    f"--reward {answer}: no column of the rows ({has}) is known to hold what it reads",
                    remedy="name it with --answer-column, or give file.py:function",
                )
            check_reward(answer, rows)
            return answer, answer
        if choice.name != "file":
            return choice, f"{choice.name}: {choice.meaning}"
        existed = path.exists()
        reference = write_reward(path, choice.column)
        return reference, f"{reference}{'' if existed else ', written: look at it'}"

    if given or not sys.stdin.isatty():
        return find(given or "1")
    for number, choice in enumerate(fitting.values(), start=1):
        console().print(f"  {number}  {choice.name:<6} {readable(choice.meaning)}")
    if fitting:
        return _option_or_answer("", "--reward", "Reward (a number, or file.py:function)", find, default="1")
    own_functions = find_user_rewards(path.parent, rows)
    for line in _lines_without_fitting(rows, own_functions, path.parent):
        console().print(f"  {readable(line)}")
    return _option_or_answer(
        "", "--reward", "Reward (file.py:function)", find, default=own_functions[0] if own_functions else None
    )


def _lines_without_fitting(rows: Data, own_functions: Sequence[str], directory: Path) -> list[str]:
    """Return the lines that explain to the user why no built-in reward fits ``rows``. ``own_functions`` are the
    functions in the Python files of ``directory`` that could be the reward, which the lines name."""
    columns = ", ".join(rows.columns)
    return [
        f"no column of the rows ({columns}) is known to hold an expected answer or tests, so the reward has to be a "
        f"function of yours in a file: def reward(completion, {rows.columns[0]}) returns a number",
        f"found in {directory.resolve()}: {', '.join(own_functions) or 'no file with such a function'}",
    ]


def _choose_answer_column(reward: str, rows: Data, given: str) -> str:
    """Return the name of the column of the expected answer: ``given``, or else a column found by its name. Return an
    empty text if ``reward``, the value of ``--reward``, needs no such column, or if the user names none.

    If the column is needed and not found, ask for it on the terminal; without a terminal, raise
    :class:`~headrace.base.errors.ConfigError`.
    """
    from headrace.run.session.first_run import TESTS, find_answer_column

    def find(column: str) -> str:
        """Return ``column`` after a check. Raises :class:`~headrace.base.errors.ConfigError` if the rows have no such
        column, or if its name cannot be the parameter of a function."""
        if column not in rows.columns or not column.isidentifier():
            raise ConfigError(
                f"no reward is given, and no column of the rows ({', '.join(rows.columns)}) is "
                f"{f'called {column!r}' if column else 'known to hold the expected answer'}",
                remedy="give --reward file.py:function, or --answer-column NAME",
            )
        return column

    column = given or find_answer_column(rows)
    if column or ":" in reward or reward == "code" or any(name in rows.columns for name in TESTS):
        return find(column) if given else column
    if not sys.stdin.isatty():
        return find("")
    question = f"Column of the expected answer ({', '.join(rows.columns)}; Enter: none of them)"
    return _option_or_answer("", "--answer-column", question, lambda column: find(column) if column else "", default="")


def _choose_held_out(rows: Data) -> Path | None:
    """Ask on the terminal for the file of held-out rows, and return its path. The default answer is a file in the
    directory of ``rows`` whose name marks it as held out. Return ``None`` without a terminal, or for the answer
    ``none``."""
    from headrace.run.session.first_run import check_held_out, find_held_out_file

    if not sys.stdin.isatty():
        return None

    def find(answer: str) -> Path | None:
        """Return ``answer`` as the path of the file of held-out rows, after a check that the file can be read; ``None``
        for the answer ``none``."""
        if answer == NONE:
            return None
        path = Path(answer).expanduser()
        check_held_out(path, rows)
        return path

    question = f"Held-out rows, to measure what is learned (a file, or {NONE})"
    return _option_or_answer("", "--eval", question, find, default=str(find_held_out_file(rows.path) or NONE))


VERB = Verb(run=init, group=BEGIN, place=10)
