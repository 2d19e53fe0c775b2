"""The jail where the kernel refuses overlays: forks are copies there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.wings.sandboxes import SandboxSpec, open_sandboxes
from headrace.wings.sandboxes.local import driver as local

HOST = """
import json, socket, sys
sys.path.insert(0, {folder!r})
import host

def refuse(layers):
    raise OSError("refused by this test")

host.root.probe_overlay = refuse
host.main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
"""


def test_forks_have_the_files_of_their_origin_and_leave_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "host.py"
    program.write_text(HOST.format(folder=str(local.HOST.parent)))
    monkeypatch.setattr(local, "HOST", program)

    async def body() -> None:
        async with await open_sandboxes("jail") as driver:
            assert "refused by this test" in driver.missing["overlay"]
            session = await driver.start(SandboxSpec())
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
