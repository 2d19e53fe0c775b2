"""Environments that do harm: each deed by name, what it is counted as, and what has become of it in real workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.launch.starts import ResourceLimits
from headrace.rollout import EpisodeLimits
from tests.rollout.environments.pools import RunningPool, running_pool
from tests.rollout.scoring.hostile import DEEDS

KEEP = ResourceLimits(memory_bytes=512 << 20, processes=40, log_bytes=1 << 20)
ENVIRONMENT = (
    DEEDS
    + """
    import headrace
    from headrace.base.types.chat import Message

    async def forever(policy, first):
        while True:
            await policy.chat("again")

    async def deaf(policy, first):
        while True:
            try:
                await asyncio.sleep(0.01)
                await policy.chat("hello")
            except BaseException:
                pass

    async def flood(policy, first):
        await asyncio.gather(*(policy.chat("hello") for _ in range(5000)))

    async def leave(policy, first):
        for _ in range(5000):
            asyncio.get_running_loop().create_task(policy.chat("unheard"))
        await asyncio.sleep(0)
        return 1.0

    async def half(policy, first):
        await policy.chat(chr(0xD800))

    async def wide(policy, first):
        await policy.chat("x" * (1 << 27))

    async def untyped(policy, first):
        await policy.chat([Message(role="user", content=7)])

    async def nobody(policy, first):
        await policy.chat([{"role": "boss", "content": "x"}])

    async def undone(policy, first):
        await policy.chat("hello", temperature="hot")

    async def bare(policy, first):
        await policy.sample([-1, 1 << 40])

    async def stop_loop(policy, first):
        asyncio.get_running_loop().stop()
        await never()

    async def cancel_all(policy, first):
        for task in asyncio.all_tasks():
            task.cancel()
        await never()

    async def exit_beside(policy, first):
        async def leave():
            raise SystemExit(3)
        asyncio.get_running_loop().create_task(leave())
        await never()

    async def block(policy, first):
        time.sleep(1000)

    async def truth(policy, first):
        return headrace.Episode(reward=True, rewards={first.turn: True}, trained=[first])

    async def parts(policy, first):
        return headrace.Episode(reward=1.0, rewards={first.turn: "much"})

    async def places(policy, first):
        return headrace.Episode(reward=1.0, rewards={"first": 1.0})

    async def chosen(policy, first):
        return headrace.Episode(reward=1.0, trained=["the first"])

    async def cancel(policy, first):
        raise asyncio.CancelledError

    SPEAKING = {
        each.__name__: each for each in (
            forever, deaf, flood, leave, half, wide, untyped, nobody, undone, bare, stop_loop, cancel_all,
            exit_beside, block, truth, parts, places, chosen, cancel,
        )
    }

    async def rollout(task, policy):
        deed = task["deed"].split()[0]
        if deed == "learn":
            reply = await policy.chat(task["prompt"])
            return sum(character in "01234" for character in reply.message.content) / 4
        first = await policy.chat(task.get("prompt", "hello"))
        if deed in SPEAKING:
            return await SPEAKING[deed](policy, first)
        done = DEEDS[deed]()
        return await done if asyncio.iscoroutine(done) else done

    class Deeds(headrace.Env):
        def reset(self, task):
            self.deed, _, self.where = task["deed"].split()[0].partition("@")
            if self.where == "reset":
                DEEDS[self.deed]()
            return "hello"

        def step(self, message):
            earned = 1.0 if self.where else DEEDS[self.deed]()
            return headrace.StepResult(reward=earned, done=True)

        def close(self):
            if self.where == "close":
                DEEDS[self.deed]()
