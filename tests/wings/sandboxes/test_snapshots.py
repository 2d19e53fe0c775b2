"""Snapshots and forks: worlds continue from one moment, apart from each other."""

from __future__ import annotations

import pytest

from headrace.base.errors import EpisodeError
from headrace.wings.sandboxes import SandboxSession, SandboxSnapshot, SandboxSpec, open_sandboxes
from tests.wings.sandboxes.conftest import Sandboxes, any_sandboxes

sandboxes = any_sandboxes


def out(sandboxes: Sandboxes, session: SandboxSession, command: str) -> str:
    return sandboxes(session.run(command)).stdout


CHANGES = """
mkdir -p kept/inner gone; echo 1 > kept/inner/file; echo 2 > gone/file; echo 3 > changed
ln -s changed link; mkfifo pipe; printf '#!/bin/sh\\necho ran' > run; chmod 751 run; touch -d '2001-02-03' old
ln changed hard; mkdir -m 700 'with space'; echo x > 'with space/new
line'; umask 077; echo h > /tmp/.hidden; export WORD=from-before; cd kept
"""


def test_a_fork_has_files_directory_and_variables_of_its_snapshot(
    sandboxes: Sandboxes, session: SandboxSession
) -> None:
    sandboxes(session.run(CHANGES))
    look = (
        "pwd; echo $WORD; cd /; find workspace tmp -printf '%p %y %m %l\\n' | sort; "
        "cat workspace/changed /tmp/.hidden; date -r workspace/old +%F; workspace/run"
    )
    snapshot = sandboxes(session.snapshot())
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    seen = out(sandboxes, fork, look)
    assert "/workspace/kept\nfrom-before\n" in seen
    assert "2001-02-03\nran" in seen
    assert seen == out(sandboxes, session, look)
    sandboxes(fork.stop())
    sandboxes(sandboxes.driver.release(snapshot))


def test_what_one_changes_the_others_do_not_see(sandboxes: Sandboxes, session: SandboxSession) -> None:
    sandboxes(session.run("mkdir d; echo old > d/file; echo old > changed"))
    snapshot = sandboxes(session.snapshot())
    one, other = (sandboxes(sandboxes.driver.fork(snapshot)) for _ in range(2))
    sandboxes(one.run("echo one > changed; rm -r d; echo new > new"))
    sandboxes(session.run("echo first > changed; rm -r d; mkdir d; echo again > d/other"))
    look = "cat changed; ls . d"
    assert out(sandboxes, one, look) == "one\n.:\nchanged\nnew\n"
    assert out(sandboxes, other, look) == "old\n.:\nchanged\nd\n\nd:\nfile\n"
    assert out(sandboxes, session, look) == "first\n.:\nchanged\nd\n\nd:\nother\n"
    for fork in (one, other):
        sandboxes(fork.stop())
    sandboxes(sandboxes.driver.release(snapshot))


def test_times_to_the_nanosecond_holes_and_modes_are_kept(sandboxes: Sandboxes, session: SandboxSession) -> None:
    """``make`` in a fork decides as it does in the session."""
    sandboxes(
        session.run(
            "touch -d '2020-01-01 00:00:00.123456789' old; touch -d '2020-01-01 00:00:00.9' new; mkdir -m 2711 folder; "
            "truncate -s 60M hollow{,2,3,4,5,6}; echo end >> hollow; chmod 700 /tmp; mkdir /sys; "
            "echo > /sys/own"
        )
    )
    look = (
        "[ new -nt old ] && echo newer; stat -c '%n %y' old new; stat -c %a folder /tmp; ls /sys | grep own;"
        "tail -n 1 hollow; [ $(du -k hollow | cut -f 1) -lt 1000 ] && echo sparse"
    )
    if sandboxes.kind == "podman":  # layers of its images have whole seconds
        look = look.replace("[ new -nt old ] && echo newer; stat -c '%n %y'", "stat -c '%n %Y'")
    seen = out(sandboxes, session, look)
    assert sandboxes.kind == "podman" or "newer\nold 2020-01-01 00:00:00.123456789" in seen
    snapshot = sandboxes(session.snapshot())
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    assert out(sandboxes, fork, look) == seen
    sandboxes(fork.stop())
    sandboxes(sandboxes.driver.release(snapshot))


def test_a_line_of_snapshots_and_forks_of_forks_keeps_every_moment(
    sandboxes: Sandboxes, session: SandboxSession
) -> None:
    moments = []
    current = session
    for number in range(6):
        sandboxes(current.run(f"echo {number} >> log; rm -f only-*; touch only-{number}"))
        moments.append(sandboxes(current.snapshot()))
        if number % 2:
            current = sandboxes(sandboxes.driver.fork(moments[-1]))
    for number, moment in enumerate(moments):
        fork = sandboxes(sandboxes.driver.fork(moment))
        expected = "".join(f"{each}\n" for each in range(number + 1))
        assert out(sandboxes, fork, "cat log; ls only-*") == f"{expected}only-{number}\n"
        sandboxes(fork.stop())
    for moment in moments:
        sandboxes(sandboxes.driver.release(moment))


