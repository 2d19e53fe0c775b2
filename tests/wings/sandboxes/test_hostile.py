"""Three hundred hostile programs in sessions of each driver of this machine: each costs its own episode only."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest

from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox import Reason
from headrace.wings.sandboxes import LIMITS, SandboxDriver, SandboxSpec, open_sandboxes
from tests.wings.sandboxes.conftest import KINDS, container_options, memory_folder, skip_missing

MIB = 1 << 20
SMALL = replace(
    LIMITS, wall_s=2.0, cpu_s=2, memory_bytes=96 * MIB, disk_bytes=16 * MIB, file_bytes=16 * MIB, processes=24
)
PYTHON = f"{sys.executable} -I -B -c"
FAMILIES = {
    "fork bombs": [
        "b() {{ b | b & }}; b; sleep {n}", "while :; do (sleep {n}0 &) ; done",
        "for i in $(seq {n}00); do sleep 9 & done",
        PYTHON + " 'import os\nwhile 1: os.fork()'",
        PYTHON + " 'import threading\nwhile 1: threading.Thread(target=threading.Event().wait).start()'",
    ],
    "full disks": [
        "cat /dev/zero > fill{n}", "while :; do mkdir d$((i++)); done", "while :; do touch $((i++)); done",
        "while :; do mkdir x && cd x; done", "head -c 100{n}00000 /dev/zero | tee a b c d > e",
        "i=0; while :; do ln -s $(head -c 3000 /dev/zero | tr '\\0' x) l$((i++)); done",
    ],
    "endless output": [
        "yes line{n}", "cat /dev/zero", "cat /dev/urandom >&2", "while :; do echo {n}; echo {n} >&2; done", "yes >&99",
        "cat /dev/zero >&99 & exit {n}",
    ],
    "memory": [
        PYTHON + " 'x = []\nwhile 1: x.append(bytearray({n}000000))'", "head -c {n}000000000 /dev/zero | tail | sort",
        "for i in 1 2 3 4 5 6; do " + PYTHON + " 'x = b\"x\" * 30000000; input()' & done; wait",
        PYTHON + " 'import mmap\nx = [mmap.mmap(-1, 1 << 24) for _ in range({n}0)]\n"
        "for m in x: m.write(bytes(1 << 24))'",
    ],
    "time": [
        "while :; do :; done", "trap '' 1 2 3 15; sleep {n}00", "sleep {n}00 & disown; setsid sleep {n}00 & wait",
        "kill -STOP $$", "cat", "read x < /dev/urandom; exec sleep {n}00", "mkfifo p{n}; cat p{n}",
    ],
    "network": [
        "exec 3<>/dev/tcp/127.0.0.1/{n}", PYTHON + " 'import socket; socket.create_connection((\"1.1.1.1\", {n}))'",
        PYTHON + " 'import socket; socket.socket(16, 3, {n})'", PYTHON + " 'import socket; socket.socket(17, 3, {n})'",
        "getent hosts host{n}.example.com",
        PYTHON + " 'import socket\ns = socket.create_server((\"127.0.0.1\", 90{n}0))\n"
        "while 1: socket.create_connection(s.getsockname()).send(bytes(1 << 16))'",
        PYTHON + " 'import socket\nx = []\nwhile 1: x.append(socket.socket()); x[-1].setsockopt(1, 7, 1 << {n})'",
    ],
    "the first process": [
        "kill -9 1 -1", "kill -STOP 1; kill -SEGV 1; kill -{n} 1", "cat /proc/1/* > /dev/null", ": > /proc/1/mem",
        "ls -R /proc/1/", "for i in $(seq 64); do kill -$i 1; done", "echo {n} > /proc/1/oom_score_adj",
    ],
    "the system": [
        "rm -rf --no-preserve-root /", "chmod -R 000 / ", "mv /* /tmp/", "find / -delete",
        "echo {n} > /proc/sys/kernel/pid_max",
        "cp /bin/bash s; chmod 4755 s; ./s -p", "mount -t proc p /proc",
        "find /proc /dev -type f -exec cat {{}} + | head -c {n}99",
        "rm -rf /lib64 /bin /etc /tmp; ln -s / /tmp", "ulimit -n {n}; ulimit -u 1; ls",
    ],
    "kernel surfaces": [
        PYTHON + " 'import ctypes, random\nlibc, r = ctypes.CDLL(None), random.Random({n})\n"
        "for _ in range(3000): libc.syscall(r.choice([c for c in range(0, 460) if c not in (34, 57, 58, 60, 61, 231)]),"
        " *[r.choice([0, 1, -1, 3, 4096, 1 << 20]) for _ in range(6)])'",
        PYTHON + " 'import ctypes\nfor n in range(0x40000000, 0x400001ff): ctypes.CDLL(None).syscall(n, {n}, 0, 0)'",
        PYTHON + " 'import os, fcntl\nfor f in range(3):\n for r in range(0x5400, 0x5480):\n"
        "  try: fcntl.ioctl(f, r, bytes({n}))\n  except OSError: pass'",
        PYTHON + " 'import socket, array\na, b = socket.socketpair()\n"
        "while 1: a.sendmsg([b\"x\"], [(1, 1, array.array(\"i\","
        " [a.fileno()]))])'",
        PYTHON + " 'import os\nfor f in os.listdir(\"/proc\"):\n try: open(f\"/proc/{{f}}\", \"wb\").write(b\"{n}\")\n"
        " except OSError: pass'",
    ],
    "the record of the shell": [
        "printf 'x' >&99; exit {n}", "exec 99>&-; cd /", "printf '/nowhere\\n' >&99; exec true",
        "trap - EXIT; cd /dev; exit",
        "export A=$(head -c 50000 /dev/zero | tr '\\0' a)", "cd $(mktemp -d) && rmdir $PWD",
    ],
}  # fmt: skip
"""Hostile commands by what they attack; ``{n}`` is a number."""


def programs() -> Iterator[tuple[str, bool]]:
    """Every hostile command with several numbers, in an order that mixes the kinds, three hundred of them; half
    of them have a loopback network."""
    rng = random.Random(7)
    found = [command for commands in FAMILIES.values() for command in commands]
    every = [(command.format(n=n), bool(rng.randrange(2))) for n in (1, 3, 7, 9, 11) for command in found]
    rng.shuffle(every)
    return itertools.islice(itertools.cycle(every), 300)


async def attack(driver: SandboxDriver, command: str, *, loopback: bool) -> str:
    """Run a hostile command in a session of its own. Return what became of the session."""
    async with await driver.start(SandboxSpec(limits=SMALL, life_s=40.0, loopback=loopback)) as session:
        try:
            done = await session.run(command)
            assert len(done.stdout) + len(done.stderr) <= 2 * SMALL.output_bytes
            await session.end_background()
            after = await session.run("echo next")
        except EpisodeError as error:
            return error.reason
        assert done.reason in Reason
        return "works" if after.stdout == "next\n" else "damaged"


async def watch(driver: SandboxDriver, over: asyncio.Event) -> int:
    """Use a good session while others are attacked, and return how many commands it has run, each as it should be."""
    number = 0
    async with await driver.start(SandboxSpec()) as session:
        while not over.is_set():
            number += 1
            done = await session.run(f"echo {number} >> log; tail -n 1 log")
            assert done.stdout == f"{number}\n", done
        assert not session.ended
    return number


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "podman"])
def test_three_hundred_hostile_programs_cost_their_own_episodes_only(kind: str) -> None:
    skip_missing(kind)
    with memory_folder() as folder:
        options = container_options(kind, folder) if kind == "podman" else {}
        withstand(kind, options, readable=sorted({sys.prefix, sys.base_prefix}) if options else ())


def withstand(kind: str, options: dict[str, Any], readable: Sequence[str]) -> None:
    """Attack the driver ``kind`` with all programs, four at once, beside a good session."""
    outcomes: dict[str, int] = {}

    async def body() -> int:
        over, places = asyncio.Event(), asyncio.Semaphore(4)
        async with await open_sandboxes(kind, readable, options) as driver, asyncio.TaskGroup() as group:
            good = group.create_task(watch(driver, over))

            async def one(command: str, loopback: bool) -> None:
                async with places:
                    outcome = await attack(driver, command, loopback=loopback)
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1

            async with asyncio.TaskGroup() as attacks:
                for command, loopback in programs():
                    attacks.create_task(one(command, loopback))
            over.set()
            return await good

    assert asyncio.run(body()) > 100
    assert sum(outcomes.values()) == 300
    assert outcomes.keys() <= {"works", "damaged", "session_ended"}, outcomes
    assert outcomes["works"] > 200, outcomes
    print(kind, outcomes)
    assert not psutil.Process().children(recursive=True)
