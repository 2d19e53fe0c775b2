"""``headrace status``: show the state of a run and of its processes.

The controller of a run writes its present state once a second to ``status.json`` in the run directory, the *status
file*, and at its end a summary. A run whose controller has ended without a summary was killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import psutil
import typer

from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import console, print_json, readable, starting, table


def status(
    run_dir: Path = typer.Argument(help="The run's directory."),
    as_json: bool = typer.Option(False, "--json", help="Print the state as JSON."),
) -> None:
    """Show every process of a run, its state and version, and what each part waits for."""
    starting(f"reading {run_dir}")
    state = read_run_state(run_dir)
    if as_json:
        print_json(state)
        return
    out = console()
    steps = f"step {state['steps_done']} of {state['steps_total']}"
    out.print(f"{readable(state['run_dir'])}: {readable(state['state'])}, {steps}", style="bold")
    rows = table("", "role", "pid", "state", "version", "device", "restarts")
    for part in state["components"]:
        version = "" if part["version"] is None else str(part["version"])
        restarts = str(part["restarts"] or "")
        device = " on ".join(filter(None, [part["device"], part["node"]]))
        role = f"{part['parent']}: {part['role']}" if part["parent"] else part["role"]
        rows.add_row(readable(role), str(part["pid"]), readable(part["state"]), version, device, restarts)
    out.print(rows)
    if state["state"] == "running":
        out.print(f"phase: {readable(state['phase'])}" + ("; loops:" if state["waits"] else ""))
        for line in state["waits"]:
            out.print(readable(line))
    for words in state["warnings"]:
        out.print(f"warning: {readable(words)}", style="yellow")
    if state["verdict"]:
        out.print(readable(state["verdict"]))
    for name, counts in state["rewards"].items():
        out.print(
            f"reward {readable(name)}: {counts['failed']:,} of {counts['calls']:,} calls failed; the first: "
            f"{readable(counts['first_cause'])}",
            style="yellow",
        )
    if state["cause"]:
        out.print(f"cause: {readable(state['cause'])}")


def _find_process_state(pid: int, recorded: str) -> str:
    """Return the state, in words, of the process ``pid`` on this machine: ended or stopped if the operating system
    reports this, else ``recorded``, the state in the run's status file.

    The status file may be out of date, since a controller that is stopped or killed does not renew it.
    """
    try:
        stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except (psutil.NoSuchProcess, FileNotFoundError):  # the second, if another process has received the same number
        return "ended"
    return f"stopped (SIGSTOP; kill -CONT {pid} lets it continue)" if stopped else recorded


def read_run_state(run_dir: Path) -> dict[str, Any]:
    """Return the state of the run in ``run_dir``, as ``headrace status --json`` prints it: the content of its status
    file, with the state of each process as the operating system reports it now, the run's state (``running``,
    ``killed``, or how it ended) and its verdict.

    Raises :class:`~headrace.base.errors.DataError` if the directory has no run, or a run that is still starting.
    """
    from headrace.base.errors import DataError
    from headrace.flow.ledger.opening import LOCK_FILE, is_locked
    from headrace.run.session.directory import read_status, read_summary

    last = read_status(run_dir)
    if last is None and is_locked(run_dir):
        raise DataError(
            f"{run_dir} has no status yet: {_describe_start(run_dir)}",
            remedy="let a stopped process continue; else look again in a few seconds",
        )
    if last is None and (run_dir / LOCK_FILE).exists():
        raise DataError(
            f"the run in {run_dir} ended before its parts had started",
            remedy="start it again with the same command and --resume; what its parts said is in logs/",
        )
    if last is None:
        raise DataError(f"{run_dir} holds no run", remedy="name the directory of a run that has started")
    summary = read_summary(run_dir)
    components = [
        part if part["node"] else {**part, "state": _find_process_state(part["pid"], part["state"])}
        for part in map(msgspec.structs.asdict, last.components)
    ]
    alive = components[0]["state"] != "ended"
    if not alive:  # the other processes end with the controller, also those on other machines
        components = [{**part, "state": "ended"} for part in components]
    ended = "killed" if summary is None else str(summary["status"])
    return {
        "run_dir": str(run_dir),
        "state": "running" if alive else ended,
        "cause": "" if summary is None or alive else str(summary["cause"]),
        "phase": last.phase,
        "steps_done": last.steps_done,
        "steps_total": last.steps_total,
        "version": last.version,
        "components": components,
        "waits": last.waits,
        "warnings": last.warnings,
        "verdict": _read_verdict(run_dir, summary),
        "rewards": {name: msgspec.to_builtins(counts) for name, counts in last.rewards.items()},
    }


def _describe_start(run_dir: Path) -> str:
    """Return in words why the run in ``run_dir``, which is starting, has no status yet: its controller or a child
    process of the controller is stopped, for example by Ctrl-Z, or else the parts of the run are starting."""
    from headrace.flow.ledger.opening import LOCK_FILE
    from headrace.launch.local_process import describe_halted

    content = (run_dir / LOCK_FILE).read_bytes()
    pid = int(content) if content.isdigit() else 0  # empty for a moment after the lock is taken, or damaged
    halted = describe_halted({pid})
    return f"its controller (pid {pid}) {halted[pid]}" if halted else "its parts are starting"


def _read_verdict(run_dir: Path, summary: dict[str, Any] | None) -> str:
    """Return the newest verdict on the bottleneck of the run in ``run_dir``, in words. The verdict comes from
    ``summary``, the summary of a run that has ended, or if that is ``None`` from the live state of the run; empty if
    there is no verdict yet."""
    from headrace.run.observe import LIVE_FILE

    if summary is not None:
        return str(summary.get("verdict") or "")
    try:
        tree = json.loads((run_dir / LIVE_FILE).read_bytes())
    except (OSError, ValueError):  # there is no live state yet, or the controller is replacing its file
        return ""
    return str(tree.get("verdict") or "") if isinstance(tree, dict) else ""


VERB = Verb(run=status, group=LOOK, place=20)
