"""The program ``headrace``: one verb per file."""

from headrace.cli.app import main

__all__ = ["main"]
