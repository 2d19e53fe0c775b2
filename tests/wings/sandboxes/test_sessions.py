"""The contract of a session, which every driver keeps."""

from __future__ import annotations

import asyncio
import math
import signal
from dataclasses import replace

import pytest

from headrace.base.errors import ConfigError, EpisodeError
from headrace.rollout.scoring.sandbox import Reason, SandboxLimits
from headrace.wings.sandboxes import LIMITS, SandboxSession, SandboxSpec, SessionEnded, open_sandboxes
from tests.wings.sandboxes.conftest import Sandboxes, any_sandboxes

MIB = 1 << 20
sandboxes = any_sandboxes


def test_a_command_gives_its_outputs_and_its_exit_code(sandboxes: Sandboxes, session: SandboxSession) -> None:
    done = sandboxes(session.run("cat; echo aside >&2; exit 3", stdin=b"in"))
    assert (done.stdout, done.stderr, done.exit_code, done.reason) == ("in", "aside\n", 3, Reason.EXITED)


def test_directory_and_exported_variables_are_those_of_the_command_before(
    sandboxes: Sandboxes, session: SandboxSession
) -> None:
    sandboxes(session.run("mkdir -p a/b && cd a && export WORD='two\nlines' && hidden=1; false"))
    done = sandboxes(session.run('pwd; echo "$WORD$hidden"; cd b; unset WORD; exit 0'))
    assert done.stdout == "/workspace/a\ntwo\nlines\n"
    assert sandboxes(session.run('pwd; echo "[$WORD]"')).stdout == "/workspace/a/b\n[]\n"


def test_a_shell_that_cannot_tell_its_state_leaves_the_one_before(
    sandboxes: Sandboxes, session: SandboxSession
) -> None:
    sandboxes(session.run("export KEPT=1; cd /tmp"))
    for command in ("cd /; exec true", "cd /; kill -9 $$", "cd /; head -c 99 /dev/zero >&99; exec true"):
        sandboxes(session.run(command))
    assert sandboxes(session.run("pwd; echo $KEPT")).stdout == "/tmp\n1\n"


def test_a_directory_that_has_gone_is_replaced_by_the_nearest_above(
    sandboxes: Sandboxes, session: SandboxSession
) -> None:
    sandboxes(session.run("mkdir -p a/b/c; cd a/b/c"))
    sandboxes(session.run("rm -r ../../b"))
    assert sandboxes(session.run("pwd")).stdout == "/workspace/a\n"
    sandboxes(session.run("mkdir shut; cd shut; chmod 000 ."))
    assert sandboxes(session.run("pwd")).stdout == "/workspace/a\n"


def test_files_are_written_and_read_as_they_are(sandboxes: Sandboxes, session: SandboxSession) -> None:
    data = bytes(range(256)) * 5000
    sandboxes(session.write({"deep/er/data": data, "/srv/x y": "text", "run.sh": "#!/bin/sh\necho ran\n"}))
    assert sandboxes(session.read("deep/er/data", 2 * MIB)) == data
    assert sandboxes(session.read("/srv/x y")) == b"text"
    assert sandboxes(session.run("./run.sh; rm run.sh deep/er/data; ls deep/er")).stdout == "ran\n"


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing", "No such file"), ("/tmp/shut", "Permission denied"), ("/dev/zero", "output")],
)
def test_a_file_that_cannot_be_read_is_told_by_name(
    sandboxes: Sandboxes, long_session: SandboxSession, path: str, words: str
) -> None:
    sandboxes(long_session.run("touch /tmp/shut; chmod 000 /tmp/shut"))
    with pytest.raises(EpisodeError, match=words):
        sandboxes(long_session.read(path))


@pytest.mark.parametrize("path", ["/usr/bin/new", "/proc/new", "/etc/ld.so.cache/x"])
def test_a_file_that_cannot_be_written_is_told_by_name(
    sandboxes: Sandboxes, long_session: SandboxSession, path: str
) -> None:
    if sandboxes.owns_system and path.startswith("/usr"):
        sandboxes(long_session.write({path: "x"}))
        return
    sandboxes(long_session.run("touch /etc/ld.so.cache"))
    with pytest.raises(EpisodeError, match="cannot be written"):
        sandboxes(long_session.write({path: "x"}))


