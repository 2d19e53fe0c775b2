"""What a program may begin before it needs it."""

from __future__ import annotations

from headrace.engine.config import EngineConfig
from headrace.models.config import ModelConfig
from headrace.models.devices import AUTO, CPU


def compile_ahead(model: ModelConfig, engine: EngineConfig) -> None:
    """Begin to compile the kernels that this engine would use, if it would use some and they are not there yet."""
    if model.dtype == "float32" and engine.kernels == "auto" and engine.device in (AUTO, CPU):
        from headrace.models.kernels.build import build_ahead

        build_ahead()
