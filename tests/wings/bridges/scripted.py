"""A bridge in this process, and a model that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.base.types.episode import Turn
from headrace.base.types.sampling import Sampling
from headrace.models.tiny import char_tokenizer
from headrace.rollout import Chat, Conversations, EpisodeLimits
from headrace.rollout.environments.bridges import load_bridge
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from tests.rollout.models import CHATML, Speaker

PRINTABLE = "\n×" + "".join(map(chr, range(32, 127)))
SPOKEN = char_tokenizer(PRINTABLE, CHATML)
SPOKEN.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What came of an episode."""

    ended: Episode
    turns: list[Turn]
    read: list[str]
    """What the model had before it at each of its answers."""


def attempts(
    entry: str,
    rows: list[Mapping[str, Any]],
    says: Callable[[str], str],
    *,
    limits: EpisodeLimits | None = None,
    **options: Any,
) -> list[Attempt]:
    """Episodes of a bridge, all at once."""

    notes: list[str] = []

    async def run() -> list[Attempt]:
        with ThreadPoolExecutor(max_workers=4) as hands:
            rollout = load_bridge(entry, options, hands)

            async def one(row: Mapping[str, Any]) -> Attempt:
                read: list[str] = []

                def answer(text: str) -> str:
                    read.append(text)
                    return says(text)

                speaker = Speaker(answer, SPOKEN)
                speaker.sampling = Sampling(max_new_tokens=400, stop_ids=speaker.sampling.stop_ids)
                chat = Chat.create(SPOKEN, speaker.sampling.stop_ids)
                talk = Conversations(speaker, limits or EpisodeLimits(), chat=chat, seed=7, note=notes.append)
                ended = await rollout(row, EpisodePolicy(talk, executor=hands))
                return Attempt(ended=ended, turns=list(talk.turns), read=read)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(row)) for row in rows]
            return [task.result() for task in tasks]

    return asyncio.run(run())


def readable(text: str) -> str:
    """As the tokenizer gives it back: what it does not know is told so."""
    return str(SPOKEN.decode(SPOKEN.encode(text, add_special_tokens=False)))
