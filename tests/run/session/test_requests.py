"""What a run answers to the requests of its user, and what ``headrace engines`` makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.base.types.messages.program import EngineStatus
from headrace.flow.ledger.opening import LOCK_FILE
from headrace.launch.leases import Lease
from headrace.launch.order import ComponentStatus, OnEngineChange, OnProgress
from headrace.run.cli.app import main
from headrace.run.session.directory import STATUS_FILE, Status, find_final_num_engines, write_json, write_sealed
from headrace.run.session.requests import MAX_LINE_BYTES, serve_requests

DEADLINE_S = 20.0


def status_of(name: str) -> EngineStatus:
    return EngineStatus(
        name=name, pid=7, state="serving", version=3, device="cpu", threads=2, sequences=5, restarts=0, node=""
    )


class Changes:
    """The engines of a run that is only played."""

    def __init__(self) -> None:
        self.names = ["engine"]
        self.asked: list[Any] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    @property
    def num_engines(self) -> int:
        return len(self.names)

    def send_changes_to(self, on_change: OnEngineChange) -> None:
        pass

    def status(self) -> tuple[EngineStatus, ...]:
        return tuple(map(status_of, self.names))

    async def add(self, num: int, on_progress: OnProgress) -> tuple[str, ...]:
        self.asked.append(num)
        if num == 3:
            raise KeyError("a GPU that nobody knows")
        if num > 3:
            raise ConfigError("no GPU is free", remedy="remove one")
        on_progress("engine-1 starts on cpu")
        await self.may_end.wait()
        for _ in range(num):
            self.names.append(f"engine-{len(self.names)}")
        return tuple(self.names[-num:])

    async def remove(self, name: str, num: int, drain_s: float, on_progress: OnProgress) -> tuple[str, ...]:
        self.asked.append((name, num, drain_s))
        return (self.names.pop(),)


def answered(directory: Path, talk: Callable[[Changes, str], Coroutine[Any, Any, Any]]) -> Any:
    """What ``talk`` returns, with a run that answers at a socket."""

    async def run() -> Any:
        changes = Changes()
        async with serve_requests(directory, changes) as address:
            async with asyncio.timeout(DEADLINE_S):
                return await talk(changes, address)

    return asyncio.run(run())


async def ask(address: str, line: bytes) -> list[dict[str, Any]]:
    """Everything that the run answers to one line."""
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(line)
    answers = [json.loads(answer) async for answer in reader]
    writer.close()
    return answers


def test_request_is_answered_with_news_and_the_engines(tmp_path: Path) -> None:
    async def talk(changes: Changes, address: str) -> None:
        listed = await ask(address, b'{"type": "ListEngines"}\n')
        assert [each["name"] for each in listed[0]["engines"]] == ["engine"]
        news, done = await ask(address, b'{"type": "AddEngines", "count": 2}\n')
        assert news == {"type": "ChangeProgress", "text": "engine-1 starts on cpu"}
        assert done["changed"] == ["engine-1", "engine-2"]
        assert len(done["engines"]) == 3
        (done,) = await ask(address, b'{"type": "RemoveEngines", "drain_s": 2.5}\n')
        assert done["changed"] == ["engine-2"]
        assert changes.asked == [2, ("", 1, 2.5)]

    answered(tmp_path, talk)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"type": "AddEngines", "count": 4}\n', "no GPU is free"),
        (b'{"type": "AddEngines", "count": 3}\n', "the change failed: KeyError: 'a GPU that nobody knows'"),
        (b'{"type": "AddEngines", "count": 0}\n', "0 engines cannot be added"),
        (b'{"type": "RemoveEngines", "count": 1, "drain_s": -1}\n', "1 engines cannot be removed, with -1 s"),
        (b'{"type": "Shutdown"}\n', "does not understand the request: Invalid value 'Shutdown'"),
        (b"\x80\x04\x95\n", "does not understand the request"),
        (b"[" * 100_000 + b"\n", "does not understand the request"),
        (b"x" * (MAX_LINE_BYTES + 9), "does not understand the request"),
    ],
    ids=["refused", "foreign error", "none", "negative time", "another message", "pickle", "deep", "too long"],
)
def test_request_that_cannot_be_carried_out_is_refused_and_the_run_goes_on(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    async def talk(changes: Changes, address: str) -> None:
        (refused,) = await ask(address, line)
        assert refused["type"] == "ChangeRefused"
        assert problem in refused["problem"]
        assert refused["remedy"]
        assert len(await ask(address, b'{"type": "ListEngines"}\n')) == 1

    answered(tmp_path, talk)


def test_change_goes_on_when_the_program_that_requested_it_has_ended(tmp_path: Path) -> None:
    async def talk(changes: Changes, address: str) -> None:
        changes.may_end.clear()
        reader, writer = await asyncio.open_unix_connection(address)
        writer.write(b'{"type": "AddEngines", "count": 1}\n')
        await reader.readline()
        writer.close()
        await writer.wait_closed()
        changes.may_end.set()
        while True:
            (listed,) = await ask(address, b'{"type": "ListEngines"}\n')
            if len(listed["engines"]) == 2:
                return

    answered(tmp_path, talk)


def test_change_that_is_under_way_is_given_up_at_the_end_of_the_run(tmp_path: Path) -> None:
    async def run() -> None:
        changes = Changes()
        changes.may_end.clear()
        async with serve_requests(tmp_path, changes) as address:
            reader, writer = await asyncio.open_unix_connection(address)
            writer.write(b'{"type": "AddEngines", "count": 1}\n')
            await reader.readline()
        assert await reader.read() == b""
        writer.close()
        assert changes.names == ["engine"]

    asyncio.run(run())
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(asyncio.open_unix_connection(str(tmp_path / "requests")))


def test_path_that_is_too_long_for_a_socket_leaves_the_run_without_requests(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()

    async def talk(_: Changes, address: str) -> str:
        return address

    assert answered(deep, talk) == ""


def made_run(
    run_dir: Path,
    *,
    requests: str = "",
    pid: int | None = None,
    roles: tuple[str, ...] = ("engine",),
    num_engines: int | None = None,
) -> Path:
    """The directory of a run whose controller is this process."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / LOCK_FILE).touch()
    parts = [
        ComponentStatus(role=role, pid=os.getpid() if pid is None else pid, state="ready", version=None)
        for role in ("controller", *roles)
    ]
    status = Status(
        phase="training",
        steps_done=1,
        steps_total=9,
        version=1,
        written_s=0.0,
        components=parts,
        waits=[],
        requests=requests,
        engines=num_engines,
    )
    write_json(run_dir / STATUS_FILE, status)
    return run_dir


