"""Task directories: an instruction, an environment, and tests that say what was earned, as Harbor and Terminal-Bench
write them.

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
from headrace.wings.sandboxes.archives import read_inside, resolved_inside
from headrace.wings.sandboxes.dockerfile import BuildStep, read_dockerfile

log = logging.getLogger("headrace")
T = TypeVar("T")
HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
DEPTH = 3
"""How many folders deep tasks are looked for."""
WORK_DIRECTORY = "/app"
"""The directory in which an agent begins, unless the environment says otherwise."""
_SIZE = re.compile(r"(?i)\s*([\d.]+)\s*([kmgt]?)(i?b)?\s*")
LONGEST_SOLUTION_BYTES = 90_000
"""The longest solution that is given as one command, as it is."""
MIN_MEMORY_BYTES, MIN_DISK_BYTES = 64 * MIB, MIB
"""The smallest session, as ``env.options`` allow it."""
MAX_S = 30 * 24 * 3600.0
"""The longest time of a task's parts, in seconds."""
_FROM_OUTSIDE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
"""A value that Harbor takes from a variable of its own machine."""
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
"""The keys of ``task.toml``, by their table; not all of them change a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTests:
    """Tests of a repository by their names, as rows of SWE-bench have them."""

    repository: str
    """The repository, ``OWNER/NAME``."""
    base_commit: str
    """The commit from which the agent begins; empty: the one that the image has."""
    bug: str = ""
    """A patch that makes the task: it is applied before the agent begins."""
    patch: str = ""
    """A patch of the tests, which the agent does not see."""
    names: tuple[str, ...]
    """All tests that must pass in the end, as pytest names them."""
    solution: str = ""
    """The patch that solves the task, whose files may be tests too; the agent does not see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDirectory:
    """One task, read from its directory, or from a row."""

    name: str
    """The name of the directory, or of the row."""
    instruction: str
    """What the agent is asked to do."""
    context: Path
    """The folder of the files that the environment is made from."""
    image: str = ""
    """The image that the environment is made from; empty if none is named."""
    steps: tuple[BuildStep, ...] = ()
    """The steps that make the environment."""
    tests: Path | None = None
    """The folder of the tests; ``None`` for tests of the repository itself."""
    test_command: str
    """The command that runs the tests, which are in ``/tests``."""
    named: NamedTests | None = None
    """The tests of the repository that are the reward; ``None``: those in ``tests`` are."""
    directory: str = WORK_DIRECTORY
    """The directory in which an agent begins, unless a step says otherwise."""
    more_tests: tuple[Path, ...] = ()
    """Files that belong to the tests, from elsewhere."""
    prints_pytest: bool = False
    """Whether the result is the summary that pytest prints; if not, it is in a reward file."""
    build_s: float = 600.0
    """The longest time of the steps together."""
    agent_s: float = 900.0
    """The longest time of the agent."""
    tests_s: float = 900.0
    """The longest time of the tests."""
    memory_bytes: int | None = None
    """The memory that the task asks for; ``None``: it does not say."""
    disk_bytes: int | None = None
    """The disk that the task asks for; ``None``: it does not say."""
    asks_network: bool = False
    """Whether the task names a network that it needs."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the agent and of the tests."""
    test_variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of the tests."""


def read_tasks(path: Path) -> list[Row]:
    """Return a row for each task directory in ``path``, or for ``path`` itself: its instruction as ``prompt``, its name
    as ``task``, its ``directory``, and as ``solution`` the answer that would solve it, which no model reads; empty if
    it has none. A task that cannot be read has the reason as ``problem``; its episodes fail by name."""
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
    """Return the commands that solve a task, in the form of an answer. Those that cannot stand in a block as they are,
    such as a text with a block of its own, stand there in base64."""
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
    """Return the task directories at ``path`` and below it."""
    if any((path / name).is_file() for name in (HARBOR, TERMINAL_BENCH)):
        return [path]
    if not depth:
        return []
    folders = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")]
    return [found for folder in folders for found in _task_directories(folder, depth - 1)]


def open_task(directory: Path) -> TaskDirectory:
    """Return the task in a directory. Raises :class:`~headrace.base.errors.DataError` where it lacks a part, or has one
    that is not supported."""
    return _read(directory, _open_harbor if (directory / HARBOR).is_file() else _open_terminal_bench)


def _read(directory: Path, reader: Callable[[Path], T]) -> T:
    """Return what ``reader`` reads from a directory. Raises :class:`~headrace.base.errors.DataError` where it fails,
    with the name of the task."""
    try:
        return reader(directory)
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the task {directory} cannot be read: {error}", remedy="correct its files") from None


def _open_harbor(directory: Path) -> TaskDirectory:
    """Read a task in the form of Harbor."""
    settings = tomllib.loads(_text(directory, HARBOR, "settings"))
    environment, agent, verifier = tables = [_table(settings, name) for name in ("environment", "agent", "verifier")]
    _refuse_misspelt(settings)
    if (directory / "steps").is_dir():
        raise _unsupported(directory, "has several steps", "give a task of one step")
    if verifier.get("environment_mode", "shared") != "shared":
        raise _unsupported(directory, "runs its tests in an environment of their own", "run them in the agent's")
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
        tests=_tests(directory, "test.sh", "tests"),
        test_command="bash /tests/test.sh",
        build_s=_seconds(environment, "build_timeout_sec", 600.0),
        agent_s=_seconds(agent, "timeout_sec", 900.0),
        tests_s=_seconds(verifier, "timeout_sec", 900.0),
        memory_bytes=_bytes(environment, "memory", MIN_MEMORY_BYTES),
        disk_bytes=_bytes(environment, "storage", MIN_DISK_BYTES),
        asks_network=bool(environment.get("allow_internet")) or any(mode != "no-network" for mode in network),
        variables=_variables(environment),
        test_variables=_variables(verifier),
    )


def _open_terminal_bench(directory: Path) -> TaskDirectory:
    """Read a task in the form of Terminal-Bench."""
    settings = _yaml(directory, TERMINAL_BENCH)
    if not isinstance(settings, dict) or not str(settings.get("instruction") or "").strip():
        raise DataError(f"the task {directory} has no instruction in {TERMINAL_BENCH}", remedy="write one")
    if settings.get("parser_name", "pytest") != "pytest":
        raise _unsupported(directory, f"has parser_name={settings['parser_name']!r}", "have the tests run by pytest")
    image, steps = _read_environment(directory, directory)
    _existing(directory / "run-tests.sh", "tests", directory)
    return TaskDirectory(
        name=directory.name,
        instruction=settings["instruction"],
        context=directory,
        image=image,
        steps=steps,
        tests=_tests(directory, "", "tests"),
        more_tests=(directory / "run-tests.sh",),
        test_command="bash /tests/run-tests.sh",
        prints_pytest=True,
        agent_s=_seconds(settings, "max_agent_timeout_sec", 900.0),
        tests_s=_seconds(settings, "max_test_timeout_sec", 900.0),
        test_variables={"TEST_DIR": "/tests"},
    )


def _yaml(directory: Path, name: str) -> Any:
    """Return what a file of YAML holds."""
    import yaml  # transformers needs it too

    try:
        return yaml.safe_load(_text(directory, name, "settings"))
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None


def _read_environment(directory: Path, context: Path) -> tuple[str, tuple[BuildStep, ...]]:
    """Return the image and the steps of the environment that the folder ``context`` describes."""
    composed = [name for name in ("docker-compose.yaml", "docker-compose.yml") if (context / name).is_file()]
    if composed and context != directory:  # each task of Terminal-Bench has one, which only starts its image
        raise _unsupported(directory, f"has services in {composed[0]}", "describe one environment in a Dockerfile")
    for name in composed:
        settings = _yaml(directory, name)
        services = settings.get("services") if isinstance(settings, dict) else None
        if not isinstance(services, dict) or len(services) != 1:
            found = f"has the services {sorted(map(str, services))}" if isinstance(services, dict) else "has no service"
            raise _unsupported(directory, f"{found} in {name}", "have one service, that of the agent")
    if not os.path.lexists(context / "Dockerfile"):
        return "", ()
    return read_dockerfile(
        _text(directory, str((context / "Dockerfile").relative_to(directory)), "image"), str(directory)
    )


def _tests(directory: Path, needed: str, folder: str) -> Path:
    """Return the folder of a task's tests. Raises :class:`~headrace.base.errors.DataError` if there are none."""
    path = _existing(directory / folder, "tests", directory)
    _existing(path / needed, "tests", path)
    return path


