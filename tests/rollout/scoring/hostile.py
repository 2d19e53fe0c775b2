"""Code that does harm: each deed by name, and as rewards in a real pool what it is counted as."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.launch.workers import running_pool, task

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
        "exit": lambda: sys.exit(0),
        "unspeakable": lambda: raise_(Unspeakable()),
        "recurse": lambda: DEEDS["recurse"](),
        "text": lambda: "1.0",
        "list": lambda: [1.0],
        "dict": lambda: {"reward": 1},
        "odd": Odd,
        "nan": lambda: float("nan"),
        "infinite": lambda: float("-inf"),
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
    **dict.fromkeys(("huge", "coroutine", "shout"), "reward_error"),
    **dict.fromkeys(("nan", "infinite"), "reward_nan"),
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


def judged(directory: Path, deeds: Sequence[str], *, timeout_s: float) -> Counter[str]:
    """Score these deeds in a pool of two workers, several at once; how often each reason was counted. Asserts that each
    is counted for what it did."""

    async def main() -> Counter[str]:
        counted: Counter[str] = Counter()
        gate = asyncio.Semaphore(8)
        async with running_pool(directory, REWARD, num_workers=2, timeout_s=timeout_s, within_s=1500) as at:

            async def one(deed: str) -> None:
                async with gate:
                    scores = await at.pool.score(replace(task(), row={"prompt": deed}), (deed,))
                reason = scores.failure.partition(":")[0]
                kind = deed.split(maxsplit=1)[0]
                assert reason in EITHER.get(kind, (CAUSES.get(kind, ""),)), (deed, scores)
                counted[reason] += 1

            async with asyncio.TaskGroup() as group:
                for deed in deeds:
                    group.create_task(one(deed))
        return counted

    return asyncio.run(main())
