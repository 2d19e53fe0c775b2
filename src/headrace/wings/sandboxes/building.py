"""The building of a task's environment: the steps of its Dockerfile run in a session as docker would run them.

A step has the variables of the session, of ``ENV`` and of ``ARG``. The variables of ``task.toml`` are set after the
last step, as docker sets them for a container and not for its image.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox import Finished
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.archives import RefusedFile, ignore_rules, pack_files, resolve_inside, unpack
from headrace.wings.sandboxes.base import SandboxSession
from headrace.wings.sandboxes.dockerfile import BuildState, BuildStep, expand, state_after
from headrace.wings.sandboxes.tasks import TaskDirectory

OUTPUT_BYTES = 16 * MIB
"""The largest size of one step's output and error output together, in bytes."""
_FOLDER_ITSELF = (".", "./", "/")


async def build(session: SandboxSession, task: TaskDirectory) -> None:
    """Run the steps that build the environment of ``task`` in ``session``, within ``task.build_s`` seconds. Raises
    :class:`~headrace.base.errors.EpisodeError` if a step fails."""
    if not task.steps:
        return
    state = BuildState(environment=dict(session.base_variables), directory=task.directory)
    try:
        async with asyncio.timeout(task.build_s):
            for step in task.steps:
                await _run_build_step(step, state, session, task)
    except TimeoutError:
        raise _make_setup_error(task, f"it took longer than {task.build_s:g} s") from None
    session.directory, session.variables = state.directory, {**state.environment, **task.variables}


def collect_variables(session: SandboxSession, task: TaskDirectory) -> dict[str, str]:
    """Return the variables with which commands of the agent begin in the built environment of ``task`` in
    ``session``."""
    environment = state_after(task.steps, session.base_variables, task.directory).environment
    return {**environment, **session.spec.variables}


def task_directory(task: TaskDirectory, base_variables: Mapping[str, str]) -> str:
    """Return the directory in which commands of the agent on ``task`` begin. ``base_variables`` are the environment
    variables of every command of the session."""
    return state_after(task.steps, base_variables, task.directory).directory


async def _run_build_step(step: BuildStep, state: BuildState, session: SandboxSession, task: TaskDirectory) -> None:
    """Run one build step in the session, and apply it to ``state``."""
    try:
        state.take(step)
        if step.kind in ("COPY", "ADD"):
            await _copy(step, state, session, task)
    except (RefusedFile, ValueError) as error:
        raise _make_invalid_error(task, f"{step.kind} {' '.join(step.words)[:120]}: {error}") from None
    if step.kind == "WORKDIR":
        made = await session.run_apart('mkdir -p -- "$1"', state.directory)
        if made.status != 0:
            raise _make_setup_error(
                task, f"WORKDIR {state.directory}: {made.stderr.decode('utf-8', 'replace').strip()}"
            )
    elif step.kind == "RUN":
        await _run_command(shlex.join(step.words), state, session, task)


async def _run_command(command: str, state: BuildState, session: SandboxSession, task: TaskDirectory) -> None:
    """Run the command of a ``RUN`` step in a new shell. Raises :class:`~headrace.base.errors.EpisodeError` if it
    fails."""
    session.directory, session.variables = state.directory, state.known
    limits = replace(session.spec.limits, wall_s=task.build_s, output_bytes=OUTPUT_BYTES)
    done = await session.run(command, limits=limits)
    if not done.ok:
        raise _make_setup_error(
            task, f"{command[:200]!r}: {describe_end(done)} {(done.stderr or done.stdout)[-400:].strip()}"
        )


async def _copy(step: BuildStep, state: BuildState, session: SandboxSession, task: TaskDirectory) -> None:
    """Copy files of the task's folder into the session, as the ``step`` (``COPY`` or ``ADD`` of a Dockerfile) says.
    ``state`` has the directory and the variables before the step."""
    *sources, target_word = (expand(word, state.known) for word in step.words)
    target = posixpath.join(state.directory, target_word)
    paths = await asyncio.to_thread(_matching_files, step, sources, task)
    into_folder = target_word.endswith("/") or target_word in (".", "..", "")
    if not into_folder and not all(path.is_dir() for path in paths):
        into_folder = (await session.run_apart('[ -d "$1" ]', target)).status == 0
    if not into_folder and len(paths) > 1:
        raise ValueError(f"{len(paths)} files need a folder; end the target {target_word!r} with a slash")
    pairs = [(path, f"{target}/{path.name}" if into_folder and not path.is_dir() else target) for path in paths]
    try:
        archive = await asyncio.to_thread(
            pack_files, pairs, task.context, mode=step.mode, leaves_out=_make_ignore_function(task.context)
        )
    except OSError as error:
        raise ValueError(f"a file cannot be read: {error}") from None
    await unpack(session, archive)


def _matching_files(step: BuildStep, sources: list[str], task: TaskDirectory) -> list[Path]:
    """Return the files and folders in the task's folder that match the patterns ``sources`` of ``step``, without the
    ignored files. Raises :class:`~headrace.base.errors.EpisodeError` if a pattern matches none."""
    is_ignored, found = _make_ignore_function(task.context), []
    for pattern in sources:
        matches = [task.context] if pattern in _FOLDER_ITSELF else sorted(task.context.glob(pattern.lstrip("/")))
        for path in matches:
            _refuse_outside(path, task)
        copied = [path for path in matches if not is_ignored(path.relative_to(task.context).as_posix())]
        if not copied:
            raise _make_setup_error(task, f"{step.kind} {pattern}: there is no such file")
        found += copied
    for path in found:
        if step.kind == "ADD" and path.is_file() and tarfile.is_tarfile(path):
            raise ValueError(f"{path.name} is an archive, which docker would unpack; copy it, and unpack it by RUN")
    return found


def _make_ignore_function(context: Path) -> Callable[[str], bool]:
    """Return a function of a path in the folder ``context`` that returns whether ``.dockerignore`` excludes it."""
    file = context / ".dockerignore"
    return ignore_rules(file.read_text(encoding="utf-8") if file.is_file() else "")


def _refuse_outside(path: Path, task: TaskDirectory) -> None:
    """Raise :class:`~headrace.base.errors.EpisodeError` for a path outside the task's folder."""
    try:
        resolve_inside(path, task.context)
    except RefusedFile as error:
        raise _make_setup_error(task, f"COPY of a file outside: {error}") from None
    except OSError as error:
        raise _make_setup_error(task, f"COPY of {path.name}: there is no such file: {error}") from None


def describe_end(done: Finished) -> str:
    """Return in words how the command with the result ``done`` ended: its exit code, or the limit that ended it."""
    return f"exit code {done.exit_code}" if done.exit_code is not None else f"ended for {done.reason}"


def _make_setup_error(task: TaskDirectory, text: str) -> EpisodeError:
    """Return the error for an environment that cannot be built because of ``text``."""
    return EpisodeError(
        f"the environment of the task {task.name} cannot be made: {text}",
        remedy="correct its set-up; sessions have no network and no root",
        reason="task_setup",
    )


def _make_invalid_error(task: TaskDirectory, text: str) -> EpisodeError:
    """Return the error for an environment whose description is invalid because of ``text``."""
    return EpisodeError(
        f"the environment of the task {task.name} cannot be made: {text}",
        remedy="correct its Dockerfile, or the files beside it",
        reason="task_invalid",
    )
