"""Tools of MCP servers, and environments that were written for TRL."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.base.errors import EnvError
from headrace.rollout import EpisodeLimits
from tests.wings.bridges.scripted import attempts

SERVER = '''
    from mcp.server import MCPServer

    server = MCPServer("sums")
    calls = 0

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def count() -> int:
        """How often it was called in this life."""
        global calls
        calls += 1
        return calls

    @server.tool()
    def fail() -> str:
        """Always fails."""
        raise ValueError("no such luck")

    server.run(transport="stdio")
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "tools.py"
    path.write_text(textwrap.dedent(SERVER))
    return f"mcp/{sys.executable} {path}"


def calling(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_tools_of_a_server_are_offered_and_called(server: str) -> None:
    def says(read: str) -> str:
        return read.rsplit("tool\n", 1)[1].split("<", 1)[0] if "tool\n" in read else calling("add", a=17, b=25)

    (summed,) = attempts(server, [{"prompt": "what is 17+25?"}], says, system="use the tools")
    assert summed.ended.reward is None  # the run's reward function is to say
    assert "tools: add count fail" in summed.read[0]
    assert "use the tools" in summed.read[0]
    assert [turn.author for turn in summed.turns] == ["task", "policy", "tool", "policy"]
    assert "42" in summed.read[1]


def test_every_episode_has_a_server_of_its_own(server: str) -> None:
    def says(read: str) -> str:
        return "done" if read.count("tool\n") == 2 else calling("count")

    both = attempts(server, [{"prompt": "a"}, {"prompt": "b"}], says)
    assert ["tool\n2" in attempt.read[-1] for attempt in both] == [True, True]
    assert not any("tool\n3" in attempt.read[-1] for attempt in both)


def test_what_goes_wrong_with_a_call_is_its_answer(server: str) -> None:
    asked = iter([calling("fail"), calling("add", a="x", b=1), calling("nothing"), "well"])
    (attempt,) = attempts(server, [{"prompt": "a"}], lambda _: next(asked))
    assert "Error executing tool fail" in attempt.read[1]
    assert len(attempt.read) == 4


def test_a_budget_ends_the_calls(server: str) -> None:
    (attempt,) = attempts(server, [{"prompt": "a"}], lambda _: calling("count"), limits=EpisodeLimits(max_turns=3))
    assert len(attempt.read) == 3
    assert attempt.ended.reward is None


def test_a_server_that_is_not_there_is_told_before_anything_starts() -> None:
    with pytest.raises(EnvError, match="no program 'no-such-server'"):
        attempts("mcp/no-such-server --now", [], str)
    with pytest.raises(EnvError, match=r"env\.options\.sistem is unknown"):
        attempts("mcp/http://127.0.0.1:1/mcp", [], str, sistem="x")


TRL = '''
    class Doors:
        """As TRL's environment_factory wants it."""

        def __init__(self, doors: int = 3):
            self.doors = doors

        def reset(self, prize: int, **row) -> str:
            self.prize, self.opened = prize, []
            return f" There are {self.doors} doors."

        def open_door(self, number: int) -> str:
            """Open a door.

            Args:
                number: Which one.

            Returns:
                What is behind it.
            """
            self.opened.append(number)
            return "a car" if number == self.prize else "a goat"

        def get_reward(self) -> float:
            return float(self.prize in self.opened) / len(self.opened)

    class Patient(Doors):
        async def get_reward(self) -> float:
            return 0.25

    class Quiet:
        def reset(self, **row):
            return None

    class Broken:
        pass
'''


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "doors.py"
    path.write_text(textwrap.dedent(TRL))
    return path


def test_the_methods_of_a_trl_environment_are_tools_and_it_says_what_was_earned(doors: Path) -> None:
    def says(read: str) -> str:
        return "found it" if "a car" in read else calling("open_door", number=read.count("a goat"))

    rows = [{"prompt": [{"role": "user", "content": "Find the car."}], "prize": prize} for prize in (0, 1)]
    one, two = attempts(f"trl/{doors}:Doors", rows, says, doors=5)
    assert (one.ended.reward, two.ended.reward) == (1.0, 0.5)
    assert "Find the car. There are 5 doors." in one.read[0]
    assert "tools: open_door as" in one.read[0]


def test_a_trl_environment_may_wait_for_its_reward_or_have_none(doors: Path) -> None:
    (patient,) = attempts(f"trl/{doors}:Patient", [{"prompt": "a", "prize": 1}], lambda _: "b")
    (quiet,) = attempts(f"trl/{doors}:Quiet", [{"prompt": "a"}], lambda _: "b")
    assert (patient.ended.reward, quiet.ended.reward) == (0.25, None)
    with pytest.raises(EnvError, match="without reset"):
        attempts(f"trl/{doors}:Broken", [], str)
