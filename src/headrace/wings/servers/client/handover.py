"""The handover of weights from the engine's process to a server. Each version is a folder in shared memory; if the
server runs on other machines, the folder is broadcast to them.

A server can load any checkpoint, split it over its workers and pack it for its kernels. So the weights pass from the
learner to this process with the transport, codec and checks of any engine, and from this process to the server as a
checkpoint.
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
"""Longest wait for a server's machine while a version is sent to it, in seconds."""


class Handover:
    """The folders of the versions that a server will load. They are in ``directory``, which only this run uses.
    ``form`` defines the files of a version, and ``deadline_s`` is the longest wait for a server's machine while a
    version is sent to it."""

    def __init__(self, directory: Path, form: ServedForm, deadline_s: float = DEADLINE_S) -> None:
        """Create a handover without versions."""
        self.directory, self.form, self.deadline_s = directory, form, deadline_s
        self.carrier: Carrier | None = None
        """The sender to the server's machines; ``None`` if the server can read ``directory``."""
        self._carried: dict[int, Path] = {}
        """Directory on the server's machines of each version that was sent there."""

    def path(self, version: int) -> Path:
        """Return the directory of ``version``, as a path on the server's machine."""
        return self._carried.get(version, self._written(version))

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of ``version`` to a folder, completely or not at all, and send the folder to the server's
        machines if they cannot read ``directory``.

        Raises :class:`~headrace.base.errors.WeightsError` if there is too little space, or if the transfer fails.
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
        """Delete the versions before ``version``, which the server has loaded."""
        for path in self.directory.glob("v*"):
            if int(path.name.removeprefix("v")) < version:
                shutil.rmtree(path, ignore_errors=True)
        for older in [*self._carried]:  # copied, because another thread may be adding one
            if older < version:
                del self._carried[older]

    def _written(self, version: int) -> Path:
        """Return the folder of ``version`` on this machine."""
        return self.directory / f"v{version}"
