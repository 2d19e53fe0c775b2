"""A first run file: what of model, rows and reward can be found out is found out, and checked, before it is written.

model ─▶ context, chat template ─┐
rows  ─▶ columns, longest prompt ├─▶ run.toml, which a dry run has read
reward ─▶ its signature          ┘
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from headrace.base.config.user_code import find_in_file
from headrace.base.errors import ConfigError
from headrace.models import context_length, load_tokenizer
from headrace.models.devices import num_gpus
from headrace.models.hub import local_directory
from headrace.rollout.environments.data import Row, load_rows
from headrace.rollout.environments.prompts import make_tasks
from headrace.run.session.config import load_config
from headrace.run.session.prepare import Inputs, prepare

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages", "input")
ANSWERS = ("answer", "solution", "label", "target", "ground_truth", "expected", "output")
GIVEN = frozenset({"completion", "completions", "prompt", "prompts", "history", "turn"})
"""What a reward is handed besides the columns of the row."""
LOOKED_AT = 256
"""Rows whose prompts are tried and measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is known of a model."""

    path: str
    """As it was given: a directory, or a name on a hub."""
    directory: str
    context: int
    """The longest it was made for, in tokens."""
    chats: bool
    """Whether it has a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is known of the rows."""

    path: Path
    rows: Sequence[Row]
    prompt_column: str
    longest: int
    """The longest prompt that was looked at, in tokens."""
    notes: list[str] = field(default_factory=list)
    """What may surprise, in words."""

    @property
    def columns(self) -> list[str]:
        """Those of the first row."""
        return list(self.rows[0])


def find_model(path: str) -> Model:
    """Look at the model at ``path``. Raises :class:`~headrace.base.errors.ModelError`."""
    directory = local_directory(
        str(Path(path).expanduser()) if path.startswith("~") else path, "--model", weights=False
    )
    tokenizer = load_tokenizer(directory)
    chats = tokenizer.chat_template is not None
    return Model(path=path, directory=directory, context=context_length(directory), chats=chats)


def find_data(path: Path, model: Model, prompt_column: str = "") -> Data:
    """Read the rows and try their prompts on the model's tokenizer. Raises :class:`~headrace.base.errors.DataError`."""
    rows = load_rows(path)
    column = prompt_column or next((name for name in PROMPTS if name in rows[0]), "")
    if column not in rows[0]:
        raise ConfigError(
            f"{path} has no column {column or 'of prompts'!r}: it has {', '.join(rows[0])}",
            remedy="name the column of the prompts: --prompt-column NAME",
        )
    tasks = make_tasks(rows[:LOOKED_AT], column, load_tokenizer(model.directory), source=str(path))
    longest = max(len(task.prompt_ids_T) for task in tasks)
    plain = isinstance(rows[0][column], str)
    notes = [
        f"the model has a chat template, and the column {column!r} holds plain text, which it reads as it stands: to "
        'use the template, give messages: [{"role": "user", "content": "..."}]'
    ]
    return Data(
        path=path, rows=rows, prompt_column=column, longest=longest, notes=notes if plain and model.chats else []
    )


def answer_column(data: Data) -> str:
    """The column that seems to hold the expected answer; empty where none does."""
    return next((name for name in ANSWERS if name in data.columns and name != data.prompt_column), "")


def check_reward(reference: str, data: Data) -> None:
    """Refuse a reward that asks for what no row has. Raises :class:`~headrace.base.errors.ConfigError`."""
    path, name = find_in_file(reference, "--reward")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            _refuse_strange_arguments(reference, node.args, data)


