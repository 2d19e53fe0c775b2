"""``headrace engines``: list the engines of a run during the run, add engines, and remove engines.

The verb sends a request to the run over the Unix socket that ``status.json`` names, and shows the answers of the run.
The socket is in a directory that only the user of the run can enter.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import typer

from headrace.base.errors import ConfigError, DataError, RunError
from headrace.base.types.messages.program import (
    AddEngines,
    ChangeDone,
    ChangeProgress,
    ChangeRefused,
    EngineStatus,
    ListEngines,
    ProgramAnswer,
    ProgramRequest,
    RemoveEngines,
)
from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import console, print_json, readable, starting, table

CONNECT_S = 10.0
"""The maximum time to wait, in seconds, until the run accepts the connection, and until it has listed its engines."""


def engines(
    run_dir: Path = typer.Argument(help="The run's directory."),
    action: str = typer.Argument("", help="add or remove; unset: list the engines.", show_default=False),
    what: str = typer.Argument(
        "",
        metavar="[N|NAME]",
        help="How many engines to add or remove (unset: 1), or the name of the one to remove.",
        show_default=False,
    ),
    wait: float = typer.Option(
        600.0, min=0.0, help="Seconds to wait until the change is complete; it goes on without."
    ),
    drain: float = typer.Option(
        30.0, min=0.0, help="Seconds that a removed engine has to end its sequences; others continue the rest."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
) -> None:
    """List the engines of a run while it goes on, add engines to it, or remove some.

    The number lasts until the processes of the run end: --resume begins with engine.count engines.
    """
    starting(f"reading {run_dir}")
    request = _make_request(action, what, drain)
    address = _find_address(run_dir)
    done = _send_request(
        run_dir, address, request, wait_s=max(wait, CONNECT_S) if action == "" else wait, quiet=as_json
    )
    if as_json:
        state = "done" if done is not None else "under way"
        outcome = ChangeDone(engines=()) if done is None else done
        print_json({"run_dir": str(run_dir), "state": state, **msgspec.structs.asdict(outcome)})
    elif done is None:
        console().print(f"under way after {wait:g} s: headrace engines {readable(str(run_dir))} shows it")
    else:
        _print_engines(done.engines)


def _make_request(action: str, what: str, drain_s: float) -> ProgramRequest:
    """Return the request that the arguments of the verb describe: ``action`` and ``what``, and ``drain_s``, the time
    that a removed engine has to end its sequences. Raises :class:`~headrace.base.errors.ConfigError` if they describe
    none."""
    if action not in ("", "add", "remove"):
        raise ConfigError(f"{action!r} is not something to do with engines", remedy="add, remove, or nothing to list")
    number = int(what) if what.isascii() and what.isdecimal() else None
    if number == 0 or (what and number is None and action != "remove"):
        raise ConfigError(f"{what!r} is not a number of engines to {action}", remedy=f"{action} 1 or more")
    match action:
        case "add":
            return AddEngines(count=number or 1)
        case "remove":
            return RemoveEngines(name=what if number is None else "", count=number or 1, drain_s=drain_s)
    return ListEngines()


def _find_address(run_dir: Path) -> str:
    """Return the path of the socket at which the run in ``run_dir`` receives requests. Raises
    :class:`~headrace.base.errors.DataError` if the directory contains no run or a run that is still starting, and
    :class:`~headrace.base.errors.RunError` if the run has ended or receives no requests."""
    from headrace.run.cli.status import read_run_state
    from headrace.run.session.directory import read_status

    state = read_run_state(run_dir)
    if state["state"] != "running":
        raise RunError(
            f"the run in {run_dir} has ended ({state['state']}): it has no engines any more",
            remedy="continue it with --resume; engine.count says with how many engines",
        )
    status = read_status(run_dir)
    if not any(part["role"].partition("-")[0] == "engine" for part in state["components"]):
        raise RunError(
            f"the run in {run_dir} has no engines: it samples nothing",
            remedy="name the directory of a run of headrace train",
        )
    if status is None or not status.requests:
        raise RunError(
            f"the run in {run_dir} receives no requests: it is ending, it was started by an older version of headrace, "
            "or the path of its temporary directory is too long for a socket",
            remedy="look at headrace status; set TMPDIR to a shorter path when the run starts again",
        )
    return status.requests


def _send_request(
    run_dir: Path, address: str, request: ProgramRequest, *, wait_s: float, quiet: bool
) -> ChangeDone | None:
    """Send ``request`` to the run at the socket ``address``, show the messages about its progress unless ``quiet``, and
    return the last answer of the run; ``None`` if the last answer has not arrived after ``wait_s`` seconds.

    Raises :class:`~headrace.base.errors.ConfigError` if the run refuses the request, and
    :class:`~headrace.base.errors.RunError` if the run cannot be reached or ends.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(address)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            return _await_last_answer(_receive_answers(connection, wait_s), quiet=quiet)
        except PermissionError:
            raise _make_unreachable_error(run_dir, "only the user who has started it may change it") from None
        except OSError as error:
            raise _make_unreachable_error(run_dir, str(error.strerror or error)) from None


