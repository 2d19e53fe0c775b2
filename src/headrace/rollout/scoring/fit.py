"""The check that dataset rows have the columns that rewards read. It runs before any process of the run starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from headrace.base.errors import ConfigError, EnvError, nearest
from headrace.base.types.task import Task
from headrace.rollout.scoring.base import RewardSection
from headrace.rollout.scoring.function import FunctionReward
from headrace.rollout.scoring.reward import split_reference
from headrace.rollout.scoring.signature import RewardSignature, read_signature

LOOK_S = 120.0
"""The time limit for importing a reward's file, in seconds. The file is imported only if the parameters of its function
cannot be read from its text."""


def find_reliable_columns(reward: RewardSection, tasks: Sequence[Task]) -> frozenset[str]:
    """Return the columns that ``reward`` can rely on: columns that every row of ``tasks`` has. For an optional reward,
    which may fail for single rows, return columns that at least one row has."""
    names = [task.row.keys() for task in tasks]
    return frozenset(set().union(*names) if reward.optional else set(names[0]).intersection(*names[1:]))


def refuse_missing_columns(rewards: Sequence[RewardSection], tasks: Sequence[Task], *, thorough: bool) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` or :class:`~headrace.base.errors.EnvError` if one of ``rewards``
    reads a column that is missing in the rows of ``tasks``. With ``thorough``, a file is imported, in a separate
    process, if its text does not show the parameters of the reward function."""
    functions = [reward for reward in rewards if isinstance(reward, FunctionReward)]
    signatures = {reward.ref: read_signature(*split_reference(reward.ref)) for reward in functions}
    if thorough and (unknown := [ref for ref, signature in signatures.items() if signature is None]):
        signatures |= import_signatures(unknown)
    for reward in rewards:
        _refuse_missing_cells(reward, tasks)
        columns = find_reliable_columns(reward, tasks)
        if not isinstance(reward, FunctionReward):
            _refuse_unknown_columns(reward, columns)
        elif (signature := signatures[reward.ref]) is not None:
            name = reward.ref.rpartition(":")[2]
            signature.refuse_form(name, by_turn=reward.by_turn)
            signature.refuse_missing(name, columns, by_turn=reward.by_turn)


def _refuse_missing_cells(reward: RewardSection, tasks: Sequence[Task]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``reward`` reads a column that some rows of ``tasks`` have
    and others lack. The error names the first row without it."""
    for column, reader in reward.columns().items():
        if column in find_reliable_columns(reward, tasks) or not any(column in task.row for task in tasks):
            continue
        row = next(task for task in tasks if column not in task.row)
        raise ConfigError(
            f"env.rewards {reward.label!r} reads the column {column!r} ({reader}), and row {row.row_index + 1} has "
            f"none (it has {', '.join(sorted(row.row))})",
            remedy="give every row the column, or make the reward optional, with a default",
        )


def _refuse_unknown_columns(reward: RewardSection, columns: frozenset[str]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``reward`` reads a column that no row has. ``columns`` are
    the columns that the reward can rely on. :func:`_refuse_missing_cells` has already refused columns that only some
    rows lack."""
    for column, reader in reward.columns().items():
        if column not in columns:
            raise ConfigError(
                f"env.rewards {reward.label!r} reads the column {column!r} ({reader}), which no row has (they have "
                f"{', '.join(sorted(columns))})",
                remedy=f"name the column that they have: {nearest(column, columns)}",
            )


def import_signatures(references: Sequence[str]) -> dict[str, RewardSignature | None]:
    """Return the signatures of the functions that ``references`` (``file.py:name``) name, which can be determined only
    by importing their files. A separate process imports the files, as scoring workers will do later. All values are
    ``None`` if that takes too long."""
    try:
        completed = subprocess.run(
            [sys.executable, "-m", "headrace.rollout.scoring.print_signatures", *references],
            capture_output=True,
            timeout=LOOK_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(references)
    try:
        answer = json.loads(completed.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        text = completed.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise EnvError(
            f"env.reward: the process that imports {', '.join(references)} ended with code {completed.returncode}: "
            f"{text}",
            remedy="fix the file",
        ) from None
    for each in answer.values():
        if "problem" in each:
            raise EnvError(each["problem"], remedy=each["remedy"])
    return {reference: msgspec.convert(each, RewardSignature) for reference, each in answer.items()}
