"""The quickstart, walked as a newcomer would: from an empty directory to an answer over HTTP, exactly as written."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, read_blocks

PAGE = ROOT / "docs" / "quickstart.md"
PORT = 8765
START_S, STEP_S = 120.0, 600.0


def shell(text: str, home: Path) -> subprocess.Popen[str]:
    """A block in a shell that stops at the first command that fails; ``headrace`` and ``python`` are those of the
    environment that the tests run in."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=home,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def done(text: str, home: Path) -> str:
    """What a block printed."""
    process = shell(text, home)
    try:
        said, _ = process.communicate(timeout=STEP_S)
    finally:
        with_all_its_children(process, signal.SIGKILL)
    assert process.returncode == 0, f"{text}\n{said}"
    assert "Traceback" not in said
    return said


def with_all_its_children(process: subprocess.Popen[str], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


@contextmanager
def serving(text: str, home: Path) -> Iterator[None]:
    """A block whose last command keeps running, as its reader leaves it in another terminal; Ctrl-C at the end."""
    process = shell(text, home)
    assert process.stdout is not None
    try:
        said = next((line for line in process.stdout if line.startswith("serving")), "")
        assert f"http://127.0.0.1:{PORT}/v1" in said
        yield
        with_all_its_children(process, signal.SIGINT)
        process.communicate(timeout=START_S)
    finally:
        with_all_its_children(process, signal.SIGKILL)
        process.stdout.close()
        process.wait(timeout=START_S)


def is_install(block: Block) -> bool:
    """The one block that is read before the empty directory is entered: the tests run in what it makes."""
    return "make venv" in block.text


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_newcomer_gets_from_an_empty_directory_to_a_served_answer(tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"something listens on port {PORT} already")
    walk(read_blocks(PAGE), tmp_path, said := [])
    (evaluated,) = [each for each in said if "avg@2" in each]
    assert "640\n" in said[-1], evaluated
    assert '"text":"640"' in said[-1].replace(" ", "")
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 80)
    assert summary["eval_after"] > summary["eval_before"] + 0.05
    assert summary["max_token_age"] <= 1
    groups = summary["ledger"]["groups"]
    assert groups["submitted"] == groups["trained"] + sum(groups["dropped"].values()) + groups["in_flight"]


def walk(blocks: list[Block], home: Path, said: list[str]) -> None:
    """Block by block: a titled one is written to its file, the others are typed."""
    for number, block in enumerate(blocks):
        if block.title:
            (home / block.title).write_text(block.text)
        elif "headrace serve" in block.text:
            with serving(block.text, home):
                walk(blocks[number + 1 :], home, said)
            return
        elif not is_install(block):
            said.append(done(block.text, home))


def test_every_block_of_the_path_is_a_file_or_is_typed() -> None:
    path = read_blocks(PAGE)
    assert [block.language for block in path if not block.title] == ["sh"] * sum(not block.title for block in path)
    assert sum(is_install(block) for block in path) == 1
    written = {block.title for block in path if block.title}
    assert written == {"make_rows.py", "my_reward.py", "run.toml", "ask.py"}
