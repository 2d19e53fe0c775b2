"""What a run that is ended at once leaves on the terminal."""

from __future__ import annotations

import pytest
import typer

from headrace.base.errors import StoppedAtStart
from headrace.run.cli.output import resumable

CONTINUE = "headrace train run.toml --resume"


@pytest.mark.parametrize(
    ("error", "there", "code", "told"),
    [
        (KeyboardInterrupt(), True, 130, f"stopped\ncontinue {CONTINUE}\n"),
        (KeyboardInterrupt(), False, 130, "stopped\nthere is nothing to continue: the same command starts anew\n"),
        (StoppedAtStart("SIGHUP"), True, 129, f"while it was starting\ncontinue {CONTINUE}\n"),
        (StoppedAtStart("SIGTERM"), False, 130, "there is nothing to continue: the same command starts anew\n"),
    ],
)
def test_only_what_was_begun_is_said_to_continue(
    capsys: pytest.CaptureFixture[str], *, error: KeyboardInterrupt, there: bool, code: int, told: str
) -> None:
    with pytest.raises(typer.Exit) as left, resumable(CONTINUE, lambda: there):
        raise error
    assert left.value.exit_code == code
    assert capsys.readouterr().err.endswith(told)
