"""Saving and loading of a policy: an ordinary model directory with the optimizer, and the state that is needed to
continue."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CheckpointError
from headrace.learner.core import LearnerCore
from headrace.learner.disk import SLACK_BYTES, flush_one, seal, whole_or_nothing

STATE_FILE = "policy.json"
"""The file with the state of a policy, in the directory that it is saved in."""
FORMAT = 1
"""The version of the format that this program writes and reads."""


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a policy beside weights, optimizer and version."""

    config: dict[str, Any]
    """Settings of the policy."""
    num_prompts: int
    """Number of prompts sampled so far, from which the next draws follow."""
    format: int = FORMAT
    """Version of the format, which is raised when older programs cannot read it any more."""


def save(directory: Path, learner: LearnerCore, state: PolicyState) -> None:
    """Write the learner (model, tokenizer, optimizer, version) and the policy's ``state`` into ``directory``, which
    must not exist or must be empty. It appears under its name only when it is complete and flushed to disk.

    Raises :class:`~headrace.base.errors.CheckpointError`; no files are left then.
    """
    unfinished = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    try:
        if directory.exists() and any(directory.iterdir()):
            raise FileExistsError("it is not empty")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"a policy cannot be saved in {directory}: {error}", remedy="name a directory that does not exist yet"
        ) from None
    learner.save(unfinished)
    with whole_or_nothing(unfinished, SLACK_BYTES):
        (unfinished / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
        seal(unfinished)
    try:
        unfinished.replace(directory)
        flush_one(directory.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{directory} cannot be given its name: {error}", remedy="name another") from None


def read_state(directory: Path) -> PolicyState | None:
    """Return the state of the policy that is saved in ``directory``; ``None`` for a directory that contains only a
    model.

    Raises :class:`~headrace.base.errors.CheckpointError` for a file that cannot be read.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    try:
        state = msgspec.json.decode(path.read_bytes(), type=PolicyState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", remedy="load an older one, or remove the file to begin at version 0"
        ) from None
    if state.format != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.format}, this Headrace reads {FORMAT}", remedy="load it with a newer Headrace"
        )
    return state
