"""How weights get from this process to a server beside it: a folder for each version, in shared memory.

A server knows how to load a checkpoint, split over its own workers and packed for its own kernels; it need not know
where that came from. So whatever transport, codec and checks there are between learner and engine, they end here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from headrace.engine.served.forms import Form
from headrace.errors import WeightsError


class Handover:
    """The versions that are on their way, each a directory below ``directory``, which the server sees and this run
    alone uses."""

    def __init__(self, directory: Path, form: Form) -> None:
        self.directory, self.form = directory, form

    def path(self, version: int) -> Path:
        """The directory of ``version``."""
        return self.directory / f"v{version}"

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Put ``version`` there, whole or not at all; of those that wait, only it is left.

        Raises :class:`~headrace.errors.WeightsError` where there is no room.
        """
        made = self.directory / "being-written"
        try:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            self.form.write(tensors, made)
            shutil.rmtree(self.path(version), ignore_errors=True)
            made.rename(self.path(version))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(made, ignore_errors=True)
            raise WeightsError(
                f"version {version} cannot be handed to the server through {self.directory}: {error}",
                remedy="make room there (df -h), or set engine.server.weights_dir to another folder that both see",
            ) from None

    def drop_before(self, version: int) -> None:
        """Those before ``version`` are not needed any more."""
        for path in self.directory.glob("v*"):
            if int(path.name.removeprefix("v")) < version:
                shutil.rmtree(path, ignore_errors=True)
