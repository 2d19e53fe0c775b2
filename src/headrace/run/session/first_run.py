"""``headrace init``: write a first run file from a model, rows and a reward, after a dry run of it has succeeded.

model ─▶ context, chat template ─┐
rows  ─▶ columns, longest prompt ├─▶ run.toml, which a dry run has read
reward ─▶ its signature          ┘
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from string import Template

from headrace.base.config.user_code import find_in_file
from headrace.base.errors import ConfigError, DataError, HeadraceError
from headrace.models import context_length, load_tokenizer
from headrace.models.devices import num_gpus
from headrace.models.hub import local_directory
from headrace.rollout.environments.data import Row, load_rows
from headrace.rollout.environments.prompts import make_tasks
from headrace.rollout.scoring.signature import read_signature
from headrace.run.session.config import load_config
from headrace.run.session.prepare import Inputs, prepare

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages", "input")
"""The usual names of the column of the prompts, most likely first."""
ANSWERS = ("answer", "solution", "label", "target", "ground_truth", "expected", "output")
"""The usual names of the column of the expected answer, most likely first."""
TESTS = ("tests", "test_cases", "unit_tests", "test_list")
"""The usual names of the column of tests for generated code."""
HELD_OUT = ("held_out", "test", "eval", "validation", "val", "dev")
"""The usual names, without suffix, of a file of held-out rows."""
MAX_LISTED = 4
"""The maximum number of the user's functions that are listed as possible rewards."""
NUM_PROBED_ROWS = 256
"""The number of rows whose prompts are tokenized to find the longest prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The facts about the model that a first run file depends on."""

    path: str
    """The path that the user named: a directory, or a name on a hub."""
    directory: str
    """The local directory of the model; for a name on a hub, its directory in the cache."""
    context: int
    """The context length of the model, in tokens."""
    chats: bool
    """True if the tokenizer has a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The facts about the rows to train on that a first run file depends on. A row is the data of one task, with a
    value for each named column."""

    path: Path
    """The file of the rows."""
    rows: Sequence[Row]
    """All rows of the file; at least one."""
    prompt_column: str
    """The name of the column of the prompts."""
    longest: int
    """The longest prompt of the first :data:`NUM_PROBED_ROWS` rows, in tokens."""
    notes: list[str] = field(default_factory=list)
    """Facts about the rows that may surprise the user, in words."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns of the first row."""
        return list(self.rows[0])


def find_model(path: str) -> Model:
    """Return the facts about the model at ``path``, a directory or a name on a hub. From a hub, its configuration and
    tokenizer are downloaded, but no weights. Raises :class:`~headrace.base.errors.ModelError` if these files cannot be
    read."""
    directory = local_directory(
        str(Path(path).expanduser()) if path.startswith("~") else path, "--model", weights=False
    )
    tokenizer = load_tokenizer(directory)
    chats = tokenizer.chat_template is not None
    return Model(path=path, directory=directory, context=context_length(directory), chats=chats)


def find_data(path: Path, model: Model, prompt_column: str = "") -> Data:
    """Return the facts about the rows in the file ``path``; the first prompts are tokenized with the tokenizer of
    ``model`` to find the longest prompt. ``prompt_column`` names the column of the prompts; if it is empty, this is the
    first name in :data:`PROMPTS` that the rows have.

    Raises :class:`~headrace.base.errors.DataError` if the rows or prompts cannot be read, and
    :class:`~headrace.base.errors.ConfigError` if no column of prompts is found.
    """
    rows = load_rows(path)
    column = prompt_column or next((name for name in PROMPTS if name in rows[0]), "")
    if column not in rows[0]:
        raise ConfigError(
            f"{path} has no column {column or 'of prompts'!r}: it has {', '.join(rows[0])}",
            remedy="name the column of the prompts: --prompt-column NAME",
        )
    tasks = make_tasks(rows[:NUM_PROBED_ROWS], column, load_tokenizer(model.directory), source=str(path))
    longest = max(len(task.prompt_ids_T) for task in tasks)
    plain = isinstance(rows[0][column], str)
    notes = [
        f"the model has a chat template, and the column {column!r} holds plain text, which it reads as it stands: to "
        'use the template, give messages: [{"role": "user", "content": "..."}]'
    ]
    return Data(
        path=path, rows=rows, prompt_column=column, longest=longest, notes=notes if plain and model.chats else []
    )