def engines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    """The exit code and what the program has printed on both outputs."""
    monkeypatch.setattr("sys.argv", ["headrace", "engines", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    code = ended.value.code
    return (int(code) if code is not None else 0), printed.out, printed.err


def test_verb_shows_the_engines_the_news_and_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def talk(changes: Changes, address: str) -> None:
        run_dir = made_run(tmp_path / "run", requests=address)
        code, out, err = await asyncio.to_thread(engines, monkeypatch, capsys, run_dir)
        headings, row = out.splitlines()
        assert (code, headings.split()[0], headings.split()[-1]) == (0, "engine", "restarts")
        assert row.split() == ["engine", "7", "serving", "3", "cpu", "2", "5"]
        code, out, err = await asyncio.to_thread(engines, monkeypatch, capsys, run_dir, "add", "2")
        assert (code, len(out.splitlines())) == (0, 4)
        assert "engine-1 starts on cpu" in err
        code, out, err = await asyncio.to_thread(engines, monkeypatch, capsys, run_dir, "remove", "engine-2", "--json")
        assert json.loads(out)["changed"] == ["engine-2"]
        assert json.loads(out)["state"] == "done"
        changes.may_end.clear()
        code, out, err = await asyncio.to_thread(engines, monkeypatch, capsys, run_dir, "add", "--wait", "0.2")
        assert (code, out) == (0, f"under way after 0.2 s: headrace engines {run_dir} shows it\n")
        code, out, err = await asyncio.to_thread(engines, monkeypatch, capsys, run_dir, "add", "9")
        assert code == 1
        assert err.endswith("error: no GPU is free\nremedy: remove one\n")
        assert changes.asked == [2, ("engine-2", 1, 30.0), 1, 9]

    answered(tmp_path, talk)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("grow",), "'grow' is not something to do with engines"),
        (("add", "many"), "'many' is not a number of engines to add"),
        (("remove", "0"), "'0' is not a number of engines to remove"),
    ],
)
def test_verb_refuses_what_it_cannot_ask_for(
    words: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = engines(monkeypatch, capsys, tmp_path, *words)
    assert code == 1
    assert f"error: {problem}" in err


def test_verb_refuses_runs_that_it_cannot_reach_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(run_dir: Path) -> str:
        code, out, err = engines(monkeypatch, capsys, run_dir, "add")
        assert (code, out) == (1, "")
        return err

    assert "holds no run" in refusal(tmp_path)
    assert "has ended (killed): it has no engines any more" in refusal(made_run(tmp_path / "ended", pid=2**22 - 1))
    assert "receives no requests: it is ending" in refusal(made_run(tmp_path / "ending"))
    assert "has no engines: it samples nothing" in refusal(made_run(tmp_path / "sft", roles=("learner",)))
    gone = made_run(tmp_path / "gone", requests=str(tmp_path / "no.socket"))
    assert f"the run in {gone} cannot be asked: No such file or directory" in refusal(gone)


def test_only_the_user_of_the_run_can_reach_the_socket(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lease = Lease.create_directory(tmp_path)
        stack.callback(lease.end)

        async def talk(_: Changes, address: str) -> None:
            directory = Path(address).parent
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700

        answered(lease.path, talk)


def test_number_of_engines_that_a_run_had_is_known_when_it_is_resumed(tmp_path: Path) -> None:
    assert find_final_num_engines(tmp_path) is None
    run_dir = made_run(tmp_path / "run", roles=("engine", "engine-1", "learner"))
    assert find_final_num_engines(run_dir) is None, "its settings are not known"
    write_sealed(run_dir / "config.json", {"engine": {"count": 2}})
    assert find_final_num_engines(run_dir) is None
    write_sealed(run_dir / "config.json", {"engine": {"count": 1}})
    assert find_final_num_engines(run_dir) == 2
    made_run(run_dir, roles=("engine", "learner"), num_engines=3)
    assert find_final_num_engines(run_dir) == 3, "one was being started again, and one was not added yet"
