"""The jail where the kernel refuses a guard: forks are copies without overlays, and there is no network without one of
its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.base.errors import EpisodeError
from headrace.wings.sandboxes import SandboxSpec, open_sandboxes
from headrace.wings.sandboxes.local import driver as local

HOST = """
import json, socket, sys
sys.path.insert(0, {folder!r})
import host

def refuse(layers):
    raise OSError("refused by this test")

def succeeds(attempt):
    return attempt is host._use_rights or attempt.args != (host.kernel.NEW_NET,)

{change}
host.main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
"""


def weaken(folder: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Have the drivers of a test start a host in which a guard is refused."""
    program = folder / "host.py"
    program.write_text(HOST.format(folder=str(local.HOST.parent), change=change))
    monkeypatch.setattr(local, "HOST", program)


def test_without_a_network_of_its_own_a_session_has_no_loopback_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ports would be those of the machine."""
    weaken(tmp_path, monkeypatch, "host.processes.succeeds = succeeds")

    async def body() -> None:
        async with await open_sandboxes("jail") as driver:
            assert "network" in driver.missing
            with pytest.raises(EpisodeError, match="a loopback network needs a namespace of its own") as refused:
                await driver.start(SandboxSpec(loopback=True))
            assert refused.value.reason == "session_start"
            await driver.start(SandboxSpec())

    asyncio.run(body())


def test_forks_have_the_files_of_their_origin_and_leave_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weaken(tmp_path, monkeypatch, "host.root.probe_overlay = refuse")

    async def body() -> None:
        async with await open_sandboxes("jail") as driver:
            assert "refused by this test" in driver.missing["overlay"]
            session = await driver.start(SandboxSpec())
            change = "echo x > /etc/ld.so.preload || mv /bin /bin2 || mv /etc /etc2 || rm -rf /dev || echo kept"
            assert (await session.run(change)).stdout == "kept\n"
            await session.write({"note": "one", "/app/run.sh": "#!/bin/sh\necho ran\n"})
            await session.run("chmod 600 note; ln -s note link; mkdir -p a/b; chmod 700 a; export X=1; cd a")
            look = "(ls -lnR --time-style=+%s /workspace /app | cut -d' ' -f1,2,5-; echo $X; cat /app/run.sh)"
            first = await session.run(look)
            snapshot = await session.snapshot()
            for _ in range(2):
                fork = await driver.fork(snapshot)
                assert fork.directory == "/workspace/a"
                assert (await fork.run(look)).stdout == first.stdout
                await fork.run("rm -r /workspace/* /app; touch /workspace/other")
                second = await fork.snapshot()
                again = await driver.fork(second)
                assert (await again.run("ls / | grep app; ls /workspace")).stdout == "other\n"
                await driver.release(second)
            assert (await session.run(look)).stdout == first.stdout
            await driver.release(snapshot)

    asyncio.run(body())


def test_paths_below_the_folder_of_temporary_files_can_be_shown_beside_overlays(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"headrace-shown-{tmp_path.name}"
    folder.mkdir(exist_ok=True)
    (folder / "note").write_text("shown")

    async def body() -> None:
        async with await open_sandboxes("jail", [str(folder)]) as driver:
            assert "overlay" not in driver.missing
            session = await driver.start(SandboxSpec())
            assert (await session.run(f"cat {folder}/note")).stdout == "shown"

    try:
        asyncio.run(body())
    finally:
        (folder / "note").unlink()
        folder.rmdir()
