"""Engines: they turn requests into tokens that carry logprob and version."""

from headrace.engine.base import PLAIN, Engine, EngineCore, RequestOptions, TokenChunk
from headrace.engine.config import EngineConfig

__all__ = ["PLAIN", "Engine", "EngineConfig", "EngineCore", "RequestOptions", "TokenChunk"]
