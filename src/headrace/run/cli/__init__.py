"""The program ``headrace``: one verb per file."""

from headrace.run.cli.app import main

__all__ = ["main"]
