"""Engines: they turn requests into tokens that carry logprob and version."""

from headrace.engine.base import Engine, EngineCore, TokenChunk
from headrace.engine.config import EngineConfig

__all__ = ["Engine", "EngineConfig", "EngineCore", "TokenChunk"]
