"""Task directories in the formats of Harbor and Terminal-Bench: an instruction, an environment, and tests that give the
reward.

    Harbor                                    Terminal-Bench
    instruction.md                            task.yaml: instruction, limits
    task.toml: limits, variables
    environment/Dockerfile and its files      Dockerfile and its files
    tests/test.sh writes a reward file        run-tests.sh and tests/ print the summary of pytest

Sources: harborframework.com/docs/tasks and tbench.ai/docs, as of November 2026.
"""

from __future__ import annotations

import base64
import gzip
import logging
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from headrace.base.errors import DataError, nearest
from headrace.rollout.environments.data import Row
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.archives import read_inside, resolve_inside
from headrace.wings.sandboxes.dockerfile import BuildStep, read_dockerfile

log = logging.getLogger("headrace")
T = TypeVar("T")
HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
DEPTH = 3
"""The number of folder levels in which task directories are searched."""
WORK_DIRECTORY = "/app"
"""The default directory in which the agent's commands begin."""
_SIZE = re.compile(r"(?i)\s*([\d.]+)\s*([kmgt]?)(i?b)?\s*")
LONGEST_SOLUTION_BYTES = 90_000
"""The maximum length of a solution that stays a plain command, in bytes; a longer solution is compressed."""
MIN_MEMORY_BYTES, MIN_DISK_BYTES = 64 * MIB, MIB
"""The smallest memory and disk of a session that ``env.options`` allow, in bytes."""
MAX_S = 30 * 24 * 3600.0
"""The longest time limit of the agent, the tests or the build, in seconds."""
_HOST_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
"""Matches a value that Harbor replaces by a variable of its own machine: ``${NAME}`` or ``${NAME:-DEFAULT}``."""
_KEYS: Mapping[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "": "schema_version version task metadata verifier agent environment solution source steps artifacts "
        "multi_step_reward_strategy multi_step_reward_mode",
        "verifier": "timeout_sec env user environment_mode environment network_mode allowed_hosts collect inputs type",
        "agent": "timeout_sec user network_mode allowed_hosts",
        "environment": "build_timeout_sec docker_image os cpus memory memory_mb storage storage_mb gpus gpu_types tpu "
        "allow_internet network_mode allowed_hosts mcp_servers env skills_dir workdir healthcheck",
    }.items()
}
"""The known keys of ``task.toml`` by table; some of them have no effect on a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTests:
    """The tests of a task from a row of SWE-bench: tests of the repository, by name."""

    repository: str
    """The name of the repository, ``OWNER/NAME``."""
    base_commit: str
    """The commit at which the agent begins; empty: the commit in the image."""
    bug: str = ""
    """A patch that introduces the bug of the task; it is applied before the agent begins. Empty: none."""
    patch: str = ""
    """A patch that adds the tests; the agent does not see it. Empty: none."""
    names: tuple[str, ...]
    """The names of all tests that must pass, in pytest's format."""
    solution: str = ""
    """The patch that solves the task, which may change tests too; the agent does not see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDirectory:
    """One task, from a task directory or a row."""

    name: str
    """The name of the directory, or the id of the row."""
    instruction: str
    """The instruction for the agent."""
    context: Path
    """The folder of the files from which the environment is built."""
    image: str = ""
    """The name of the environment's image; empty if the task names none."""
    steps: tuple[BuildStep, ...] = ()
    """The steps that build the environment."""
    tests: Path | None = None
    """The folder of the tests; ``None`` if the repository contains the tests."""
    test_command: str
    """The shell command that runs the tests; files of :attr:`tests` are in ``/tests``."""
    named: NamedTests | None = None
    """The named tests that determine the reward; ``None``: the tests in :attr:`tests` do."""
    directory: str = WORK_DIRECTORY
    """The directory in which the agent's commands begin, unless a build step changes it."""
    more_tests: tuple[Path, ...] = ()
    """Further files to copy to ``/tests``."""
    prints_pytest: bool = False
    """Whether the reward is read from pytest's printed summary; if not, from a reward file."""
    build_s: float = 600.0
    """The time limit of all build steps together, in seconds."""
    agent_s: float = 900.0
    """The time limit of the agent, in seconds."""
    tests_s: float = 900.0
    """The time limit of the tests, in seconds."""
    memory_bytes: int | None = None
    """The memory that the task requests, in bytes; ``None``: the task requests no amount."""
    disk_bytes: int | None = None
    """The disk space that the task requests, in bytes; ``None``: the task requests no amount."""
    asks_network: bool = False
    """Whether the task requests a network."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the agent's commands and of the tests, by name."""
    test_variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the tests, by name."""


def read_tasks(path: Path) -> list[Row]:
    """Return a row for each task directory at or below ``path``: its instruction as ``prompt``, its name as ``task``,
    its ``directory``, and as ``solution`` an answer that solves the task (for checks; no model reads it), empty if
    there is none. A task that cannot be read has the reason as ``problem``, and its episodes fail with that reason."""
    rows: list[Row] = []
    for directory in sorted(_task_directories(path, DEPTH)):
        row: Row = {
            "prompt": "(this task cannot be read)",
            "task": directory.name,
            "directory": str(directory.resolve()),
            "problem": "",
        }
        try:
            row["prompt"] = open_task(directory).instruction
            row["solution"] = _read(directory, _solution)
        except DataError as error:
            row["problem"] = str(error)
        rows.append(row)
    return rows


def _solution(directory: Path) -> str:
    """Return the solution of a task as an answer of a model: a block with its commands. A solution that is long, or
    contains a block itself, is compressed and given in base64."""
    files = [directory / name for name in ("solution/solve.sh", "solution.sh")]
    content = next((read_inside(file, directory) for file in files if file.is_file()), b"").strip()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "```"
    if "```" in text or len(content) > LONGEST_SOLUTION_BYTES:
        coded = base64.encodebytes(gzip.compress(content, mtime=0)).decode("ascii")
        text = f"base64 -d <<'END' | gzip -d > /tmp/solve.sh && bash /tmp/solve.sh\n{coded}END"
    return f"```bash\n{text}\n```" if content else ""


def _task_directories(path: Path, depth: int) -> list[Path]:
    """Return the task directories at ``path`` and in ``depth`` levels of folders below it."""
    if any((path / name).is_file() for name in (HARBOR, TERMINAL_BENCH)):
        return [path]
    if not depth:
        return []
    folders = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")]
    return [found for folder in folders for found in _task_directories(folder, depth - 1)]


def open_task(directory: Path) -> TaskDirectory:
    """Return the task in a directory. Raises :class:`~headrace.base.errors.DataError` if a required part is missing or
    a part is not supported."""
    return _read(directory, _open_harbor if (directory / HARBOR).is_file() else _open_terminal_bench)


def _read(directory: Path, reader: Callable[[Path], T]) -> T:
    """Return the result of ``reader`` for a directory. Raises its errors as :class:`~headrace.base.errors.DataError`
    with the task's name."""
    try:
        return reader(directory)
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the task {directory} cannot be read: {error}", remedy="correct its files") from None


