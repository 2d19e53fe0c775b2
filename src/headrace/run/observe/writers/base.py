"""The contract of a writer of metrics, and the facts about the run that it receives."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.base.config import Section
from headrace.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts about a run that a writer of metrics needs."""

    run_dir: Path
    config: Mapping[str, Any]
    """The resolved settings of the run."""

    @property
    def name(self) -> str:
        """Return the name that people give the run."""
        return self.run_dir.name

    @property
    def key(self) -> str:
        """Return an identifier of the run: the same in every life of the run, and different for every other run."""
        return hashlib.blake2b(str(self.run_dir.resolve()).encode(), digest_size=8).hexdigest()


class MetricWriter(Protocol):
    """A writer of metrics. It runs in a thread of its own, where it may block and raise any error."""

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Write the metrics of a step by name. All values are finite; ``unix_s`` is the time of the step in seconds
        since 1970."""
        ...

    def close(self) -> None:
        """Finish the writing, after the last step."""
        ...


class WriterSection(Section):
    """The settings of one kind of writer. They open the writer."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Return the writer of ``run``. Raises :class:`~headrace.base.errors.ConfigError` where it cannot work."""
        raise NotImplementedError


def missing_package(package: str, extra: str) -> ConfigError:
    """Return the error for a writer whose package is not installed."""
    return ConfigError(
        f"observe.writers asks for {extra}, and the package {package} is not installed",
        remedy=f"pip install 'headrace[{extra}]'",
    )
