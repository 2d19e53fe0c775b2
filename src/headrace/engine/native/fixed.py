"""Weights that never change."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headrace.base.errors import WeightsError
from headrace.base.types.versions import INITIAL
from headrace.base.types.weights import WeightUpdate


class LoadedWeights:
    """The receiver of a server whose weights never change: they are in the model already."""

    def stage(self, update: WeightUpdate) -> None:
        raise WeightsError(
            f"version {update.version} is sent to a server of fixed weights", remedy="start it with the new model"
        )

    def staged(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Only the first version is there, and there is nothing to exchange."""
        if version != INITIAL:
            raise WeightsError(
                f"commit of version {version} of fixed weights", remedy="start the server with the new model"
            )
        return iter(())