def _refuse_strange_arguments(reference: str, given: ast.arguments, data: Data) -> None:
    places = [*given.posonlyargs, *given.args]
    needed = [each.arg for each in places[: len(places) - len(given.defaults)]]
    needed += [each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    names = {each.arg for each in (*places, *given.kwonlyargs)}
    if not names & {"completion", "completions"}:
        raise ConfigError(
            f"--reward {reference} takes ({', '.join(needed)}), and neither completion nor completions",
            remedy="write reward(completion, **row) or reward(prompts, completions, **columns)",
        )
    strange = [name for name in needed if name not in GIVEN and name not in data.columns]
    if strange:
        raise ConfigError(
            f"--reward {reference} asks for {', '.join(strange)}, and a row has {', '.join(data.columns)}",
            remedy="rename the argument after a column, give it a default, or add the column to the rows",
        )


def write_reward(path: Path, column: str) -> str:
    """Write a reward that compares with ``column``, unless the file is there already; its reference."""
    if not path.exists():
        path.write_text(_REWARD.substitute(column=column), encoding="utf-8")
    return f"{path}:reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What a first run file says."""

    model: Model
    data: Data
    reward: str
    eval_path: Path | None = None
    """Held-out rows; ``None``: none."""

    def text(self, directory: Path) -> str:
        """The run file, for ``directory``: paths are relative to it where they are below it."""
        gpu = num_gpus() > 0
        rows = len(self.data.rows)
        room = self.model.context - self.data.longest
        if room < 1:
            raise ConfigError(
                f"the longest prompt has {self.data.longest} tokens, and the model's context is {self.model.context}",
                remedy="shorten the prompts, or choose a model with a longer context",
            )
        path, _, name = self.reward.rpartition(":")
        column = self.data.prompt_column
        held_out = "" if self.eval_path is None else f"eval_path = {_toml(_near(self.eval_path, directory))}\n"
        return _RUN.substitute(
            model=_toml(self.model.path if self._named else _near(Path(self.model.path).expanduser(), directory)),
            dtype='dtype = "bfloat16"\n' if gpu else "",
            data=_toml(_near(self.data.path, directory)),
            held_out=held_out,
            column="" if column == "prompt" else f"prompt_column = {_toml(column)}\n",
            reward=_toml(f"{_near(Path(path), directory)}:{name}"),
            new_tokens=min(1024 if gpu else 256, room),
            groups=min(16 if gpu else 8, rows),
            size=8 if gpu else 4,
        )

    @property
    def _named(self) -> bool:
        return self.model.directory != str(Path(self.model.path).expanduser())

    def write(self, out: Path, *, force: bool = False) -> None:
        """Write ``out``, which a dry run has accepted. Raises :class:`~headrace.base.errors.HeadraceError`."""
        refuse_existing(out, force=force)
        trial = out.with_name(f".{out.name}.tmp")
        try:
            trial.write_text(self.text(out.parent.resolve()), encoding="utf-8")
            prepare(load_config(trial), Inputs(), weights=False)
            trial.replace(out)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error}", remedy="name another file: --out") from None
        finally:
            trial.unlink(missing_ok=True)


def refuse_existing(out: Path, *, force: bool) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` where ``out`` is there and must not be written over."""
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already", remedy="name another file (--out), or write over it (--force)")


def _near(path: Path, directory: Path) -> str:
    found = path.expanduser().resolve()
    return str(found.relative_to(directory) if found.is_relative_to(directory) else found)


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_RUN = Template("""\
[model]  # paths are relative to this file
path = $model
$dtype
[data]
path = $data
$held_out$column
[env]
reward = $reward

[engine]
max_new_tokens = $new_tokens  # the longest answer, in tokens

[flow]
groups_per_step = $groups  # prompts of an optimizer step
group_size = $size  # answers to each, which are compared with each other
max_age = 1  # the staleness bound, in versions; 0 is synchronous

[learner]
lr = 1e-6  # 1e-5 to 3e-4 for models of a few million parameters

[run]
dir = "runs/first"
steps = 100
""")

_REWARD = Template('''\
"""What an answer earns. Change it: this one compares with the column $column."""

import re

NUMBER = re.compile(r"-?\\d[\\d,]*(?:\\.\\d+)?")


def reward(completion: str, $column) -> float:
    """1 where the last number of the completion is that of the expected answer, or, without numbers, where it ends with
    its text; 0 elsewhere."""
    expected = str($column).rpartition("####")[2].strip()
    wanted, found = NUMBER.findall(expected), NUMBER.findall(completion)
    if wanted:
        return float(bool(found) and _value(found[-1]) == _value(wanted[-1]))
    plain = expected.rstrip(".").casefold()
    return float(bool(plain) and completion.strip().rstrip(".").casefold().endswith(plain))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
''')