def _existing(path: Path, what: str, root: Path) -> Path:
    """Return a path. Raises :class:`~headrace.base.errors.DataError` if it does not exist, so that the task is without
    ``what``, or lies outside the folder ``root``."""
    if not path.exists():
        raise DataError(f"the task {path.parent} has no {what}: {path} does not exist", remedy="add it")
    resolved_inside(path, root)
    return path


def _instruction(directory: Path) -> str:
    """Return the instruction of a task in the form of Harbor. Raises ``ValueError`` if it is empty."""
    text = _text(directory, "instruction.md", "instruction")
    if not text:
        raise ValueError("instruction.md is empty")
    return text


def _text(directory: Path, name: str, what: str) -> str:
    """Return the text of a file that a task must have."""
    path = directory / name
    content = read_inside(_existing(path, what, directory), directory)
    try:
        return content.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        wrong = content[max(0, error.start - 20) : error.end + 20]
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}: {wrong!r}") from None


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of settings. Raises ``ValueError`` for something else in its place."""
    value = settings.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} is no table")
    return value


def _refuse_misspelt(settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a key of ``task.toml`` that is almost one of the format. Others may be those of a later
    version of it: they are named in the log."""
    for table, known in _KEYS.items():
        for key in sorted((settings if not table else _table(settings, table)).keys() - known):
            suggestion = nearest(key, known)
            if suggestion.startswith("did you mean"):
                raise ValueError(f"{HARBOR} has the unknown key {f'{table}.{key}'.lstrip('.')!r}; {suggestion}")
            _tell_unknown(f"{table}.{key}".lstrip("."))