def _open_harbor(directory: Path) -> TaskDirectory:
    """Return the task in a directory in Harbor's format."""
    settings = tomllib.loads(_text(directory, HARBOR, "settings"))
    environment, agent, verifier = tables = [_table(settings, name) for name in ("environment", "agent", "verifier")]
    _refuse_misspelled(settings)
    if (directory / "steps").is_dir():
        raise _make_unsupported_error(directory, "has several steps", "give a task of one step")
    if verifier.get("environment_mode", "shared") != "shared":
        raise _make_unsupported_error(
            directory, "runs its tests in an environment of their own", "run them in the agent's"
        )
    context = directory / "environment"
    image, steps = _read_environment(directory, context)
    if environment.get("workdir"):
        steps = (*steps, BuildStep(kind="WORKDIR", words=(_literal(environment, "workdir"),)))
    network = [table.get("network_mode", "no-network") for table in tables]
    return TaskDirectory(
        name=directory.name,
        instruction=_instruction(directory),
        context=context,
        image=_literal(environment, "docker_image") or image,
        steps=steps,
        tests=_tests(directory, "test.sh"),
        test_command="bash /tests/test.sh",
        build_s=_seconds(environment, "build_timeout_sec", 600.0),
        agent_s=_seconds(agent, "timeout_sec", 900.0),
        tests_s=_seconds(verifier, "timeout_sec", 900.0),
        memory_bytes=_read_bytes(environment, "memory", MIN_MEMORY_BYTES),
        disk_bytes=_read_bytes(environment, "storage", MIN_DISK_BYTES),
        asks_network=bool(environment.get("allow_internet")) or any(mode != "no-network" for mode in network),
        variables=_variables(environment),
        test_variables=_variables(verifier),
    )


