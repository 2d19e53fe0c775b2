"""The parsing of answers as messages: one parser for each format in which models write tool calls."""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.plugins import Registry
from headrace.rollout.answers.base import ContentFilter, Parser, ReasoningFilter, split_reasoning

PARSERS = Registry[Callable[[], Parser]](
    group="headrace.parsers",
    setting="env.tool_parser",
    rows={"hermes": "headrace.rollout.answers.formats:Hermes", "json": "headrace.rollout.answers.formats:BareJson"},
    check=lambda made: None if callable(made) else "cannot be called without arguments to make a parser",
)
"""The constructors of parsers, by the names of ``env.tool_parser``."""

__all__ = ["PARSERS", "ContentFilter", "Parser", "ReasoningFilter", "make_parser", "split_reasoning"]


def make_parser(name: str, template: str) -> Parser:
    """Return a new parser of the kind ``name``. For ``auto``, the kind is chosen by the text of the chat
    ``template``."""
    if name == "auto":
        name = "hermes" if "<tool_call>" in template else "json"
    return PARSERS.load(name)()