def test_a_program_in_the_background_goes_on_and_is_counted(sandboxes: Sandboxes, session: SandboxSession) -> None:
    sandboxes(session.run("mkfifo pipe; (read line < pipe; echo $line > heard) & sleep 1000 &"))
    assert sandboxes(session.count_background()) == 2
    sandboxes(session.run("echo hello > pipe; while ! test -s heard; do :; done"))
    assert sandboxes(session.read("heard")) == b"hello\n"
    assert sandboxes(session.end_background()) == 1
    assert sandboxes(session.count_background()) == 0


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("while :; do :; done", Reason.WALL_TIME),
        ("trap '' TERM INT; sleep 1000 & sleep 1000", Reason.WALL_TIME),
        ("setsid bash -c 'setsid sleep 1000 & sleep 1000' & sleep 1000", Reason.WALL_TIME),
        ("yes", Reason.OUTPUT),
        ("cat /dev/zero >&2", Reason.OUTPUT),
        ("kill -SEGV $$", Reason.SIGNALLED),
    ],
)
def test_a_command_that_does_not_stop_is_stopped_with_all_that_it_started(
    sandboxes: Sandboxes, long_session: SandboxSession, command: str, reason: Reason
) -> None:
    wall_s = 0.3 if reason is Reason.WALL_TIME else 30.0
    done = sandboxes(long_session.run(command, limits=replace(LIMITS, wall_s=wall_s, output_bytes=10_000)))
    assert done.reason is reason
    assert done.exit_code is None
    assert len(done.stdout) + len(done.stderr) <= 20_000
    assert sandboxes(long_session.count_background()) == 0
    assert sandboxes(long_session.run("echo next")).stdout == "next\n"


def test_a_deadline_spares_what_ran_before_the_command(sandboxes: Sandboxes, session: SandboxSession) -> None:
    sandboxes(session.run("sleep 1000 &"))
    assert sandboxes(session.run("sleep 999", limits=replace(LIMITS, wall_s=0.2))).reason is Reason.WALL_TIME
    assert sandboxes(session.run("pgrep -c -x sleep")).stdout == "1\n"


def test_processor_time_has_a_limit(sandboxes: Sandboxes) -> None:
    session = sandboxes.start(replace(LIMITS, cpu_s=1))
    spent = sandboxes(session.run("while :; do :; done"))
    assert spent.reason is Reason.CPU_TIME
    assert spent.cpu_s > 0.5  # about the second after which the kernel ends it: the limit counts ticks
    assert sandboxes(session.run("sleep 0.01")).cpu_s < 0.5
    sandboxes(session.stop())


def test_memory_of_many_processes_counts_together(sandboxes: Sandboxes) -> None:
    session = sandboxes.start(replace(LIMITS, memory_bytes=100 * MIB))
    eat = "(head -c 30000000 /dev/zero; sleep 1000) | tail -c 30000000"  # which keeps the end of an input in memory
    done = sandboxes(session.run(f"for i in 1 2 3 4 5; do {eat} & done; wait"))
    assert done.reason is Reason.MEMORY
    assert sandboxes(session.run("echo next")).stdout == "next\n"
    sandboxes(session.stop())


def test_processes_of_a_session_count_together_and_too_many_are_all_ended(sandboxes: Sandboxes) -> None:
    session = sandboxes.start(replace(LIMITS, processes=8, wall_s=20.0))
    sandboxes(session.run("sleep 1000 & sleep 1000 & sleep 1000 &"))
    assert sandboxes(session.run("sleep 1000 & sleep 1000 & sleep 0.1; echo fine")).stdout == "fine\n"
    assert sandboxes(session.count_background()) == 5
    done = sandboxes(session.run("for i in 1 2 3 4 5; do sleep 1000 & done; wait"))
    assert done.reason is Reason.PROCESSES
    assert sandboxes(session.count_background()) == 0  # older ones too: nobody knows which of them is one too many
    assert sandboxes(session.run("echo next")).stdout == "next\n"
    sandboxes(session.stop())


