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

import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.base.errors import DataError
from headrace.rollout.environments.data import Row

HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
DEPTH = 3
"""How many folders deep tasks are looked for."""
WORK_DIRECTORY = "/app"
"""The directory in which an agent begins, unless the environment says otherwise."""
_SIZE = re.compile(r"(?i)\s*([\d.]+)\s*([kmgt]?)(i?b)?\s*")
_WITHOUT_EFFECT = frozenset({"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL"})
"""Instructions of a Dockerfile that change nothing for the commands of an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStep:
    """One step that makes the environment of a task, as its Dockerfile says."""

    kind: str
    """``RUN``, ``COPY``, ``ENV`` or ``WORKDIR``."""
    words: tuple[str, ...]
    """A command; sources and a target; a name and a value; a directory."""


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
            row["solution"] = _solution(directory)
        except DataError as error:
            row["problem"] = str(error)
        rows.append(row)
    return rows


def _solution(directory: Path) -> str:
    """Return the commands that solve a task, in the form of an answer."""
    for name in ("solution/solve.sh", "solution.sh"):
        if (directory / name).is_file():
            return f"```bash\n{(directory / name).read_text(encoding='utf-8').strip()}\n```"
    return ""


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
    try:
        return _open_harbor(directory) if (directory / HARBOR).is_file() else _open_terminal_bench(directory)
    except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the task {directory} cannot be read: {error}", remedy="correct its files") from None


def _open_harbor(directory: Path) -> TaskDirectory:
    """Read a task in the form of Harbor."""
    settings = tomllib.loads((directory / HARBOR).read_text(encoding="utf-8"))
    tables: list[dict[str, Any]] = [settings.get(name, {}) for name in ("environment", "agent", "verifier")]
    environment, agent, verifier = tables
    if (directory / "steps").is_dir():
        raise _unsupported(directory, "has several steps", "give a task of one step")
    if verifier.get("environment_mode", "shared") != "shared":
        raise _unsupported(directory, "runs its tests in an environment of their own", "run them in the agent's")
    context = directory / "environment"
    image, steps = _read_environment(directory, context)
    if environment.get("workdir"):
        steps = (*steps, BuildStep(kind="WORKDIR", words=(str(environment["workdir"]),)))
    network = [table.get("network_mode", "no-network") for table in tables]
    return TaskDirectory(
        name=directory.name,
        instruction=_text(directory / "instruction.md", "an instruction"),
        context=context,
        image=environment.get("docker_image") or image,
        steps=steps,
        tests=_tests(directory, "test.sh", "tests"),
        test_command="bash /tests/test.sh",
        build_s=float(environment.get("build_timeout_sec", 600.0)),
        agent_s=float(agent.get("timeout_sec", 900.0)),
        tests_s=float(verifier.get("timeout_sec", 900.0)),
        memory_bytes=_bytes(environment, "memory"),
        disk_bytes=_bytes(environment, "storage"),
        asks_network=bool(environment.get("allow_internet")) or any(mode != "no-network" for mode in network),
        variables=_variables(environment),
        test_variables=_variables(verifier),
    )


def _open_terminal_bench(directory: Path) -> TaskDirectory:
    """Read a task in the form of Terminal-Bench."""
    import yaml  # transformers needs it too

    try:
        settings = yaml.safe_load((directory / TERMINAL_BENCH).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(settings, dict) or not isinstance(settings.get("instruction"), str):
        raise DataError(f"the task {directory} has no instruction in {TERMINAL_BENCH}", remedy="write one")
    if settings.get("parser_name", "pytest") != "pytest":
        raise _unsupported(directory, f"has parser_name={settings['parser_name']!r}", "have the tests run by pytest")
    image, steps = _read_environment(directory, directory)
    return TaskDirectory(
        name=directory.name,
        instruction=settings["instruction"],
        context=directory,
        image=image,
        steps=steps,
        tests=_tests(directory, "", "tests"),
        more_tests=(_existing(directory / "run-tests.sh", "tests"),),
        test_command="bash /tests/run-tests.sh",
        prints_pytest=True,
        agent_s=float(settings.get("max_agent_timeout_sec", 900.0)),
        tests_s=float(settings.get("max_test_timeout_sec", 900.0)),
        test_variables={"TEST_DIR": "/tests"},
    )


def _read_environment(directory: Path, context: Path) -> tuple[str, tuple[BuildStep, ...]]:
    """Return the image and the steps of the environment that the folder ``context`` describes."""
    composed = [name for name in ("docker-compose.yaml", "docker-compose.yml") if (context / name).is_file()]
    dockerfile = context / "Dockerfile"
    if composed and context != directory:  # each task of Terminal-Bench has one, which only starts its image
        raise _unsupported(directory, f"has services in {composed[0]}", "describe one environment in a Dockerfile")
    if not dockerfile.is_file():
        return "", ()
    return read_dockerfile(dockerfile.read_text(encoding="utf-8"), str(directory))


def read_dockerfile(text: str, name: str) -> tuple[str, tuple[BuildStep, ...]]:
    """Return the image and the steps of a Dockerfile. Raises :class:`~headrace.base.errors.DataError`, about the task
    ``name``, for an instruction that has no counterpart in a session.

    >>> read_dockerfile("FROM python:3.12\\nRUN echo a && \\\\\\n  echo b", "it")[1][0].words
    ('echo a &&   echo b',)
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    image, steps = "", []
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        kind, _, rest = line.strip().partition(" ")
        kind, rest = kind.upper(), rest.strip()
        if kind == "FROM":
            if image:
                raise _unsupported(name, "has a Dockerfile with several stages", "describe one stage")
            image = rest.split()[-1] if "--" in rest else rest.split()[0]
        elif kind and kind not in _WITHOUT_EFFECT:
            steps += _steps(kind, rest, name)
    return image, tuple(steps)


