"""Code that does harm: each deed by name, and as rewards in a real pool what it is counted as."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.launch.workers import RunningPool, running_pool, task

DEEDS = """
    import asyncio, ctypes, gc, os, signal, socket, sys, threading, time

    async def never():
        await asyncio.Event().wait()

    def fork_all():
        while True:
            try:
                os.fork()
            except OSError:
                pass

    def kill_parents():
        for pid in (os.getppid(), 1, 2):
            os.kill(pid, signal.SIGKILL)

    def kill_everybody():
        os.kill(-1, signal.SIGKILL)

    def daemonise():
        if not os.fork():
            os.setsid()
            if not os.fork():
                while True:
                    time.sleep(1)
            os._exit(0)
        os._exit(5)

    def eat():
        eaten = []
        while True:
            eaten.append(os.urandom(1 << 20) * 32)

    def shout(number_of_mib):
        for _ in range(number_of_mib >> 2):
            sys.stdout.write("x" * (1 << 22))
        raise RuntimeError("hoarse")

    def speak(words):
        channel = next(each for each in gc.get_objects() if type(each).__name__ == "PartChannel")
        channel._reports.send(words)
        threading.Event().wait()

    def accuse():
        from headrace.base.types.messages.controller import Failure
        from headrace.base.types.messages.codec import MessageCodec
        speak(MessageCodec(Failure).encode(Failure(call=None, kind="ConfigError", problem="all lost", remedy="none")))

    def listen():
        made = [socket.socket() for _ in range(100_000)]

    class Odd:
        def __float__(self):
            raise KeyError("odd")

    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError

    def raise_(error):
        raise error

    DEEDS = {
        "fine": lambda: 1.0,
        "raise": lambda: raise_(ValueError("no")),
        "stop": lambda: raise_(StopIteration()),
        "interrupt": lambda: raise_(KeyboardInterrupt()),
        "cancelled": lambda: raise_(asyncio.CancelledError()),
        "weird": lambda: raise_(BaseException("weird")),
        "exit": lambda: sys.exit(0),
        "unspeakable": lambda: raise_(Unspeakable()),
        "recurse": lambda: DEEDS["recurse"](),
        "text": lambda: "1.0",
        "list": lambda: [1.0],
        "dict": lambda: {"reward": 1},
        "odd": Odd,
        "nan": lambda: float("nan"),
        "infinite": lambda: float("-inf"),
        "beyond": lambda: -1e308,
        "huge": lambda: 10 ** 400,
        "coroutine": lambda: (lambda: (yield))(),
        "shout": lambda: shout(256),
        "gigabyte": lambda: shout(1024),
        "sockets": listen,
        "hang": lambda: threading.Event().wait(),
        "await": never,
        "close": lambda: os.closerange(0, 1000),
        "abort": os.abort,
        "quit": lambda: os._exit(0),
        "segfault": lambda: ctypes.string_at(0),
        "parents": kill_parents,
        "everybody": kill_everybody,
        "fork": fork_all,
        "daemon": daemonise,
        "eat": eat,
        "garble": lambda: speak(b"no message at all"),
        "accuse": accuse,
        "bomb": lambda: threading.Timer(0.2, os._exit, (3,)).start() or 1.0,
    }
"""
"""What code can do without asking anybody, by name."""
REWARD = (
    DEEDS
    + """
    def reward(completion, deed=""):
        if deed == "learn":
            return sum(character in "01234" for character in completion) / 4
        return DEEDS[(deed or completion).split()[0]]()
"""
)
CAUSES = {
    **dict.fromkeys(("fine", "bomb"), ""),
    **dict.fromkeys(("raise", "stop", "exit", "unspeakable", "recurse", "text", "list", "dict", "odd"), "reward_error"),
    **dict.fromkeys(("huge", "coroutine", "shout", "interrupt", "cancelled", "weird"), "reward_error"),
    **dict.fromkeys(("nan", "infinite", "beyond"), "reward_nan"),
    **dict.fromkeys(("hang", "await"), "reward_timeout"),
    **dict.fromkeys(("abort", "quit", "segfault", "daemon"), "reward_crashed"),
}
"""Reason of every deed; those of ``EITHER`` have one of several."""
EITHER = {
    # a busy machine notices late
    **dict.fromkeys(("fork", "eat", "garble", "accuse"), ("reward_crashed", "reward_timeout")),
    **dict.fromkeys(("gigabyte", "sockets"), ("reward_error", "reward_timeout")),
    "everybody": ("reward_crashed", "reward_error"),
    "parents": ("reward_crashed", "reward_error"),
    "close": ("reward_crashed", "reward_timeout", "reward_error"),
}


def reasons(deed: str) -> tuple[str, ...]:
    """The reasons that a deed may be counted by."""
    kind = deed.split(maxsplit=1)[0]
    return EITHER.get(kind, (CAUSES.get(kind, ""),))


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward, so that a deadline does not depend on the speed of the machine."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


DEADLINE_S = 600.0
"""The deadline of a reward, which no deed reaches by being slow."""
STEP_S = 0.5
"""What the clock is put forward by at a time: less than lies between the deadlines of most calls."""
QUIET_S = 3.0
"""The deadline passes when a thread could have computed for so long since anything has happened."""
PROBE_S = 0.02
"""Processor time in which the share of a processor is measured that a thread gets."""


def share() -> float:
    """The share of a processor that a thread gets beside all others of this machine, measured now."""
    began_s, used_s = time.monotonic(), time.thread_time()
    while time.thread_time() - used_s < PROBE_S:
        pass
    return min(1.0, PROBE_S / (time.monotonic() - began_s))


async def pass_deadlines(loop: SkippingLoop, at: RunningPool, happened: list[str]) -> None:
    """Put the clock forward to the next deadline whenever nothing has happened for :data:`QUIET_S`: no deed was begun
    or counted, no worker started or replaced."""

    def seen() -> tuple[int, ...]:
        return len(happened), len(at.children), len(at.warnings)

    before, left_s = seen(), QUIET_S
    while True:
        await asyncio.sleep(0.5)
        left_s -= 0.5 * await asyncio.to_thread(share)
        if seen() != before:
            before, left_s = seen(), QUIET_S
        while left_s <= 0 and seen() == before:
            loop.skipped_s += STEP_S
            await asyncio.sleep(0.002)  # in which a worker whose call is late is replaced


def judged(directory: Path, deeds: Sequence[str]) -> Counter[str]:
    """Score these deeds in a pool of two workers, several at once; how often each reason was counted. Asserts that each
    is counted for what it did.

    How long a deed may take is measured in what the machine could have computed meanwhile, so that other load on it
    changes nothing.
    """
    loop = SkippingLoop()

    async def main() -> Counter[str]:
        counted: Counter[str] = Counter()
        gate = asyncio.Semaphore(8)
        happened: list[str] = []
        pool = running_pool(directory, REWARD, num_workers=2, timeout_s=DEADLINE_S, within_s=1e9, start_within_s=1e9)
        async with pool as at:

            async def one(deed: str) -> None:
                async with gate:
                    happened.append(deed)
                    scores = await at.pool.score(replace(task(), row={"prompt": deed}), (deed,))
                    happened.append(deed)
                reason = scores.failure.partition(":")[0]
                assert reason in reasons(deed), (deed, scores)
                counted[reason] += 1

            passing = asyncio.create_task(pass_deadlines(loop, at, happened))
            async with asyncio.TaskGroup() as group:
                for deed in deeds:
                    group.create_task(one(deed))
            passing.cancel()
        return counted

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())
