"""Every member of process groups is killed at every broadcast: no engine ever holds another version than it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from headrace.base.errors import ComponentDied
from headrace.sync.config import Route
from headrace.wings.bench.engine_peers import PeerProcess, open_worker
from headrace.wings.bench.sync_group import GroupMembers, call_all
from headrace.wings.bench.sync_worker import SyncPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PLAN = SyncPlan(shapes={"a": (64, 32), "b": (7,), "c": (48, 40), "d": (2, 2)}, dtype="float32")
WORKER = "tests.sync.mortal_member"
NUM_RANKS = NUM_ENGINES = 2
MOST = 9
"""One more than the broadcasts that a rank makes for a version, or that an engine takes part in for one rank."""


class Line:
    """Two ranks and two engines, of which some die and are replaced."""

    def __init__(self, directory: Path, codec: str, stack: ExitStack) -> None:
        self._path = directory / "plan.json"
        self._path.write_bytes(msgspec.json.encode(PLAN))
        self.files = directory / "weights"
        self._route = Route(transport="group", codec=codec, deadline_s=10.0, fallback=str(self.files))
        self._stack = stack
        self.version = -1
        self.ranks = [self._start(f"rank-{n}") for n in range(NUM_RANKS)]
        self.engines = [self._start(f"engine-{n}") for n in range(NUM_ENGINES)]
        self.members = GroupMembers(ranks=self.ranks, engines=self.engines)
        self.members.open(self._route)
        self.sums: dict[int, dict[str, float]] = {}
        """The sums of the weights of each version."""

    def _start(self, side: str) -> PeerProcess:
        return self._stack.enter_context(open_worker(side, self._path, 1, module=WORKER))

    def take(self) -> None:
        """Let the ranks make the next version."""
        self.version += 1
        self.members.copy_weights(self.version)
        parts = [answer["sums"] for answer in call_all([(rank, {"do": "weights"}) for rank in self.ranks])]
        self.sums[self.version] = {name: sum(part[name] for part in parts) for name in PLAN.shapes}

    def send(self) -> None:
        """Bring the version to all engines, which are there and healthy, and let them commit it."""
        errors = self.members.send(self.version)
        if any(errors):
            errors = self.members.send(self.version, again=True)
        assert errors == ["", ""]
        self.members.commit(self.version)

    def assert_held(self, allowed: set[int]) -> None:
        """Every engine that is there holds every bit of the version that it says it has, which is an allowed one."""
        for engine in self.engines:
            held = engine.call({"do": "sums"})
            assert held["version"] in allowed
            if held["version"] >= 0:
                assert held["sums"] == pytest.approx(self.sums[held["version"]], rel=1e-12)

    def kill(self, victims: list[PeerProcess], index: int, after: int, replace: Callable[[], None]) -> bool:
        """Send a version of which the victim dies at one of its broadcasts, replace it, and bring that version or, if
        the ranks are gone, the next one to all. Return whether the victim died."""
        self.take()
        victims[index].call({"do": "die", "after": after})
        before = self.version - 1
        try:
            errors = self.members.send(self.version)
        except ComponentDied:
            errors = ["", "dead"]
        died = victims[index]._process.wait(0.5) != 0 if any(errors) else victims[index]._process.poll() is not None
        alive = [engine for engine in self.engines if engine._process.poll() is None]
        for engine in alive:
            held = engine.call({"do": "sums"})
            assert held["version"] == before
            assert held["sums"] == pytest.approx(self.sums[before], rel=1e-12)
        if not died:
            victims[index].call({"do": "die", "after": 1 << 30})
            self.members.commit(self.version)
            return False
        replace()
        return True

    def replace_engine(self, index: int) -> None:
        self.engines[index] = self._start(f"engine-{index}")
        request = {"do": "open", "route": msgspec.to_builtins(self._route)}
        self.members.to[index] = self.engines[index].call(request)["address"]
        assert self.members.send(self.version, again=True) == ["", ""]
        self.members.commit(self.version)

    def replace_ranks(self) -> None:
        """All ranks of a learner end with one; the new ones go on from the version that the engines have."""
        for index, rank in enumerate(self.ranks):
            rank._process.kill()
            self.ranks[index] = self._start(f"rank-{index}")
        request = {"do": "open", "route": msgspec.to_builtins(self._route)}
        shared = self.ranks[0].call(request)["shared"]
        self.ranks[1].call({**request, "shared": shared})
        self.take()
        self.send()


@pytest.fixture(params=["full", "delta"])
def line(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Line]:
    with ExitStack() as stack:
        yield Line(tmp_path, request.param, stack)


@pytest.mark.parametrize("role", ["rank-0", "rank-1", "engine-0", "engine-1"])
def test_member_killed_at_any_broadcast_leaves_every_engine_with_a_whole_version(line: Line, role: str) -> None:
    line.take()
    line.send()
    kind, _, number = role.partition("-")
    deaths = 0
    for after in range(MOST if kind == "rank" else 2 * MOST):
        if kind == "rank":
            deaths += line.kill(line.ranks, int(number), after, line.replace_ranks)
        else:
            deaths += line.kill(line.engines, int(number), after, lambda: line.replace_engine(int(number)))
        line.assert_held({line.version})
        line.take()
        line.send()
        line.assert_held({line.version})
    assert deaths >= 5
    assert not line.files.exists(), "a death is healed by new groups, and not by files"