def _steps(kind: str, rest: str, name: str) -> list[BuildStep]:
    """Return the steps of one instruction of a Dockerfile."""
    if kind == "RUN" and "<<" not in rest and not rest.startswith("--"):
        return [BuildStep(kind=kind, words=(shlex.join(json.loads(rest)) if rest.startswith("[") else rest,))]
    if kind in ("COPY", "ADD") and "://" not in rest:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        if len(words) >= 2 and not any(word.startswith("--") for word in words):
            return [BuildStep(kind="COPY", words=tuple(words))]
    if kind == "WORKDIR":
        return [BuildStep(kind=kind, words=(rest,))]
    if kind in ("ENV", "ARG"):
        words = shlex.split(rest)
        pairs = [word.partition("=")[::2] for word in words if "=" in word]
        if kind == "ENV" and words and "=" not in words[0]:
            pairs = [(words[0], rest.partition(" ")[2].strip())]
        return [BuildStep(kind="ENV", words=pair) for pair in pairs]
    if kind == "USER" and rest == "root":
        return []  # a session has one user, to whom the world belongs
    raise _unsupported(name, f"has {f'{kind} {rest}'[:120]!r} in its Dockerfile", "write it as RUN, COPY, ENV, WORKDIR")


def _tests(directory: Path, needed: str, folder: str) -> Path:
    """Return the folder of a task's tests. Raises :class:`~headrace.base.errors.DataError` if there are none."""
    path = _existing(directory / folder, "tests")
    _existing(path / needed, "tests")
    return path


def _existing(path: Path, what: str) -> Path:
    """Return a path. Raises :class:`~headrace.base.errors.DataError` if it does not exist, so that the task is without
    ``what``."""
    if not path.exists():
        raise DataError(f"the task {path.parent} has no {what}: {path} does not exist", remedy="add it")
    return path


def _text(path: Path, what: str) -> str:
    """Return the text of a file that a task must have."""
    return _existing(path, what).read_text(encoding="utf-8").strip()


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a table of settings, as text."""
    return {str(name): str(value) for name, value in table.get("env", {}).items()}


def _bytes(table: Mapping[str, Any], name: str) -> int | None:
    """Return a size in bytes from ``NAME_mb = 2048`` or ``NAME = "2G"``; ``None`` if neither is set."""
    if f"{name}_mb" in table:
        return int(table[f"{name}_mb"]) << 20
    if name not in table:
        return None
    match = _SIZE.fullmatch(str(table[name]))
    if match is None:
        raise ValueError(f"{name}={table[name]!r} is no size")
    return int(float(match[1]) * (1 << (10 * " kmgt".index(match[2].lower() or " "))))


def _unsupported(task: object, text: str, remedy: str) -> DataError:
    """Return the error for a task with a part that sessions do not have."""
    return DataError(f"the task {task} {text}, which sessions do not support", remedy=remedy)


def files_below(folder: Path, target: str) -> dict[str, bytes]:
    """Return the files of a folder by the paths that they get below ``target``."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            found[f"{target}/{path.relative_to(folder)}"] = path.read_bytes()
    return found
