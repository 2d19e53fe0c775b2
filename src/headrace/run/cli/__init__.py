"""The program ``headrace``, with one file for each verb (a command such as ``headrace train``)."""

from headrace.run.cli.app import main

__all__ = ["main"]
