"""What a process finds by path on its machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from headrace.launch.starts import EngineStart, EnvironmentStart, LearnerStart, ScorerStart, Start


def paths_of(start: Start) -> dict[str, str]:
    """What a process finds by path, by the setting that names it.

    >>> paths_of(ScorerStart(reward={"kind": "function", "ref": "/code/reward.py:reward"}))
    {'env.reward': '/code/reward.py'}
    """
    paths: dict[str, str] = {}
    match start:
        case EngineStart():
            paths = {"model.path": str(start.model["path"]), "sync.tls_certificate": start.route.tls_certificate}
            paths["sync.tls_key"] = start.route.tls_key
        case LearnerStart():
            paths = {"model.path": str(start.model["path"]), "sync.tls_certificate": start.route.tls_certificate}
            paths["the snapshot"] = start.snapshot
        case ScorerStart():
            paths = {"env.reward": str(start.reward.get("ref", "")).rpartition(":")[0]}
        case EnvironmentStart():
            paths = {f"env ({path})": path for path in _files_of(start.entry)}
    return {setting: path for setting, path in paths.items() if path}


def _files_of(entry: str) -> Sequence[str]:
    """The absolute paths in an environment's entry: of a ``file.py:name``; of a command those that are files here."""
    found = []
    for word in shlex.split(entry):
        file = word.rpartition(":")[0] if ".py:" in word else word
        if file.startswith("/") and (file != word or Path(file).exists()):
            found.append(file)
    return found
