"""Saving and loading of a policy. A saved policy is a Hugging Face model directory that also contains the optimizer and
the state from which sampling and training continue."""

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
"""Name of the file with the state of a policy, in the directory of a saved policy."""
FORMAT = 1
"""The version of the format of this file that this program writes and reads."""


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a policy in addition to weights, optimizer and version."""

    config: dict[str, Any]
    """Settings of the policy."""
    num_prompts: int
    """Number of prompts sampled so far, from which the seeds of the next samples follow."""
    format: int = FORMAT
    """Version of the format. It is increased when older programs cannot read the new format."""


def save(directory: Path, learner: LearnerCore, state: PolicyState) -> None:
    """Write the learner (model, tokenizer, optimizer, version) and the policy's ``state`` to ``directory``, which must
    not exist or must be empty. The directory gets its name only when all files are complete and synced to the disk.

    Raises :class:`~headrace.base.errors.CheckpointError` if this fails; the files written so far are then deleted.
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

    Raises :class:`~headrace.base.errors.CheckpointError` if the file of the state cannot be read.
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
