"""How weights get from this process to a server: a folder for each version, in shared memory; where the server is on
another machine, carried there.

A server knows how to load a checkpoint, split over its own workers and packed for its own kernels; it need not know
where that came from. So whatever transport, codec and checks there are between learner and engine, they end here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from headrace.base.errors import WeightsError
from headrace.wings.servers.client.carrier import Carrier
from headrace.wings.servers.client.forms import ServedForm

DEADLINE_S = 30.0
"""Longest that a server's machine may be silent while a version is carried there."""


class Handover:
    """The versions that are on their way, each a directory below ``directory``, which the server sees and this run
    alone uses."""

    def __init__(self, directory: Path, form: ServedForm, deadline_s: float = DEADLINE_S) -> None:
        self.directory, self.form, self.deadline_s = directory, form, deadline_s
        self.carrier: Carrier | None = None
        """Of a server that does not see ``directory``."""
        self._carried: dict[int, Path] = {}

    def path(self, version: int) -> Path:
        """The directory of ``version``, as the server sees it."""
        return self._carried.get(version, self._written(version))

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Put ``version`` where the server finds it, whole or not at all.

        Raises :class:`~headrace.base.errors.WeightsError` where there is no room, or it does not get there.
        """
        made = self.directory / "being-written"
        try:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            self.form.write(tensors, made)
            shutil.rmtree(self._written(version), ignore_errors=True)
            made.rename(self._written(version))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(made, ignore_errors=True)
            raise WeightsError(
                f"version {version} cannot be handed to the server through {self.directory}: {error}",
                remedy="make room there (df -h), or set engine.server.weights_dir to another folder that both see",
            ) from None
        if self.carrier is not None:
            self._carried[version] = self.carrier.carry(self._written(version), version)

    def drop_before(self, version: int) -> None:
        """Those before ``version`` are not needed any more."""
        for path in self.directory.glob("v*"):
            if int(path.name.removeprefix("v")) < version:
                shutil.rmtree(path, ignore_errors=True)
        for each in [*self._carried]:  # another thread may be adding one
            if each < version:
                del self._carried[each]

    def _written(self, version: int) -> Path:
        return self.directory / f"v{version}"
