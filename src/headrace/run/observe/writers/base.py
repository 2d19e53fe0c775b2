"""What a writer of metrics is, and what it is told of its run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run whose metrics are written."""

    run_dir: Path
    config: Mapping[str, Any]
    """Its resolved settings."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.run_dir.name

    @property
    def key(self) -> str:
        """The same for every life of the run, and no other's."""
        return hashlib.blake2b(str(self.run_dir.resolve()).encode(), digest_size=8).hexdigest()


class MetricWriter(Protocol):
    """Takes the metrics of one step after the other, in a thread of its own; it may block and it may fail."""

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """The numbers of a step, by name, all of them finite."""
        ...

    def close(self) -> None:
        """The last step has been written."""
        ...


def lacks(package: str, extra: str) -> ConfigError:
    """The error where an optional package is not installed."""
    return ConfigError(
        f"observe.writers asks for {extra}, and the package {package} is not installed",
        remedy=f"pip install 'headrace[{extra}]'",
    )