"""
)
_ERRORS = (
    *("raise", "stop", "exit", "unspeakable", "recurse", "text", "list", "dict", "odd", "huge", "coroutine"),
    *("shout", "sockets", "interrupt", "cancelled", "weird"),
)
_COMMON: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fine", "bomb"), ("",)),
    **dict.fromkeys(_ERRORS, ("env_error",)),
    **dict.fromkeys(("nan", "infinite"), ("reward_nan",)),
    **dict.fromkeys(("abort", "quit", "segfault", "daemon"), ("env_crashed",)),
    **dict.fromkeys(("garble", "accuse"), ("env_crashed", "env_timeout")),
    # a busy machine notices late, and what a killed process leaves behind may or may not continue
    **dict.fromkeys(("fork", "eat"), ("env_crashed", "env_blocked", "env_timeout", "env_error")),
    **dict.fromkeys(("everybody", "parents"), ("env_crashed", "env_error", "reward_none")),
    "gigabyte": ("env_error", "env_blocked", "env_timeout"),
    "close": ("env_crashed", "env_blocked", "env_timeout", "env_error", "reward_none"),
}
CAUSES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rollout": {
        **_COMMON,
        **dict.fromkeys(("truth", "leave"), ("",)),
        "flood": ("reward_none", "env_error"),
        **dict.fromkeys(("half", "wide", "untyped", "nobody", "undone", "bare"), ("env_error",)),
        **dict.fromkeys(("parts", "places", "chosen", "cancel"), ("env_error",)),
        **dict.fromkeys(("stop_loop", "exit_beside"), ("env_crashed",)),
        **dict.fromkeys(("hang", "block", "garble", "accuse"), ("env_blocked", "env_crashed")),
        **dict.fromkeys(("shout", "sockets"), ("env_error", "env_blocked")),
        "cancel_all": ("env_error", "env_crashed"),
        "await": ("env_timeout",),
        "deaf": ("env_timeout",),
        "forever": ("max_turns",),
    },
    "Deeds": {
        **_COMMON,
        "hang": ("env_timeout",),
        "await": ("env_error",),
        **dict.fromkeys(("raise@reset", "raise@close", "exit@close"), ("env_error",)),
        **dict.fromkeys(("hang@reset", "hang@close"), ("env_timeout",)),
        **dict.fromkeys(("quit@reset", "quit@close"), ("env_crashed",)),
    },
}
"""By entry and deed: the reasons that it may be counted by; the first of several is the usual one."""
QUICK = {
    "rollout": (
        *("fine", "raise", "unspeakable", "text", "nan", "half", "untyped", "parts", "truth", "chosen", "flood"),
        *("leave", "forever", "wide", "cancel", "accuse", "quit", "bomb", "await", "stop_loop", "sockets"),
        *("interrupt", "cancelled", "weird"),
    ),
    "Deeds": ("fine", "odd", "huge", "raise@reset", "raise@close", "quit@close", "hang", "fork", "eat"),
}
"""Deeds that together take seconds."""


def judged(directory: Path, entry: str, deeds: Sequence[str], *, timeout_s: float, within_s: float) -> Counter[str]:
    """One episode of each deed in two workers, several at once; how often each reason was counted. Asserts that each is
    counted for what it did, and that an episode that does nothing wrong succeeds afterwards."""

    async def main() -> Counter[str]:
        counted: Counter[str] = Counter()
        gate = asyncio.Semaphore(8)

        async def one(at: RunningPool, deed: str) -> None:
            reasons = CAUSES[entry][deed.split(maxsplit=1)[0]]
            async with gate:  # others wait as long as the harm of their neighbours takes
                (found,) = await at.run(deed, timeout_s=timeout_s if "env_timeout" in reasons else None)
            reason = "" if isinstance(found, float) else found.partition(":")[0]
            assert reason in reasons, (deed, found)
            counted[reason] += 1

        block_s = 2.0 if entry == "rollout" else 20.0  # plain functions block no loop, but a busy machine may seem to
        workers = running_pool(directory, ENVIRONMENT, entry, keep=KEEP, num_workers=2, concurrency=8, block_s=block_s)
        async with asyncio.timeout(within_s), workers as at:
            at.limits = EpisodeLimits(max_turns=6000, max_context=100_000)
            async with asyncio.TaskGroup() as group:
                for deed in deeds:
                    group.create_task(one(at, deed))
            assert await at.run("fine") == [1.0]
        return counted

    return asyncio.run(main())
