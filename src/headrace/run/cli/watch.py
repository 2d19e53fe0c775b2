"""``headrace watch``: show the terminal view of a run that is running in another process. The controller of the run
writes the content of this view, its *live state*, once a second to ``live.json`` in the run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import console, starting

if TYPE_CHECKING:
    from headrace.base.types.observation import LiveState

RENEWED_S = 0.5
"""The interval at which the view is redrawn, in seconds."""


def watch(
    run_dir: Path = typer.Argument(help="The run's directory."),
    once: bool = typer.Option(False, "--once", help="Print the current state once and exit."),
) -> None:
    """Show a run that is still running elsewhere as its own terminal shows it, until it ends; Ctrl-C ends only the
    watching."""
    starting(f"reading {run_dir}")
    import asyncio

    from headrace.run.observe.terminal import LiveView, draw

    out = console()
    out.soft_wrap = False  # the picture is drawn for the width of the terminal, and its sentences wrap
    state = _read_corrected_state(run_dir)
    if once or not out.is_terminal:
        out.print(draw(state, out.width))
        return
    with LiveView(out) as view:
        asyncio.run(_follow(run_dir, view.update))


async def _follow(run_dir: Path, show: Callable[[LiveState], None]) -> None:
    """Call ``show`` with the present state of the run in ``run_dir`` every :data:`RENEWED_S` seconds until the run
    ends, and once more with its last state."""
    import asyncio

    from headrace.run.cli.status import read_run_state

    while read_run_state(run_dir)["state"] == "running":
        show(_read_corrected_state(run_dir))
        await asyncio.sleep(RENEWED_S)
    show(_read_corrected_state(run_dir))


def _read_corrected_state(run_dir: Path) -> LiveState:
    """Return the last live state that the run has written, corrected by what the operating system reports of its
    processes. If its controller is stopped, a warning is added. If the run has ended, ``phase`` is how it ended, such
    as ``finished`` or ``killed``, and ``waits``, the work of the loops, is empty."""
    import msgspec

    from headrace.run.cli.status import read_run_state
    from headrace.run.session.directory import read_status

    state = _read_live_state(run_dir)
    if read_status(run_dir) is None:  # a run that starts writes its status after this state
        return state
    status = read_run_state(run_dir)
    if status["state"] != "running":
        return msgspec.structs.replace(state, phase=status["state"], waits=())
    controller = status["components"][0]
    if not controller["state"].startswith("stopped"):
        return state
    words = f"the controller is {controller['state']}: what is shown here is older"
    return msgspec.structs.replace(state, warnings=(*state.warnings, words))


def _read_live_state(run_dir: Path) -> LiveState:
    """Return the live state in the ``live.json`` of the run. Raises :class:`~headrace.base.errors.DataError` if the
    file is missing, or if it cannot be decoded."""
    import msgspec

    from headrace.base.errors import DataError
    from headrace.base.types.observation import LiveState
    from headrace.run.observe import LIVE_FILE

    path = run_dir / LIVE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=LiveState)
    except OSError:
        raise DataError(
            f"{run_dir} has no {LIVE_FILE}: it holds no run, or its parts are starting",
            remedy="name the directory of a run, or look again in a few seconds",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}", remedy="remove that file; a running run renews it") from None


VERB = Verb(run=watch, group=LOOK, place=30)
