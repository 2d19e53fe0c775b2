"""Load, merge, override, validate and explain run files."""

from headrace.base.config.load import leaves, load_toml, merge, parse_override, validate
from headrace.base.config.section import Section, descriptions

__all__ = ["Section", "descriptions", "leaves", "load_toml", "merge", "parse_override", "validate"]
