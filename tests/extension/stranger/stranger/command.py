"""A verb."""

from __future__ import annotations

import typer

from headrace.extend import Verb


def greet(name: str = typer.Argument(help="Whom.")) -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}")


VERB = Verb(run=greet, group="Of a stranger")