def _open_terminal_bench(directory: Path) -> TaskDirectory:
    """Return the task in a directory in Terminal-Bench's format."""
    settings = _read_yaml(directory, TERMINAL_BENCH)
    if not isinstance(settings, dict) or not str(settings.get("instruction") or "").strip():
        raise DataError(f"the task {directory} has no instruction in {TERMINAL_BENCH}", remedy="write one")
    if settings.get("parser_name", "pytest") != "pytest":
        raise _make_unsupported_error(
            directory, f"has parser_name={settings['parser_name']!r}", "have the tests run by pytest"
        )
    image, steps = _read_environment(directory, directory)
    _require_path(directory / "run-tests.sh", "tests", directory)
    return TaskDirectory(
        name=directory.name,
        instruction=settings["instruction"],
        context=directory,
        image=image,
        steps=steps,
        tests=_tests(directory, ""),
        more_tests=(directory / "run-tests.sh",),
        test_command="bash /tests/run-tests.sh",
        prints_pytest=True,
        agent_s=_seconds(settings, "max_agent_timeout_sec", 900.0),
        tests_s=_seconds(settings, "max_test_timeout_sec", 900.0),
        test_variables={"TEST_DIR": "/tests"},
    )


def _read_yaml(directory: Path, name: str) -> Any:
    """Return the parsed content of a YAML file. Raises ``ValueError`` if it is not valid YAML."""
    import yaml  # transformers needs it too

    try:
        return yaml.safe_load(_text(directory, name, "settings"))
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None


def _read_environment(directory: Path, context: Path) -> tuple[str, tuple[BuildStep, ...]]:
    """Return the image and the build steps of the environment that the folder ``context`` describes. Raises
    :class:`~headrace.base.errors.DataError` for several services. ``directory`` is the task's directory."""
    composed = [name for name in ("docker-compose.yaml", "docker-compose.yml") if (context / name).is_file()]
    if composed and context != directory:  # each task of Terminal-Bench has one, which only starts its image
        raise _make_unsupported_error(
            directory, f"has services in {composed[0]}", "describe one environment in a Dockerfile"
        )
    for name in composed:
        settings = _read_yaml(directory, name)
        services = settings.get("services") if isinstance(settings, dict) else None
        if not isinstance(services, dict) or len(services) != 1:
            found = f"has the services {sorted(map(str, services))}" if isinstance(services, dict) else "has no service"
            raise _make_unsupported_error(directory, f"{found} in {name}", "have one service, that of the agent")
    if not os.path.lexists(context / "Dockerfile"):
        return "", ()
    return read_dockerfile(
        _text(directory, str((context / "Dockerfile").relative_to(directory)), "image"), str(directory)
    )


def _tests(directory: Path, needed: str) -> Path:
    """Return the folder of a task's tests. Raises :class:`~headrace.base.errors.DataError` if it, or the file
    ``needed`` in it, does not exist."""
    path = _require_path(directory / "tests", "tests", directory)
    _require_path(path / needed, "tests", path)
    return path


def _require_path(path: Path, what: str, root: Path) -> Path:
    """Return ``path``. Raises :class:`~headrace.base.errors.DataError` if it does not exist (``what`` names the missing
    part of the task), and ``ValueError`` if it lies outside the folder ``root``."""
    if not path.exists():
        raise DataError(f"the task {path.parent} has no {what}: {path} does not exist", remedy="add it")
    resolve_inside(path, root)
    return path


