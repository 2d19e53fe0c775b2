"""Engines: they turn requests into tokens that carry logprob and version."""

from headrace.engine.base import PLAIN, Crew, Engine, EngineCore, RequestOptions, TokenChunk, TokenSource
from headrace.engine.config import EngineConfig

__all__ = ["PLAIN", "Crew", "Engine", "EngineConfig", "EngineCore", "RequestOptions", "TokenChunk", "TokenSource"]
