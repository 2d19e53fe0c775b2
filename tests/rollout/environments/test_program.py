"""Programs as episodes: what they are told, what they say, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import EnvError, EpisodeError
from headrace.rollout.environments import program
from headrace.rollout.environments.program import Program, refuse_missing_script
from headrace.rollout.scoring.sandbox import processes, user_namespace

ROW = {"prompt": "2+2", "answer": 4}


def run(source: str, row: Mapping[str, Any] = ROW, **variables: str) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(30):
            told = await Program([sys.executable, "-c", source]).run(row, variables)
            return told.get("reward")

    return asyncio.run(main())


def test_a_program_gets_its_task_and_its_variables_in_a_directory_of_its_own() -> None:
    source = """
import json, os
task = json.load(open(os.environ["HEADRACE_TASK"]))
assert os.environ["OPENAI_BASE_URL"] == "http://here/v1", os.environ
assert "HEADRACE_PART_OF_A_RUN" not in os.environ
assert os.environ["NO_PROXY"].startswith("127.0.0.1,localhost,here")
open("left_behind", "w").write("x")
print("some words")
print(json.dumps({"reward": task["answer"] / 8, "where": os.getcwd()}))
"""
    os.environ["HEADRACE_PART_OF_A_RUN"] = "1"
    try:
        assert run(source, OPENAI_BASE_URL="http://here/v1") == 0.5
    finally:
        del os.environ["HEADRACE_PART_OF_A_RUN"]


SPY = """
import json, os, pathlib, time
key, met = os.environ["OPENAI_API_KEY"], pathlib.Path(os.environ["MEET"])
met.joinpath(key).write_text(str(os.getpid()))
while len(list(met.iterdir())) < 2:
    time.sleep(0.01)
seen = set()
for name in os.listdir("/proc"):
    if name.isdecimal() and int(name) != os.getpid():
        try:
            seen.add(open(f"/proc/{name}/environ").read())
        except OSError:
            pass
met.joinpath(key + "-done").touch()
while len(list(met.glob("*-done"))) < 2:
    time.sleep(0.01)
print(json.dumps({"reward": sum("OPENAI_API_KEY=sk-" in each for each in seen)}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="user namespaces are of Linux")
def test_a_program_cannot_read_the_keys_of_other_episodes(tmp_path: Path) -> None:
    async def main(*, own_namespace: bool) -> list[Any]:
        program = Program([sys.executable, "-c", SPY], own_namespace=own_namespace)
        met = tmp_path / str(own_namespace)
        met.mkdir()
        keys = [{"OPENAI_API_KEY": key, "MEET": str(met)} for key in ("sk-one", "sk-two")]
        async with asyncio.timeout(30):
            return [said.get("reward") for said in await asyncio.gather(*(program.run(ROW, key) for key in keys))]

    assert asyncio.run(main(own_namespace=False)) == [1, 1], "or the test could not fail"
    if not user_namespaces():
        pytest.skip("this kernel refuses user namespaces")
    assert asyncio.run(main(own_namespace=True)) == [0, 0]


REFUSED = "import os, sys; sys.stdout.write('[Errno 1] unshare: Operation not permitted\\n')"


def test_a_machine_without_user_namespaces_is_warned_of_and_one_with_them_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = (sys.executable, "-I", "-S", "-B", user_namespace.__file__)
    if sys.platform == "linux" and user_namespaces():
        assert program.find_namespace_warnings() == []
        assert subprocess.run(refused, capture_output=True, text=True, check=True).stdout == ""
    monkeypatch.setattr(program, "_NAMESPACE_COMMAND", (sys.executable, "-c", REFUSED))
    (warning,) = program.find_namespace_warnings()
    assert "get no user namespaces of their own here ([Errno 1] unshare: Operation not permitted)" in warning
    assert "env.own_namespace = false" in warning
    assert program.find_namespace_warnings(own_namespace=False) == []
    monkeypatch.setattr(program, "_NAMESPACE_COMMAND", ())
    assert f"({sys.platform} has none)" in program.find_namespace_warnings()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="user namespaces are of Linux")
def test_a_refused_namespace_is_said_in_the_words_of_the_kernel() -> None:
    if not user_namespaces():
        pytest.skip("this kernel refuses user namespaces")
    # within one namespace the kernel is told to allow no further ones
    inside = (
        "import subprocess, sys; open('/proc/sys/user/max_user_namespaces', 'w').write('0'); "
        f"inner = [sys.executable, '-I', '-S', '-B', {user_namespace.__file__!r}]; "
        "print(subprocess.run(inner, capture_output=True).stdout)"
    )
    command = [sys.executable, "-I", "-S", "-B", user_namespace.__file__, sys.executable, "-c", inside]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "OSError" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("this user may not lower the limit")
    assert "No space left on device" in done.stdout or "Errno" in done.stdout, done