def _instruction(directory: Path) -> str:
    """Return the instruction of a task in Harbor's format. Raises ``ValueError`` if it is empty."""
    text = _text(directory, "instruction.md", "instruction")
    if not text:
        raise ValueError("instruction.md is empty")
    return text


def _text(directory: Path, name: str, what: str) -> str:
    """Return the stripped text of the file ``name``, which a task must have; ``what`` names that part of the task."""
    path = directory / name
    content = read_inside(_require_path(path, what, directory), directory)
    try:
        return content.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        wrong = content[max(0, error.start - 20) : error.end + 20]
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}: {wrong!r}") from None


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of settings; an empty dict if it is not set. Raises ``ValueError`` if the value is not a table."""
    value = settings.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} is no table")
    return value


def _refuse_misspelled(settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an unknown key of ``task.toml`` that resembles a known key. Other unknown keys may
    belong to a later version of the format, and are logged."""
    for table, known in _KEYS.items():
        for key in sorted((settings if not table else _table(settings, table)).keys() - known):
            suggestion = nearest(key, known)
            if suggestion.startswith("did you mean"):
                raise ValueError(f"{HARBOR} has the unknown key {f'{table}.{key}'.lstrip('.')!r}; {suggestion}")
            _warn_unknown(f"{table}.{key}".lstrip("."))


@cache
def _warn_unknown(key: str) -> None:
    """Log once that a key of ``task.toml`` is unknown and has no effect."""
    log.warning("%s: the key %r is not known and changes nothing", HARBOR, key)


def _literal(table: Mapping[str, Any], name: str) -> str:
    """Return a text of a table; empty if it is not set. Raises ``ValueError`` for another value."""
    value = table.get(name) or ""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name}={value!r} is no text")
    return value


def _seconds(table: Mapping[str, Any], name: str, default: float) -> float:
    """Return a time limit in seconds. Raises ``ValueError`` unless it is above 0 and at most :data:`MAX_S`."""
    value = _number(name, table.get(name, default))
    if not 0 < value <= MAX_S:
        raise ValueError(f"{name}={value:g} is no time from 0 to {MAX_S:g} seconds")
    return value


def _number(name: str, value: object) -> float:
    """Return ``value`` as a number. Raises ``ValueError`` for another value and for a number that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is no number")
    return float(value)


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the table ``env`` as environment variables. ``${NAME:-DEFAULT}`` becomes its default. Raises
    ``ValueError`` for a variable that cannot be set."""
    found = {}
    for name, value in _table(table, "env").items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"env.{name}={value!r} is no text")
        text = str(value)
        if match := _HOST_VARIABLE.fullmatch(text):
            if match[2] is None:
                raise ValueError(f"env.{name}={text!r} names a variable of the machine, and sessions have none of them")
            text = match[2]
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(f"env[{name!r}]={text!r} cannot be set: a name has no '=', and nothing a zero byte")
        found[name] = text
    return found


def _read_bytes(table: Mapping[str, Any], name: str, least: int) -> int | None:
    """Return a size in bytes from ``table``, where it is ``NAME_mb = 2048`` or ``NAME = "2G"``; ``None`` if neither is
    set. Raises ``ValueError`` for another value, and for a size below ``least`` bytes."""
    if f"{name}_mb" in table:
        size = _number(f"{name}_mb", table[f"{name}_mb"]) * MIB
    elif name in table:
        match = _SIZE.fullmatch(str(table[name]))
        if match is None:
            raise ValueError(f"{name}={table[name]!r} is no size")
        size = float(match[1]) * (1 << (10 * " kmgt".index(match[2].lower() or " ")))
    else:
        return None
    if not least <= size < 1 << 62:
        raise ValueError(f"{name} of {size / MIB:g} MiB is not what a session can have: {least / MIB:g} MiB or more")
    return int(size)


def _make_unsupported_error(task: object, text: str, remedy: str) -> DataError:
    """Return the error for a task with a part that sessions do not support."""
    return DataError(f"the task {task} {text}, which sessions do not support", remedy=remedy)
