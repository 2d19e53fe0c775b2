"""The program ``headrace``. Each verb is one file."""

from headrace.run.cli.app import main

__all__ = ["main"]
