"""Engines: they turn requests into tokens that carry logprob and version."""

from headrace.engine.base import PLAIN, Engine, EngineCore, EngineSet, RequestOptions, TokenChunk, TokenSource
from headrace.engine.config import EngineConfig

__all__ = ["PLAIN", "Engine", "EngineConfig", "EngineCore", "EngineSet", "RequestOptions", "TokenChunk", "TokenSource"]