def test_disk_has_a_limit_and_a_full_one_can_be_cleared(sandboxes: Sandboxes) -> None:
    session = sandboxes.start(replace(LIMITS, disk_bytes=4 * MIB, file_bytes=3 * MIB))
    if "disk" in session.missing:
        assert "cannot bound" in session.missing["disk"]
        assert "File size limit" in sandboxes(session.run("head -c 3500000 /dev/zero > 5")).stderr
        sandboxes(session.stop())
        pytest.skip("no limit of the disk here, and the session says so")
    done = sandboxes(session.run("for i in 1 2 3; do head -c 2000000 /dev/zero > $i; done"))
    assert "No space left" in done.stderr
    assert sandboxes(session.run("rm -f 1 2 3; echo x > 4; cat 4")).stdout == "x\n"
    assert "File size limit" in sandboxes(session.run("head -c 3500000 /dev/zero > 5")).stderr
    sandboxes(session.stop())


def test_sessions_do_not_see_each_other(sandboxes: Sandboxes) -> None:
    one, other = sandboxes.start(), sandboxes.start()
    sandboxes(one.run("echo secret > note; echo secret > /tmp/note; sleep 1000 &"))
    seen = sandboxes(other.run("ls /tmp /workspace; pgrep sleep; ls /proc | grep '^[0-9]' | tail -n +12")).stdout
    assert seen.split() == ["/tmp:", "/workspace:"]
    for session in (one, other):
        sandboxes(session.stop())


def test_calls_at_once_wait_for_each_other(sandboxes: Sandboxes, session: SandboxSession) -> None:
    async def several() -> list[str]:
        done = await asyncio.gather(*(session.run(f"echo {n} >> log; cat log | wc -l") for n in range(5)))
        return [one.stdout for one in done]

    assert sandboxes(several()) == [f"{n}\n" for n in range(1, 6)]


def test_the_end_of_its_time_ends_a_session_in_the_middle_of_a_command(sandboxes: Sandboxes) -> None:
    life_s = 0.6 * sandboxes.pace
    session = sandboxes.start(life_s=life_s)
    with pytest.raises(SessionEnded, match=rf"its time of {life_s:g} s is over"):
        sandboxes(session.run("sleep 1000"))
    assert session.ended
    for call in (session.run("true"), session.read("x"), session.write({"x": ""}), session.snapshot()):
        with pytest.raises(SessionEnded, match="its time"):
            sandboxes(call)


def test_a_stopped_session_refuses_everything_by_name(sandboxes: Sandboxes) -> None:
    session = sandboxes.start()
    sandboxes(session.stop())
    sandboxes(session.stop())
    for call in (session.run("true"), session.snapshot()):
        with pytest.raises(SessionEnded, match="it was stopped") as error:
            sandboxes(call)
        assert error.value.reason == "session_ended"


