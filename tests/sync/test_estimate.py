"""What a version needs at least, in time and in room, and what is refused because of it before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.launch.child import Child
from headrace.run.cli.app import app
from headrace.sync import SyncConfig, estimate
from headrace.sync.config import RunPlaces
from headrace.sync.estimate import (
    PROBE_BYTES,
    estimate_version,
    measure_room,
    refuse_little_room,
    refuse_short_deadline,
)
from tests.run.session.runs import make_run, tiny_model


class Ticking:
    """A clock on which every look takes one more of ``seconds``, and the last of them again and again."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self._now = list(seconds), 0.0

    def now(self) -> float:
        self._now += self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        return self._now

    def wall(self) -> float:
        return self.now()


def test_a_version_is_hashed_at_the_best_rate_that_was_measured_and_passes_the_network_before() -> None:
    clock = Ticking(0.0, 0.9, 0.0, 0.2, 0.0, 0.5)
    time = estimate_version(SyncConfig(), 10 * PROBE_BYTES, clock)
    assert (time.hash_s, time.network_s, time.seconds) == (pytest.approx(2.0), None, pytest.approx(2.0))
    time = estimate_version(SyncConfig(transport="http", network_gb_s=0.5), 4e9, Ticking(0.01))
    assert time.network_s == pytest.approx(8.0)
    assert time.seconds == pytest.approx(8.0 + time.hash_s)


def test_a_rate_is_measured_here_that_a_processor_can_have() -> None:
    from headrace.base.clock import RealClock

    rate = 1e9 / estimate_version(SyncConfig(), 1e9, RealClock()).hash_s
    assert 1e8 < rate < 1e12


def test_only_a_deadline_that_was_set_and_cannot_hold_is_refused() -> None:
    clock = Ticking(0.0, PROBE_BYTES / 1e10, 0.0, PROBE_BYTES / 1e10, 0.0, PROBE_BYTES / 1e10)
    with pytest.raises(
        ConfigError, match=r"deadline_s=1 is too short: .* has 50,000,000,000 bytes and takes 5 s"
    ) as bad:
        refuse_short_deadline(SyncConfig(deadline_s=1), 50e9, clock)
    assert bad.value.remedy == "leave sync.deadline_s out, which then is 1,060 s"
    refuse_short_deadline(SyncConfig(deadline_s=1), 0, Ticking(0.01))
    refuse_short_deadline(SyncConfig(), 1e15, Ticking(1.0))
    slow = SyncConfig(transport="group", network_gb_s=0.001)
    refuse_short_deadline(slow, 1e12, Ticking(1.0))
    assert slow.longest_s(1e9) == 60 + 1000


def test_the_rate_of_a_network_that_is_not_used_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sync\.network_gb_s=1\.0 is set, and sync\.transport='shm' uses no network"):
        SyncConfig.model_validate({"network_gb_s": 1})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Path]]:
    """Let every folder have so much room; the folders that were looked at."""

    def of(num_bytes: int) -> list[Path]:
        seen: list[Path] = []

        def usage(folder: Path) -> Any:
            seen.append(folder)
            return SimpleNamespace(free=num_bytes)

        monkeypatch.setattr(estimate, "shutil", SimpleNamespace(disk_usage=usage))
        return seen

    return of


@pytest.mark.parametrize(
    ("sync", "copies"),
    [
        ({"transport": "shm"}, 2),
        ({"transport": "shm", "codec": "delta"}, 2),
        ({"transport": "files"}, 3),
        ({"transport": "files", "codec": "delta"}, 1),
        ({"transport": "http"}, 0),
        ({"transport": "group"}, 0),
        ({"transport": "files", "directory": "memory://weights"}, 0),
    ],
)
def test_room_is_needed_for_every_version_that_a_transport_keeps(
    tmp_path: Path, free: Callable[[int], list[Path]], sync: dict[str, Any], copies: int
) -> None:
    config = SyncConfig.model_validate(sync)
    places = RunPlaces(run_dir=tmp_path / "not" / "there", memory=tmp_path / "memory", private=tmp_path)
    seen = free(100 * copies)
    refuse_little_room(config, places, 100)
    assert seen == [tmp_path] * bool(copies)
    if copies:
        free(100 * copies - 1)
        with pytest.raises(ConfigError) as refused:
            refuse_little_room(config, places, 100)
        assert f"{copies} versions of 100 bytes in {tmp_path}" in refused.value.problem
        assert f"{100 * copies} bytes; {100 * copies - 1} are free" in refused.value.problem
        assert f"df -h {tmp_path}" in refused.value.remedy


def test_versions_that_a_killed_run_left_count_as_room_since_they_go_first(
    tmp_path: Path, free: Callable[[int], list[Path]]
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "v00000003-01234567.safetensors").write_bytes(b"x" * 150)
    free(160)
    room = measure_room(
        SyncConfig(transport="files"), RunPlaces(run_dir=tmp_path, memory=tmp_path, private=tmp_path), 100
    )
    assert room is not None
    assert (room.needed_bytes, room.free_bytes) == (300, 310)


def test_run_whose_shared_memory_is_too_small_ends_before_a_process_starts(
    tmp_path: Path, free: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_: Any) -> Child:
        raise AssertionError("a process was started")

    monkeypatch.setattr(Child, "start", start)
    free(1000)
    run_file = make_run(tmp_path / "run", tiny_model(tmp_path / "model"))
    done = CliRunner().invoke(app, ["train", str(run_file)])
    assert isinstance(done.exception, ConfigError)
    assert "sync.transport='shm' keeps 2 versions of" in done.exception.problem
    assert "1,000 are free there" in done.exception.problem
    assert "free that much there" in done.exception.remedy
