"""The inference engines, which sample tokens for requests and record the logprob and the version of each token."""

from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import PLAIN, RequestOptions
from headrace.engine.base import Engine, EngineCore, EngineSet, SiblingRequest, SiblingSource, TokenSource
from headrace.engine.config import EngineConfig

__all__ = [
    "PLAIN",
    "Engine",
    "EngineConfig",
    "EngineCore",
    "EngineSet",
    "RequestOptions",
    "SiblingRequest",
    "SiblingSource",
    "TokenChunk",
    "TokenSource",
]
