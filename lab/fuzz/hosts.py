"""Servers of the library without a command of their own, each in a process: ``hosts.py KIND``.

The process prints one line of JSON with its address and keys, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import string
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import numpy as np

from headrace.base.clock import RealClock
from headrace.base.types.episode import EpisodeKey, StopReason
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.models.tiny import char_tokenizer
from headrace.rollout import Chat, Conversations, EnginePolicy, EpisodeRunner
from headrace.rollout import EpisodeLimits as Budgets
from headrace.rollout.environments import SingleTurn
from headrace.sync.http import HttpInbox
from headrace.wings.agents import Endpoint, SessionLimits

SESSIONS = 400
TOKEN = "the token of nobody but this bench"
UPLOAD_BYTES = 4096
TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class _FixedEngine:
    """An engine that samples the same answer for every prompt."""

    def __init__(self, ids: list[int]) -> None:
        """Create the engine, whose answer has the token ``ids``."""
        self._ids = ids

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Yield the answer as one chunk, cut after ``sampling.max_new_tokens`` tokens; the prompt and ``options`` are
        ignored."""
        count = min(len(self._ids), sampling.max_new_tokens)
        reason = StopReason.STOP if count == len(self._ids) else StopReason.LENGTH
        versions_T, logprobs_T = np.zeros(count, np.int32), np.full(count, -0.5, np.float32)
        tokens = Tokens(ids_T=np.array(self._ids[:count]), logprobs_T=logprobs_T, versions_T=versions_T)
        yield TokenChunk(tokens=tokens, stop_reason=reason)


async def serve_sessions() -> None:
    """Serve the endpoint through which programs reach their episodes."""
    tokenizer = char_tokenizer(string.printable, TEMPLATE)
    end = int(tokenizer.eos_token_id)
    sampling = Sampling(max_new_tokens=64, stop_ids=(end,))
    engine: Any = _FixedEngine(
        [*tokenizer.encode('Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'), end]
    )
    limits = SessionLimits(delay_s=0.0, patience=1 << 30, max_body_bytes=1 << 16, body_timeout_s=5.0, idle_timeout_s=5)
    async with (
        Endpoint.listening(sampling, clock=RealClock(), warn=lambda _: None, limits=limits) as endpoint,
        AsyncExitStack() as open_sessions,
    ):
        keys = []
        for number in range(SESSIONS):
            runner = EpisodeRunner(
                engine=engine, env=SingleTurn(), sampling=sampling, run_seed=0, on_tokens=lambda _: None
            )
            policy = EnginePolicy(runner=runner, key=EpisodeKey(0, number))
            chat = Chat.create(tokenizer, (end,))
            episode = Conversations(policy, Budgets(), chat=chat, seed=0, note=lambda _: None)
            access = await open_sessions.enter_async_context(endpoint.session(episode))
            keys.append(access.api_key)
        _print_address(endpoint.base_url, keys)
        await asyncio.to_thread(sys.stdin.read)
        open_sessions.pop_all()  # skips their exit: a session may hold an error that was answered already


def serve_uploads() -> None:
    """Serve the endpoint through which an engine receives weights over HTTP."""
    inbox = HttpInbox(TOKEN, UPLOAD_BYTES, 5.0)
    _print_address(inbox.address, [TOKEN])
    sys.stdin.read()
    inbox.close()


def _print_address(url: str, keys: list[str]) -> None:
    sys.stdout.write(json.dumps({"url": url, "keys": keys}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        if sys.argv[1] == "sessions":
            asyncio.run(serve_sessions())
        else:
            serve_uploads()
