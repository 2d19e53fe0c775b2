"""A run whose processes take long to start: it says which of them it waits for, and what they do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from headrace.base.clock import VirtualClock, run_virtual
from headrace.launch.local import START_REPORT_S, report_start


def told(states: dict[str, list[str]]) -> list[tuple[float, str]]:
    """What is reported, and when, of processes whose states change at every report."""
    children: list[Any] = [
        SimpleNamespace(role=role, pid=7, state=each[0], peer=SimpleNamespace(halted=halted(each[0])))
        for role, each in states.items()
    ]
    lines: list[tuple[float, str]] = []

    def hear(text: str) -> None:
        lines.append((VirtualClock().now(), text))
        for child in children:
            child.state = states[child.role][len(lines)]

    async def main() -> None:
        reporting = asyncio.create_task(report_start(lambda: children, hear))
        await asyncio.sleep(3.5 * START_REPORT_S)
        reporting.cancel()

    run_virtual(main())
    return lines


def test_a_start_that_takes_long_names_every_three_seconds_what_it_waits_for() -> None:
    waits = told(
        {
            "engine": ["starting", "starting", "ready", "ready"],
            "learner": ["starting", "ready", "ready", "ready"],
            "scorer-0": ["starting", "ready", "ready", "ready"],
            "environment-0": ["ready", "ready", "ready", "ready"],
        }
    )
    assert waits == [
        (3.0, "starting for 3 s; engine, learner: load the model; scorer-0: import your code"),
        (6.0, "starting for 6 s; engine: load the model"),
        (9.0, "starting for 9 s; the engines get ready to take weights"),
    ]


def halted(state: str) -> str:
    """What the process's peer says of a state in which it is stopped."""
    return f"is {state}" if state.startswith("stopped") else ""


def test_a_stopped_process_is_said_to_be_stopped_and_not_to_load() -> None:
    waits = told({"engine": ["stopped (SIGSTOP)"] * 4, "learner": ["starting"] * 4})
    assert waits[0][1] == "starting for 3 s; engine (pid 7) is stopped (SIGSTOP); learner: load the model"
    waits = told({"engine": ["stopped (SIGSTOP)"] * 4, "learner": ["ready"] * 4})
    assert waits[0][1] == "starting for 3 s; engine (pid 7) is stopped (SIGSTOP)"
