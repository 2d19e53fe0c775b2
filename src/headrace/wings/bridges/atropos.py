"""The trainer's side of Atropos, for a training loop of your own: environments run as separate services and fill a
queue.

    environments ──/v1/chat/completions──▶ serving(policy) ─▶ the policy's engine ─▶ sampled answers are remembered
         │ /register-env, /scored_data, /scored_data_list                                   │
         ▼                                                                                  ▼
    Atropos' API server (``run-api``) ──/register, /batch──▶ Queue.batches ─▶ ids, logprobs and versions of the answers

Environments send only token ids and masks. The log-probabilities and versions come from the answers that the engine
sampled, matched token for token: a token that a mask marks but the engine did not sample carries no loss, and is
counted.

    async with policy, serving(policy, port=9001, token=TOKEN) as answers:
        async with registered("http://127.0.0.1:8000", answers, Registration(batch_size=64, ...)) as queue:
            async for groups in queue.batches():
                samples = [[Sample.of(tokens) for tokens in group.sequences] for group in groups]
                policy.forward_backward(samples, policy.advantages("grpo", [group.scores for group in groups]))

Source: the endpoints of ``atroposlib.api.server`` 0.4.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import httpx
import msgspec
import numpy as np

from headrace.base.clock import RealClock
from headrace.base.errors import DataError, DeadlineError, RunError
from headrace.base.net.shell import HttpServer, ShellLimits
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import PLAIN, RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine.base import Engine
from headrace.models import context_length
from headrace.models.endings import stop_ids
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.config import ServeSection
from headrace.wings.serve.prompts import ServedModel

if TYPE_CHECKING:
    from headrace.policy import Policy

UNMARKED = -100
"""The mask value of a token that is not to be trained."""
POLL_S = 0.25
"""Pause between two requests for a batch while there is none, in seconds."""
REMEMBERED = 1 << 24
"""Capacity of :class:`Answers` in tokens of prompts and answers; the oldest prompts are forgotten first."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer tells Atropos' API server about itself: the fields of ``/register``."""

    batch_size: int
    """Number of sequences in a batch."""
    max_token_len: int
    """Length of the longest sequence, in tokens."""
    num_steps: int
    """Number of batches that the trainer will take."""
    starting_step: int = 0
    """Number of the first batch."""
    wandb_group: str = "headrace"
    """Group under which environments log to Weights & Biases."""
    wandb_project: str = "headrace"
    """Project under which environments log to Weights & Biases."""
    checkpoint_dir: str = ""
    """Directory in which environments save their own state; empty: their working directory."""
    save_checkpoint_interval: int = -1
    """Number of steps between two saved states of an environment; -1: none is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposGroup:
    """A group: the scored answers to one question, as a training loop gets them."""

    sequences: list[Tokens]
    """Prompt and answers of each sequence, with the recorded log-probabilities and versions."""
    scores: list[float]
    """The score that the environment gave each sequence."""


class _Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A group in the form in which Atropos' API server sends it, with one element for each sequence."""

    tokens: list[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]]
    """The token ids of each sequence, prompt and answers together."""
    masks: list[list[int]]
    """For each token, -100 if it is not to be trained, else any other value."""
    scores: list[float]
    """The score of each sequence."""


