"""Load, merge, override, validate and explain run files."""

from headrace.config.load import leaves, load_toml, merge, parse_override, validate
from headrace.config.section import Section, descriptions

__all__ = ["Section", "descriptions", "leaves", "load_toml", "merge", "parse_override", "validate"]