def find_answer_column(data: Data) -> str:
    """Return the name of the column that probably contains the expected answer, by the names in :data:`ANSWERS`; empty
    if no column has such a name."""
    return next((name for name in ANSWERS if name in data.columns and name != data.prompt_column), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChoice:
    """One reward that is possible with the columns of the rows, which ``headrace init`` shows to the user."""

    name: str
    """The value of ``--reward``: ``file`` for a new ``reward.py``, or the kind of a built-in reward."""
    column: str
    """The column that the reward reads."""
    meaning: str
    """The description for the user."""


def list_possible_rewards(data: Data, answer_column: str = "") -> list[RewardChoice]:
    """Return the rewards that are possible with the columns of the rows ``data``, the recommended reward first; an
    empty list if there is neither an expected answer nor tests. ``answer_column`` names the column of the expected
    answer; if it is empty, :func:`find_answer_column` finds the column."""
    answer_column = answer_column or find_answer_column(data)
    choices: list[RewardChoice] = []
    if answer_column:
        choices = [
            RewardChoice(
                name="file", column=answer_column, meaning=f"a file to change, which compares with {answer_column!r}"
            ),
            RewardChoice(
                name="exact", column=answer_column, meaning=f"1 where the whole answer is that of {answer_column!r}"
            ),
        ]
        extra = "" if find_spec("math_verify") else " (pip install 'headrace[math]')"
        meaning = f"1 where the last formula or number is worth what {answer_column!r} is{extra}"
        choices.append(RewardChoice(name="math", column=answer_column, meaning=meaning))
    tests = next((name for name in TESTS if name in data.columns), "")
    if tests:
        code = RewardChoice(
            name="code", column=tests, meaning=f"the share of {tests!r} that its code passes, sandboxed"
        )
        choices.insert(0 if not answer_column else len(choices), code)
    return choices


def check_reward(reference: str, data: Data) -> None:
    """Check that the reward function ``reference`` (``file.py:function``) exists, and that its parameters, except the
    completions, are columns of the rows. The file is parsed, but not imported. Raises
    :class:`~headrace.base.errors.HeadraceError` if the function cannot be used."""
    path, name = find_in_file(reference, "--reward")
    signature = read_signature(path, name)
    if signature is None:  # the parameters are known only after an import, which the dry run at the end makes
        return
    signature.refuse_form(name)
    signature.refuse_missing(name, data.columns, by_turn=False)


def find_user_rewards(directory: Path, data: Data) -> list[str]:
    """Return ``file.py:function`` for up to :data:`MAX_LISTED` functions in ``directory`` that could be the reward:
    they have a parameter for completions, and their other parameters are columns of the rows ``data``. No file is
    imported."""
    references: list[str] = []
    for path in sorted(directory.glob("*.py")):
        for name in _list_functions(path):
            with suppress(HeadraceError):
                check_reward(f"{path}:{name}", data)
                references.append(f"{path}:{name}")
        if len(references) >= MAX_LISTED:
            break
    return references[:MAX_LISTED]


def _list_functions(path: Path) -> list[str]:
    """Return the names of the public functions that a Python file defines at its top level, without importing it; an
    empty list for a file that cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return []
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [name for name in names if not name.startswith("_")]


def find_held_out_file(path: Path) -> Path | None:
    """Return the first file, in the directory of ``path`` and with the same suffix, that probably contains held-out
    rows, by the names in :data:`HELD_OUT`; ``None`` if there is no such file."""
    names = (f"{name}{path.suffix}" for name in HELD_OUT)
    candidates = (path.with_name(name) for name in names)
    return next((candidate for candidate in candidates if candidate.is_file() and candidate != path), None)


def check_held_out(path: Path, data: Data) -> None:
    """Raise :class:`~headrace.base.errors.HeadraceError` if the held-out rows in ``path`` cannot be read, or lack the
    column of prompts of ``data``."""
    rows = load_rows(path)
    if data.prompt_column not in rows[0]:
        raise DataError(
            f"{path} has no column {data.prompt_column!r}: it has {', '.join(rows[0])}",
            remedy=f"give held-out rows with the columns of {data.path}",
        )


def write_reward(path: Path, column: str) -> str:
    """Write a Python file with a reward function that compares the completion with the column ``column``, as a template
    for the user. A file that exists already is not changed. Return the reference ``path:reward``, a value for
    ``env.reward``."""
    if not path.exists():
        path.write_text(_REWARD.substitute(column=column), encoding="utf-8")
    return f"{path}:reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """The choices from which ``headrace init`` writes a first run file: model, rows and reward. The sizes in the file
    depend on the machine."""

    model: Model
    data: Data
    reward: str | RewardChoice
    """The reward: ``file.py:function``, or a built-in reward with its column."""
    eval_path: Path | None = None
    """The file of held-out rows; ``None`` without held-out rows."""

    def text(self, directory: Path) -> str:
        """Return the text of the run file, in TOML. ``directory`` is the directory of the run file: paths below it are
        written relative to it, all other paths are absolute. Raises :class:`~headrace.base.errors.ConfigError` if the
        longest prompt leaves no room for an answer."""
        gpu = num_gpus() > 0
        rows = len(self.data.rows)
        room = self.model.context - self.data.longest
        if room < 1:
            raise ConfigError(
                f"the longest prompt has {self.data.longest} tokens, and the model's context is {self.model.context}",
                remedy="shorten the prompts, or choose a model with a longer context",
            )
        column = self.data.prompt_column
        held_out = (
            "" if self.eval_path is None else f"eval_path = {_quote_toml(_relative_path(self.eval_path, directory))}\n"
        )
        return _RUN.substitute(
            model=_quote_toml(
                self.model.path if self._is_hub_name else _relative_path(Path(self.model.path).expanduser(), directory)
            ),
            dtype='dtype = "bfloat16"\n' if gpu else "",
            data=_quote_toml(_relative_path(self.data.path, directory)),
            held_out=held_out,
            column="" if column == "prompt" else f"prompt_column = {_quote_toml(column)}\n",
            reward=self._reward(directory),
            new_tokens=min(1024 if gpu else 256, room),
            groups=min(16 if gpu else 8, rows),
            size=8 if gpu else 4,
        )

    def _reward(self, directory: Path) -> str:
        """Return the lines of the run file that choose the reward. A path below ``directory``, the directory of the run
        file, is relative to it."""
        if isinstance(self.reward, RewardChoice):
            key = "tests_column" if self.reward.name == "code" else "answer_column"
            return f"[[env.rewards]]\nkind = {_quote_toml(self.reward.name)}\n{key} = {_quote_toml(self.reward.column)}"
        path, _, name = self.reward.rpartition(":")
        reference = _quote_toml(f"{_relative_path(Path(path), directory)}:{name}")
        return f"[env]\nreward = {reference}"

    @property
    def _is_hub_name(self) -> bool:
        """True if the user named the model by its name on a hub, which is written to the run file, and not by a
        directory."""
        return self.model.directory != str(Path(self.model.path).expanduser())

    def write(self, out: Path, *, force: bool = False) -> None:
        """Write the run file to ``out`` after a dry run of its text has succeeded. Raises
        :class:`~headrace.base.errors.HeadraceError`, without a change to ``out``, if the dry run fails, if the file
        cannot be written, and if ``out`` exists and ``force`` is false."""
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
    """Raise :class:`~headrace.base.errors.ConfigError` if the file ``out`` exists and ``force``, the user's permission
    to overwrite it, is false."""
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already", remedy="name another file (--out), or write over it (--force)")


def _relative_path(path: Path, directory: Path) -> str:
    """Return ``path`` relative to ``directory`` if it is below ``directory``, else as an absolute path."""
    absolute = path.expanduser().resolve()
    return str(absolute.relative_to(directory) if absolute.is_relative_to(directory) else absolute)


def _quote_toml(text: str) -> str:
    """Return ``text`` as a quoted string for a TOML file. TOML accepts strings that are quoted as in JSON."""
    return json.dumps(text, ensure_ascii=False)


_RUN = Template("""\
[model]  # paths are relative to this file
path = $model
$dtype
[data]
path = $data
$held_out$column
$reward

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
"""The reward of an answer. Change it: this one compares with the column $column."""

import re

NUMBER = re.compile(r"-?\\d[\\d,]*(?:\\.\\d+)?")


def reward(completion: str, $column) -> float:
    """Return 1 if the last numbers of the completion and of the expected answer are equal, else 0.

    An expected answer without numbers must be the end of the completion.
    """
    expected = str($column).rpartition("####")[2].strip()
    right, found = NUMBER.findall(expected), NUMBER.findall(completion)
    if right:
        return float(bool(found) and _value(found[-1]) == _value(right[-1]))
    plain = expected.rstrip(".").casefold()
    return float(bool(plain) and completion.strip().rstrip(".").casefold().endswith(plain))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
''')