class Answers:
    """A memory of the answers that the policy's engine sampled, with their log-probabilities and versions, found again
    by the token ids that precede them. :func:`serving` fills it, and :class:`Queue` reads it."""

    def __init__(self, most_tokens: int = REMEMBERED, *, token: str = "") -> None:
        """Keep answers with at most ``most_tokens`` tokens in all, prompts included. ``token`` is the API key that
        environments must send."""
        self._most = most_tokens
        self.token = token
        """The API key that environments must send."""
        self._size = 0
        self._by_prompt: OrderedDict[bytes, list[Tokens]] = OrderedDict()
        self.num_marked = 0
        """Number of tokens that environments marked for training."""
        self.num_unknown = 0
        """Number of marked tokens that the engine did not sample; they carry no loss."""
        self.num_left_out = 0
        """Number of sequences without any sampled token; they are left out of the batches."""

    def keep(self, prompt_ids_T: IntColumn, answer: Tokens) -> None:
        """Remember an ``answer`` to the prompt with these T token ids, and forget the oldest prompts beyond the
        capacity."""
        key = np.asarray(prompt_ids_T, np.int32).tobytes()
        self._by_prompt.setdefault(key, []).append(answer)
        self._size += len(prompt_ids_T) + len(answer)
        while self._size > self._most and len(self._by_prompt) > 1:
            old_prompt, forgotten = self._by_prompt.popitem(last=False)
            self._size -= sum(
                len(old_prompt) // 4 + len(tokens) for tokens in forgotten
            )  # a key has four bytes per token

    def sampled(self, ids: list[int], mask: list[int]) -> Tokens:
        """Return the sequence ``ids`` as tokens: in the spans that ``mask`` marks, the recorded answers with their
        log-probabilities and versions; elsewhere, and where no recorded answer fits, tokens that carry no loss. The
        counts of marked and of unknown tokens are updated."""
        ids_T = np.asarray(ids, np.int32)
        parts: list[Tokens] = []
        done = 0
        for start, end in _spans(mask):
            answer = self._answer(ids_T, start, end)
            parts += [Tokens.observed(ids_T[done:start]), answer]
            done = start + len(answer)
            self.num_marked += end - start
            self.num_unknown += end - done
        return Tokens.concat([*parts, Tokens.observed(ids_T[done:])])

    def _answer(self, ids_T: IntColumn, start: int, end: int) -> Tokens:
        """Return the longest beginning of ``ids_T[start:end]`` that was sampled after the context ``ids_T[:start]``, as
        recorded tokens; no tokens if none was."""
        found = Tokens.observed([])
        for answer in self._by_prompt.get(ids_T[:start].tobytes(), ()):
            length = min(len(answer), end - start)
            # argmin finds the first False: the appended one marks the end of a full match
            same = np.append(answer.ids_T[:length] == ids_T[start : start + length], False)
            common = int(np.argmin(same))
            if common > len(found):
                found = answer[:common]
        return found


@asynccontextmanager
async def serving(policy: Policy, *, port: int = 0, name: str = "policy", token: str = "") -> AsyncIterator[Answers]:
    """Serve the policy over OpenAI's completions and chat completions at ``127.0.0.1:port`` (0: a free port) for the
    body of ``async with``, with the weights that were published last, and yield the memory of its answers. A client
    must send ``token`` as its API key; if it is empty, a random one is generated. ``name`` is the model's name in
    requests."""
    config, tokenizer = policy.config, policy.tokenizer
    answers = Answers(token=token or secrets.token_urlsafe(24))
    recorder = _Recorder(policy.engine, answers, config.engine.temperature)
    path = config.model.path
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode") as encoder:
        service = Service(
            engine=cast("Engine", recorder),
            tokenizer=ServedTokenizer(tokenizer, stop_ids(path, tokenizer.eos_token_id)),
            served=ServedModel(
                name=name, max_context=config.engine.max_context or context_length(path), settings=ServeSection()
            ),
            clock=RealClock(),
            encoder=encoder,
        )
        server = HttpServer(make_app(ServerState(service=service), answers.token), ShellLimits(max_connections=1024))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(server.serve([socket.create_server(("127.0.0.1", port))]))
            try:
                yield answers
            finally:
                server.should_exit = True
                await asyncio.wait({running})