def test_a_fork_outlives_its_session_its_snapshot_and_its_siblings(sandboxes: Sandboxes) -> None:
    session = sandboxes.start()
    sandboxes(session.run("echo here > file"))
    snapshot = sandboxes(session.snapshot())
    forks = [sandboxes(sandboxes.driver.fork(snapshot)) for _ in range(2)]
    sandboxes(session.stop())
    sandboxes(forks[0].stop())
    sandboxes(sandboxes.driver.release(snapshot))
    assert out(sandboxes, forks[1], "cat file; echo more >> file; cat file") == "here\nhere\nmore\n"
    sandboxes(forks[1].stop())


def test_a_released_snapshot_is_refused_by_name(sandboxes: Sandboxes, session: SandboxSession) -> None:
    snapshot = sandboxes(session.snapshot())
    for _ in range(2):
        sandboxes(sandboxes.driver.release(snapshot))
    with pytest.raises(EpisodeError, match="has been released"):
        sandboxes(sandboxes.driver.fork(snapshot))


def test_a_snapshot_would_lose_what_runs_in_the_background_and_says_so(
    sandboxes: Sandboxes, session: SandboxSession
) -> None:
    sandboxes(session.run("sleep 1000 & sleep 1000 &"))
    with pytest.raises(EpisodeError, match="2 processes in the background") as error:
        sandboxes(session.snapshot())
    assert error.value.reason == "session_busy"
    sandboxes(sandboxes.driver.release(sandboxes(session.snapshot(end_background=True))))


def test_a_session_has_its_whole_disk_less_what_its_snapshots_hold(sandboxes: Sandboxes) -> None:
    session = sandboxes.start()
    limit = session.spec.limits.disk_bytes
    assert limit == 256 << 20
    sandboxes(session.run("head -c 30000000 /dev/zero > big"))
    snapshot = sandboxes(session.snapshot())
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    assert sandboxes(fork.run("head -c 60000000 /dev/zero > more; wc -c < more")).stdout == "60000000\n"
    for each in (session, fork):
        sandboxes(each.stop())
    sandboxes(sandboxes.driver.release(snapshot))


def test_traps_left_in_the_files_harm_nobody(sandboxes: Sandboxes, session: SandboxSession) -> None:
    """Links and folders in the places that a sandbox uses for itself."""
    if sandboxes.owns_system:
        pytest.skip("a session that owns its system can take it away: test_containers.py")
    sandboxes(
        session.run(
            "cd /; ln -s /etc/passwd /newlink; mkdir -p /.headrace /oldroot; mv /proc /proc2; mv /usr /u2;"
            "rm -rf /etc /bin; ln -sfn /workspace /etc; ln -sfn /workspace /bin; ln -sfn /workspace /root; true"
        )
    )
    snapshot = sandboxes(session.snapshot())
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    assert out(sandboxes, fork, "echo fine; readlink /newlink; ls -d /usr/bin /proc/self") == (
        "fine\n/etc/passwd\n/proc/self\n/usr/bin\n"
    )
    sandboxes(fork.stop())
    sandboxes(sandboxes.driver.release(snapshot))


def test_files_that_cannot_be_copied_are_told_by_name(sandboxes: Sandboxes, session: SandboxSession) -> None:
    sandboxes(session.run("echo x > shut; chmod 000 shut"))
    if sandboxes.kind != "bubblewrap":  # which alone copies by tar as a user without rights
        sandboxes(sandboxes.driver.release(sandboxes(session.snapshot())))
        return
    with pytest.raises(EpisodeError, match="shut: Cannot open: Permission denied"):
        sandboxes(session.snapshot())
    sandboxes(session.run("rm -f shut"))
    sandboxes(sandboxes.driver.release(sandboxes(session.snapshot())))


def test_a_snapshot_of_another_driver_is_refused_by_name(sandboxes: Sandboxes, session: SandboxSession) -> None:
    """Its files may carry the names of those of other sessions."""

    async def refused(foreign: SandboxSnapshot) -> None:
        for call in (sandboxes.driver.fork(foreign), sandboxes.driver.release(foreign)):
            with pytest.raises(EpisodeError, match="is one of another driver") as error:
                await call
            assert error.value.reason == "session_snapshot"

    async def body() -> None:
        async with await open_sandboxes(sandboxes.kind, (), sandboxes.options) as driver:
            other = await driver.start(SandboxSpec())
            await other.write({"who": "the other driver's"})
            foreign = await other.snapshot()
            await refused(foreign)
            fork = await driver.fork(foreign)  # the refused release has released nothing
            assert await fork.read("who") == b"the other driver's"
            await driver.release(foreign)

    sandboxes(session.write({"who": "of this driver"}))
    snapshot = sandboxes(session.snapshot())
    sandboxes(body())
    sandboxes(sandboxes.driver.release(snapshot))


def test_a_closed_driver_starts_nothing_and_says_so(sandboxes: Sandboxes) -> None:
    async def body() -> None:
        driver = await open_sandboxes(sandboxes.kind, (), sandboxes.options)
        snapshot = await (await driver.start(SandboxSpec())).snapshot()
        await driver.close()
        for call in (driver.start(SandboxSpec()), driver.fork(snapshot)):
            with pytest.raises(EpisodeError, match="the driver is closed") as error:
                await call
            assert error.value.reason == "session_start"
        await driver.release(snapshot)

    sandboxes(body())