def test_a_cancelled_call_ends_its_session_and_no_other(sandboxes: Sandboxes, session: SandboxSession) -> None:
    other = sandboxes.start()

    async def cut_off() -> None:
        async with asyncio.timeout(0.2 * sandboxes.pace):
            await other.run("sleep 1000")

    with pytest.raises(TimeoutError):
        sandboxes(cut_off())
    assert other.ended
    assert sandboxes(session.run("echo fine")).stdout == "fine\n"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SandboxSpec(limits=replace(LIMITS, disk_bytes=0)), "limits.disk_bytes=0 leaves nothing"),
        (SandboxSpec(limits=SandboxLimits()), "limits.open_files=64 is too few"),
        (SandboxSpec(life_s=-1), "life_s=-1"),
        (SandboxSpec(directory="here"), "'here' is not a full path"),
        (SandboxSpec(directory="/proc/new"), "'/proc/new' of a session cannot be made"),
        (SandboxSpec(variables={"A=B": "1"}), "'A=B'"),
        (SandboxSpec(life_s=math.nan), "life_s=nan"),
        (SandboxSpec(life_s=math.inf), "life_s=inf"),
        (SandboxSpec(limits=replace(LIMITS, wall_s=math.nan)), "limits.wall_s=nan"),
        (SandboxSpec(variables={"A": 1}), "variables\\['A'\\]=1 is no text"),  # type: ignore[dict-item]
        (SandboxSpec(variables={"A": "x" * 131_072}), "'A'.*which no program can be given"),
        (SandboxSpec(variables={"A": "\ud800"}), "'A'.*cannot be set"),
    ],
)
def test_a_description_that_cannot_work_is_refused_by_name(sandboxes: Sandboxes, spec: SandboxSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sandboxes(sandboxes.driver.start(spec))


@pytest.mark.parametrize("command", ["x" * 200_000, "echo \0", "echo \ud800"])
def test_a_command_that_no_shell_could_get_is_refused(
    sandboxes: Sandboxes, long_session: SandboxSession, command: str
) -> None:
    with pytest.raises(EpisodeError, match="cannot be given to a shell"):
        sandboxes(long_session.run(command))


def test_an_unknown_kind_of_sandbox_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bubblewrap'"):
        asyncio.run(open_sandboxes("bubblewrapp"))


@pytest.mark.parametrize(
    ("command", "size"),
    [
        ("echo -n '" + "\N{GRINNING FACE}" * 24_000 + "' | wc -c", 96_000),
        ("echo -n '" + "\1" * 99_000 + "' | wc -c", 99_000),
        ("cat > note <<'EOF'\n" + "日本語テキスト" * 4_700 + "\nEOF\nwc -c < note", 98_701),
    ],
    ids=["emoji", "control", "japanese"],
)
def test_a_command_is_as_long_as_its_bytes(
    sandboxes: Sandboxes, session: SandboxSession, command: str, size: int
) -> None:
    assert sandboxes(session.run(command)).stdout == f"{size}\n"
    assert sandboxes(session.run("echo next")).stdout == "next\n"


def test_long_variables_are_carried_whole(sandboxes: Sandboxes, session: SandboxSession) -> None:
    fill = "$(head -c {size} /dev/zero | tr '\\0' '{byte}')"
    sandboxes(session.run(f"export A={fill.format(size=40_000, byte=chr(1))} B={fill.format(size=70_000, byte='b')}"))
    done = sandboxes(session.run(f"echo ${{#A}} ${{#B}}; export C={fill.format(size=140_000, byte='c')} Z=1; cd /tmp"))
    assert (done.stdout, done.detail) == ("40000 70000\n", "too long to be given to a program, and lost: C")
    assert sandboxes(session.run("pwd; echo ${#A} ${#B} ${#C} $Z")).stdout == "/tmp\n40000 70000 0 1\n"


@pytest.mark.parametrize(
    ("command", "said", "code"),
    [
        ("trap 'echo bye $?' EXIT; cd /tmp; export A=1; (exit 3)", "bye 3\n", 3),
        ("set -e; trap 'echo bye $?; exit 7' 0; cd /tmp; export A=1; false; echo not", "bye 1\n", 7),
        ("set -eE; trap 'echo err' ERR; trap 'echo $?' EXIT; cd /tmp; export A=1; exit 5", "5\n", 5),
        ("f() { trap 'echo f' EXIT; }; f; (trap 'echo sub' EXIT); cd /tmp; set -a; A=1", "sub\nf\n", 0),
        ("trap 'echo int' INT; kill -INT $$; trap - EXIT; cd /tmp; export A=1; exit 2", "int\n", 2),
        ("trap 'echo no' NOSUCH 2> /dev/null || echo $?; cd /tmp; export A=1", "1\n", 0),
    ],
)
def test_traps_of_a_command_cost_it_neither_directory_nor_variables(
    sandboxes: Sandboxes, session: SandboxSession, command: str, said: str, code: int
) -> None:
    done = sandboxes(session.run(command))
    assert (done.stdout, done.exit_code, done.detail) == (said, code, "")
    assert sandboxes(session.run("pwd; echo $A")).stdout == "/tmp\n1\n"


def test_signals_that_the_run_ignores_are_not_ignored_in_a_session(sandboxes: Sandboxes) -> None:
    ignored = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # as in a run that a script or nohup has started
    earlier = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        fresh = sandboxes.another()
        session = fresh.start()
    finally:
        for number, handler in zip(ignored, earlier, strict=True):
            signal.signal(number, handler)
    done = fresh(session.run('for name in INT QUIT HUP; do trap "echo $name" $name; kill -$name $$; done'))
    fresh(session.stop())
    fresh(fresh.driver.close())
    assert done.stdout == "INT\nQUIT\nHUP\n"


def test_names_with_line_ends_functions_and_other_bytes_are_carried(
    sandboxes: Sandboxes, session: SandboxSession
) -> None:
    sandboxes(session.run("mkdir $'a\\nb\\n'; cd $'a\\nb\\n'; f() { echo hi; }; export -f f; export U=$'\\xff=\\n'"))
    done = sandboxes(session.run("f; [[ $PWD == $'/workspace/a\\nb\\n' && $U == $'\\xff=\\n' ]] && echo same"))
    assert done.stdout == "hi\nsame\n"


def test_a_shell_that_was_replaced_says_that_its_state_is_lost(sandboxes: Sandboxes, session: SandboxSession) -> None:
    done = sandboxes(session.run("cd /tmp; exec cat", stdin=b"last\n"))
    assert (done.stdout, done.ok) == ("last\n", True)
    assert "its shell was replaced" in done.detail
    assert sandboxes(session.run("pwd")).stdout == "/workspace\n"


def test_limits_of_one_command_hold_for_it_alone(sandboxes: Sandboxes, session: SandboxSession) -> None:
    small = replace(LIMITS, cpu_s=1, file_bytes=2048)
    done = sandboxes(session.run("head -c 5000 /dev/zero > f; wc -c < f", limits=small))
    assert done.stdout == "2048\n"
    assert sandboxes(session.run("while :; do :; done", limits=small)).reason is Reason.CPU_TIME
    assert sandboxes(session.run("head -c 5000 /dev/zero > f; wc -c < f")).stdout == "5000\n"


def test_a_file_that_is_written_again_keeps_its_mode(sandboxes: Sandboxes, session: SandboxSession) -> None:
    sandboxes(session.run("for f in tool secret; do echo old > $f; done; chmod 755 tool; chmod 600 secret"))
    sandboxes(session.write({"tool": "echo new\n", "secret": "new", "run": "#!/bin/sh\n", "plain": "x"}))
    sandboxes(session.write({"secret": "#!/bin/sh\necho ran\n"}))
    look = "stat -c '%a %n' tool secret run plain; bash ./tool; cat secret"
    assert sandboxes(session.run(look)).stdout == (
        "755 tool\n711 secret\n755 run\n644 plain\nnew\n#!/bin/sh\necho ran\n"
    )
    many = {f"many/{number}": str(number) for number in range(450)}
    sandboxes(session.write(many))
    assert sandboxes(session.run("cat many/* | wc -c; ls many | wc -l")).stdout == "1240\n450\n"


@pytest.mark.parametrize("files", [{"nul\0x": "1"}, {"\ud800": "1"}, {"text": "\ud800"}])
def test_files_with_names_or_texts_that_cannot_be_are_refused_by_name(
    sandboxes: Sandboxes, long_session: SandboxSession, files: dict[str, str]
) -> None:
    with pytest.raises(EpisodeError) as error:
        sandboxes(long_session.write(files))
    assert error.value.reason == "session_file"
    if "text" not in files:
        with pytest.raises(EpisodeError) as error:
            sandboxes(long_session.read(*files))
        assert error.value.reason == "session_file"
