"""The contract of a writer of metrics, and the facts about the run that it receives.

A *writer* copies the metrics of a run to another program, such as TensorBoard. Each entry of the setting
``observe.writers`` is a section (:class:`WriterSection`) that opens one writer (:class:`MetricWriter`). A *life* of a
run is the time from one start or resumption to its end.
"""

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
    """The facts about a run with which a writer of metrics opens its record of the run in the other program."""

    run_dir: Path
    """The directory of the run."""
    config: Mapping[str, Any]
    """The resolved settings of the run."""

    @property
    def name(self) -> str:
        """Return the name of the run directory, which the other program shows as the name of the run."""
        return self.run_dir.name

    @property
    def key(self) -> str:
        """Return an identifier of the run: 16 hexadecimal digits, a hash of the path of its directory. A resumed run
        has the same identifier, by which a writer finds and continues the record of the run's earlier life."""
        return hashlib.blake2b(str(self.run_dir.resolve()).encode(), digest_size=8).hexdigest()


class MetricWriter(Protocol):
    """The contract of a writer, which passes the metrics of each step to another program. Its methods run in a thread
    of their own, where they may block and raise any error; the run continues without the writer."""

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Write the metrics of the optimizer step ``step``, counted from 0: each value by the name of its metric. All
        values are finite; ``unix_s`` is when the step ended, in seconds since 1970."""

    def close(self) -> None:
        """Write the buffered metrics and close the connection or the files. Called once, after the last step."""


class WriterSection(Section):
    """The settings of one kind of writer, one entry of ``observe.writers``. Each kind is a subclass, whose :meth:`open`
    creates the writer."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Return a new writer for ``run``, ready to write. Raises :class:`~headrace.base.errors.ConfigError` if the
        writer cannot work, for example because its package is not installed. Each subclass implements this method."""
        raise NotImplementedError


def make_missing_package_error(package: str, extra: str) -> ConfigError:
    """Return the error, for the caller to raise, about a writer whose Python package ``package`` is not installed.
    ``extra`` is the extra of Headrace that installs the package, which is also the writer's kind."""
    return ConfigError(
        f"observe.writers asks for {extra}, and the package {package} is not installed",
        remedy=f"pip install 'headrace[{extra}]'",
    )