def _await_last_answer(answers: Iterator[ProgramAnswer], *, quiet: bool) -> ChangeDone | None:
    """Show the messages about progress among ``answers`` unless ``quiet``, and return the last answer; ``None`` if the
    last answer has not arrived. Raises :class:`~headrace.base.errors.ConfigError` if the run refuses the request."""
    for answer in answers:
        match answer:
            case ChangeProgress(text=text) if not quiet:
                console(stderr=True).print(readable(text), style="dim")
            case ChangeRefused(problem=problem, remedy=remedy):
                raise ConfigError(problem, remedy=remedy)
            case ChangeDone():
                return answer
    return None


def _make_unreachable_error(run_dir: Path, reason: str) -> RunError:
    """Return the error for the run in ``run_dir``, which cannot be reached for ``reason``."""
    return RunError(
        f"the run in {run_dir} cannot be asked: {reason}",
        remedy="ask as the user of the run, on the machine of its controller; look at headrace status",
    )


def _receive_answers(connection: socket.socket, wait_s: float) -> Iterator[ProgramAnswer]:
    """Yield the answers of the run, which arrive over ``connection``, until ``wait_s`` seconds have passed. Raises
    :class:`~headrace.base.errors.RunError` if the run ends before that, and :class:`~headrace.base.errors.DataError` if
    an answer cannot be decoded."""
    from headrace.base.clock import RealClock  # it imports asyncio, which the help of the program does without

    clock = RealClock()
    until_s = clock.now() + wait_s
    decoder = msgspec.json.Decoder(ProgramAnswer)
    buffered = b""
    while (left_s := until_s - clock.now()) > 0:
        connection.settimeout(left_s)
        try:
            received = connection.recv(1 << 16)
        except TimeoutError:
            return
        if not received:
            raise RunError("the run has ended meanwhile", remedy="look at headrace status")
        *lines, buffered = (buffered + received).split(b"\n")
        for line in lines:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise DataError(
                    f"the run's answer is not understood: {error}", remedy="use the same version of headrace as the run"
                ) from None


def _print_engines(statuses: Sequence[EngineStatus]) -> None:
    """Print a table of the engines with the given ``statuses``."""
    rows = table("", "engine", "pid", "state", "version", "device", "cores", "sequences", "restarts")
    for status in statuses:
        device = " on ".join(filter(None, [status.device, status.node]))
        version = "" if status.version < 0 else str(status.version)
        pid, cores = str(status.pid or ""), "" if status.threads is None else str(status.threads)
        numbers = (version, device, cores, str(status.sequences), str(status.restarts or ""))
        rows.add_row(readable(status.name), pid, readable(status.state), *numbers)
    console().print(rows)


VERB = Verb(run=engines, group=LOOK, place=25)