def user_namespaces() -> bool:
    return processes.succeeds(user_namespace.enter)


def test_a_program_has_the_same_user_group_and_files_in_its_namespace(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    source = f"""
import json, os
ids = [os.getuid(), os.getgid(), os.stat({str(tmp_path / "mine")!r}).st_uid]
open({str(tmp_path / "mine")!r}, "a").write("y")
print(json.dumps({{"reward": ids}}))
"""
    assert run(source) == [os.getuid(), os.getgid(), os.getuid()]
    assert (tmp_path / "mine").read_text() == "xy"


def test_a_file_that_cannot_be_run_fails_its_episode_in_words(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"\x00\x01 no program")
    (tmp_path / "program").chmod(0o755)
    with pytest.raises(EpisodeError, match=r"it cannot be started: .*Exec format error"):
        asyncio.run(Program([str(tmp_path / "program")]).run(ROW, {}))


def test_a_reward_is_what_the_last_line_says_and_nothing_else() -> None:
    assert run("print('{\"reward\": 1}\\n\\n')") == 1
    assert run("print('{\"reward\": 1}\\nthat was it')") is None
    assert run('print("[1]")') is None
    assert run('print("[" * 100000)') is None
    assert run("pass") is None
    assert run('print(\'{"reward": "much"}\')') == "much"  # refused where rewards are read


def test_a_program_that_fails_fails_its_episode_in_words() -> None:
    with pytest.raises(EpisodeError, match=r"ended with exit code 3: oh\\x1b no") as failed:
        run('import sys; print(\'{"reward": 1}\'); sys.stderr.write("oh\\x1b no"); sys.exit(3)')
    assert failed.value.reason == "program_failed"
    with pytest.raises(EpisodeError, match="was killed by Killed"):
        run("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(EnvError, match="there is no program '/no/such/program'"):
        Program(["/no/such/program"])


@pytest.mark.parametrize(
    "command",
    [
        ("bash", "-c", "cd agent && python main.py"),
        ("sh", "-lc", "exec python main.py"),
        ("python", "-c", "import runpy  # as main.py"),
        ("python", "-W", "error.py", "agent.py"),
        ("bash", "on_the_path.sh"),
        ("python", "-m", "agent", "main.py"),
        ("python",),
    ],
)
def test_words_that_name_no_script_are_not_looked_for(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "on_the_path.sh").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    refuse_missing_script(command)


def test_only_the_end_of_what_a_program_writes_is_kept() -> None:
    source = """
import sys
for _ in range(64):
    sys.stdout.write("x" * 2**18 + "\\n")
    sys.stderr.write("y" * 2**18)
print('{"reward": 2}')
"""
    assert run(source) == 2


def test_nothing_that_a_program_has_started_outlives_it(tmp_path: Path) -> None:
    source = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print('{{"reward": 3}}')
"""
    assert run(source) == 3  # though the child holds the pipes open
    assert is_gone(pid_in(tmp_path))


def test_a_program_whose_episode_is_cut_off_ends_at_once(tmp_path: Path) -> None:
    source = f'import os, time; open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid())); time.sleep(600)'

    async def main() -> None:
        async with asyncio.timeout(30):
            running = asyncio.ensure_future(Program([sys.executable, "-c", source]).run(ROW, {}))
            await asyncio.to_thread(pid_in, tmp_path)
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()

    asyncio.run(main())
    assert is_gone(pid_in(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends orphans")
def test_a_program_ends_with_the_worker_that_was_killed(tmp_path: Path) -> None:
    program = f"""
import fcntl, os, time
names = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{name}}")]
lifelines = [int(name) for name in names if int(name) > 2]
while not any(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ASYNC for number in lifelines):
    time.sleep(0.001)  # its worker has just started it
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    worker = f"""
import asyncio
from headrace.rollout.environments import program
from headrace.rollout.environments.program import Program
from headrace.rollout.scoring.sandbox import user_namespace, processes
asyncio.run(Program([{sys.executable!r}, "-c", {program!r}]).run({{}}, {{}}))
"""
    process = subprocess.Popen([sys.executable, "-c", worker])
    pid_in(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert is_gone(pid_in(tmp_path))


def test_many_programs_run_side_by_side() -> None:
    async def main() -> list[Any]:
        async with asyncio.timeout(60):
            program = Program(["/bin/sh", "-c", 'cat "$HEADRACE_TASK"'])
            told = await asyncio.gather(*(program.run({"reward": number}, {}) for number in range(50)))
            return [each["reward"] for each in told]

    assert asyncio.run(main()) == list(range(50))


def pid_in(directory: Path) -> int:
    """What a program writes there about itself, once it has."""
    while True:
        file = directory / "pid"
        if file.exists() and (written := file.read_text()):
            return int(written)


def is_gone(pid: int) -> bool:
    """Until it has ended; a test that waits for ever has failed."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