@cache
def _tell_unknown(key: str) -> None:
    """Say once that a key changes nothing."""
    log.warning("%s: the key %r is not known and changes nothing", HARBOR, key)


def _literal(table: Mapping[str, Any], name: str) -> str:
    """Return a text of a table, empty if it is not set. Raises ``ValueError`` for something else."""
    value = table.get(name) or ""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name}={value!r} is no text")
    return value


def _seconds(table: Mapping[str, Any], name: str, default: float) -> float:
    """Return a time in seconds. Raises ``ValueError`` for one that no session can have."""
    value = _number(name, table.get(name, default))
    if not 0 < value <= MAX_S:
        raise ValueError(f"{name}={value:g} is no time from 0 to {MAX_S:g} seconds")
    return value


def _number(name: str, value: object) -> float:
    """Return a number. Raises ``ValueError`` for something else, and for one that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is no number")
    return float(value)


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a table of settings, as text. Raises ``ValueError`` for those that cannot be
    set."""
    found = {}
    for name, value in _table(table, "env").items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"env.{name}={value!r} is no text")
        text = str(value)
        if match := _FROM_OUTSIDE.fullmatch(text):
            if match[2] is None:
                raise ValueError(f"env.{name}={text!r} names a variable of the machine, and sessions have none of them")
            text = match[2]
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(f"env[{name!r}]={text!r} cannot be set: a name has no '=', and nothing a zero byte")
        found[name] = text
    return found


def _bytes(table: Mapping[str, Any], name: str, least: int) -> int | None:
    """Return a size in bytes from ``NAME_mb = 2048`` or ``NAME = "2G"``; ``None`` if neither is set. Raises
    ``ValueError`` for something else, and for less than a session has."""
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


def _unsupported(task: object, text: str, remedy: str) -> DataError:
    """Return the error for a task with a part that sessions do not have."""
    return DataError(f"the task {task} {text}, which sessions do not support", remedy=remedy)
