"""Where a run file names models: each name of a hub becomes a directory before anything reads it, and a name and commit
again where the settings are written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.base.config import validate
from headrace.models.hub import Change, local_directory, pinned, same_repository, with_models
from headrace.run.session.config import RunConfig


def with_local_models(config: RunConfig, *, weights: bool = True) -> RunConfig:
    """The same settings with a directory for each model of a hub, fetched where it is not in the cache.

    Without ``weights``, settings and tokenizers are enough. Raises :class:`~headrace.base.errors.ModelError`.
    """
    return _changed(config, lambda setting, path: local_directory(path, setting, weights=weights))


def with_recorded_models(config: RunConfig, settings: Path) -> RunConfig:
    """The same settings with the revisions that the run with the file ``settings`` began with, where ``config`` names
    the model and no revision: the branch may have moved on since."""
    try:
        recorded = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that cannot be resumed is refused where it is opened
        return config
    known = {setting: str(path) for setting, path in _named(recorded)}
    return _changed(
        config, lambda setting, path: known[setting] if same_repository(path, known.get(setting, "")) else path
    )


def as_recorded(config: RunConfig, exclude: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings as ``config.json`` keeps them: models of a hub by name and commit, wherever their cache is."""
    return with_models(config.model_dump(mode="json", exclude=exclude), lambda _, path: pinned(path))


def _changed(config: RunConfig, change: Change) -> RunConfig:
    tree = config.model_dump(mode="json")
    found = with_models(tree, change)
    return config if found == tree else validate(RunConfig, found)


def _named(tree: dict[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []

    def note(setting: str, path: str) -> str:
        found.append((setting, path))
        return path

    with_models(tree, note)
    return found
