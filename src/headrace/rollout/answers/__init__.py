"""Answers as text, and the messages that they are: one file per way in which models write calls of tools."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.rollout.answers.bare_json import BareJson
from headrace.rollout.answers.base import ParsedAnswer, Parser, certain_split, split_reasoning
from headrace.rollout.answers.hermes import Hermes

PARSERS: Mapping[str, Parser] = {"hermes": Hermes(), "json": BareJson()}
"""By the names of ``env.tool_parser``."""

__all__ = ["PARSERS", "ParsedAnswer", "Parser", "certain_split", "parser_for", "split_reasoning"]


def parser_for(name: str, template: str) -> Parser:
    """The parser called ``name``; of ``auto``, the one that fits what the chat template tells the model."""
    if name == "auto":
        name = "hermes" if "<tool_call>" in template else "json"
    return PARSERS[name]