@asynccontextmanager
async def registered(
    url: str, answers: Answers, registration: Registration, *, timeout_s: float = 600.0
) -> AsyncIterator[Queue]:
    """Register this trainer with Atropos' API server at ``url``, and yield the queue of its batches for the body of
    ``async with``. ``answers`` are those that the policy has sampled, as yielded by :func:`serving`; ``timeout_s`` is
    the longest wait for a batch, in seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        queue = Queue(client, answers, timeout_s)
        await queue.ask("POST", "/register", msgspec.to_builtins(registration))
        yield queue


class Queue:
    """The batches of Atropos' API server, as :func:`registered` yields them."""

    def __init__(self, client: httpx.AsyncClient, answers: Answers, timeout_s: float) -> None:
        """Ask the server by ``client``; ``answers`` are those that the policy has sampled, and ``timeout_s`` is the
        longest wait for a batch, in seconds."""
        self._client = client
        self._answers = answers
        self._timeout_s = timeout_s

    async def batches(self) -> AsyncIterator[list[AtroposGroup]]:
        """Yield the groups of one batch after another, without end. Sequences without any sampled token are left out
        and counted; groups without any sequence are left out.

        Raises :class:`~headrace.base.errors.DeadlineError` if no batch arrives within the queue's ``timeout_s``.
        """
        while True:
            batch = await self._next()
            groups = [self._group(scored) for scored in batch]
            if any(group.sequences for group in groups):
                yield [group for group in groups if group.sequences]

    async def ask(self, method: str, path: str, tree: Any = None) -> Any:
        """Send one request and return the server's JSON answer.

        Raises :class:`~headrace.base.errors.RunError` if the server does not answer.
        """
        try:
            response = await self._client.request(method, path, json=tree)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RunError(
                f"Atropos' API server at {self._client.base_url} does not answer {path}: {error}",
                remedy="start it with run-api, and give its URL",
            ) from None

    async def _next(self) -> list[_Scored]:
        """Ask the API server until it has a batch, and return its groups. Raises
        :class:`~headrace.base.errors.DeadlineError` if it has none for too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not (batch := await self._poll()):  # noqa: ASYNC110 - the queue is in another process, which cannot set an event here
                    await asyncio.sleep(POLL_S)
                return batch
        except TimeoutError:
            raise DeadlineError(
                f"Atropos' API server had no batch for {self._timeout_s:g} s",
                remedy="is an environment running, and does it reach the policy?",
            ) from None

    async def _poll(self) -> list[_Scored]:
        """Ask the API server for a batch once; return its groups, or an empty list if it has none yet."""
        return read_batch(await self.ask("GET", "/batch"))

    def _group(self, scored: _Scored) -> AtroposGroup:
        """Return a scored group with the tokens as the policy has sampled them. Sequences of which it has sampled
        nothing are left out and counted."""
        group = AtroposGroup(sequences=[], scores=[])
        for ids, mask, score in zip(scored.tokens, scored.masks, scored.scores, strict=True):
            tokens = self._answers.sampled(ids, mask)
            if not tokens.sampled_T.any():
                self._answers.num_left_out += 1
                continue
            group.sequences.append(tokens)
            group.scores.append(score)
        return group


class _Recorder:
    """An engine that passes everything on to ``engine``, and puts finished answers into ``answers``. Only those sampled
    at ``temperature``, the policy's own, are kept, because others cannot be trained."""

    def __init__(self, engine: Engine, answers: Answers, temperature: float) -> None:
        self._engine = engine
        self._answers = answers
        self._temperature = temperature

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped engine, for everything but :meth:`generate`."""
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample with the wrapped engine and yield its chunks, and keep the finished answer."""
        sampling = msgspec.structs.replace(sampling, record_kept=sampling.truncated)
        parts: list[Tokens] = []
        async with aclosing(self._engine.generate(prompt_ids_T, sampling, options)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                parts = [chunk.tokens] if chunk.lost else [*parts, chunk.tokens]
                if chunk.stop_reason is not None and sampling.temperature == self._temperature:
                    self._answers.keep(prompt_ids_T, Tokens.concat(parts))
                yield chunk


def _spans(mask: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end (exclusive) of each span of tokens that the mask marks.

    >>> list(_spans([-100, 5, 6, -100, 7]))
    [(1, 3), (4, 5)]
    """
    marked = np.asarray([False, *(value != UNMARKED for value in mask), False])
    edges = np.flatnonzero(marked[1:] != marked[:-1]).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def read_batch(answer: Any) -> list[_Scored]:
    """Return the groups of an answer to ``/batch``; an empty list while there is no batch.

    Raises :class:`~headrace.base.errors.RunError` for an error of the server, and
    :class:`~headrace.base.errors.DataError` for a group that cannot be used.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("batch") or [], list):
        raise RunError("Atropos' API server answers /batch with no batch", remedy="is it Atropos' API server?")
    if answer.get("status") == "error":
        raise RunError(f"Atropos' API server: {answer.get('message')}", remedy="register again")
    return [_scored(tree) for tree in answer.get("batch") or ()]


def _scored(tree: Any) -> _Scored:
    """Return the group that ``tree``, a part of the server's JSON, holds. Raises
    :class:`~headrace.base.errors.DataError` if fields are missing, or if tokens, masks and scores do not have equal
    lengths."""
    try:
        scored = msgspec.convert(tree, _Scored, strict=False)
    except msgspec.ValidationError as error:
        raise DataError(f"a group of Atropos' API server: {error}", remedy="fix the environment") from None
    lengths = [len(ids) for ids in scored.tokens]
    if len(scored.scores) != len(lengths) or [len(mask) for mask in scored.masks] != lengths:
        raise DataError(
            f"a group of Atropos' API server has {len(lengths)} sequences, {len(scored.masks)} masks and "
            f"{len(scored.scores)} scores, or masks of another length than their tokens",
            remedy="fix the environment",
        )
    return scored
