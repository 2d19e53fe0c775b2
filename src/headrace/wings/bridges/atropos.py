"""The trainer's side of Atropos, for user-written training loops: environments run as separate services and fill a
queue of scored groups, from which the loop receives its batches.

    environments ──/v1/chat/completions──▶ serving(policy) ─▶ the policy's engine ─▶ sampled answers are stored
         │ /register-env, /scored_data, /scored_data_list                                   │
         ▼                                                                                  ▼
    Atropos' API server (``run-api``) ──/register, /batch──▶ Queue.batches ─▶ ids, logprobs and versions of the answers

Environments send only token ids and masks. Log-probabilities and versions are copied from the stored answers, which are
matched token by token. A token that a mask marks but the engine has not sampled carries no loss, and is counted.

    async with policy, serving(policy, port=9001, token=TOKEN) as answers:
        async with registered("http://127.0.0.1:8000", answers, Registration(batch_size=64, ...)) as queue:
            async for groups in queue.batches():
                samples = [[Sample.from_tokens(tokens) for tokens in group.sequences] for group in groups]
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
"""The mask value of a token that is not trained."""
POLL_S = 0.25
"""Seconds between two requests for a batch while no batch is ready."""
REMEMBERED = 1 << 24
"""Capacity of :class:`Answers` in tokens of prompts and answers; the oldest prompts are removed first."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's registration with Atropos' API server: the fields of ``/register``."""

    batch_size: int
    """Number of sequences in a batch."""
    max_token_len: int
    """Length of the longest sequence, in tokens."""
    num_steps: int
    """Number of batches that the trainer will request."""
    starting_step: int = 0
    """Number of the first batch."""
    wandb_group: str = "headrace"
    """Group under which environments log to Weights & Biases."""
    wandb_project: str = "headrace"
    """Project under which environments log to Weights & Biases."""
    checkpoint_dir: str = ""
    """Directory in which environments save their state; empty: their working directory."""
    save_checkpoint_interval: int = -1
    """Number of steps between two saved states of an environment; -1: no state is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposGroup:
    """A group of scored answers to one question, as a training loop receives it."""

    sequences: list[Tokens]
    """Prompt and answers of each sequence, with the recorded log-probabilities and versions."""
    scores: list[float]
    """The environment's score of each sequence."""


class _Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A group in the JSON form of Atropos' API server; each field has one element for each sequence."""

    tokens: list[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]]
    """The token ids of each sequence, prompt and answers together."""
    masks: list[list[int]]
    """For each token, -100 if it is not trained, and any other value if it is."""
    scores: list[float]
    """The score of each sequence."""


class Answers:
    """A bounded store of the answers that the policy's engine has sampled, with their log-probabilities and versions,
    by the token ids that precede each answer. :func:`serving` fills the store, and :class:`Queue` reads it."""

    def __init__(self, most_tokens: int = REMEMBERED, *, token: str = "") -> None:
        """Create an empty store for at most ``most_tokens`` tokens in total, prompts included. ``token`` is the API key
        that environments must send."""
        self._max_tokens = most_tokens
        self.token = token
        """The API key that environments must send."""
        self._size = 0
        """Number of stored tokens, prompts included."""
        self._answers_by_prompt: OrderedDict[bytes, list[Tokens]] = OrderedDict()
        """The answers to each prompt, whose token ids as bytes are the key; the oldest prompt first."""
        self.num_marked = 0
        """Number of tokens that environments have marked for training."""
        self.num_unknown = 0
        """Number of marked tokens that the engine has not sampled, and which carry no loss."""
        self.num_left_out = 0
        """Number of sequences without any sampled token, which are left out of the batches."""

    def keep(self, prompt_ids_T: IntColumn, answer: Tokens) -> None:
        """Store an ``answer`` to the prompt ``prompt_ids_T``, and remove the oldest prompts if the capacity is
        exceeded."""
        key = np.asarray(prompt_ids_T, np.int32).tobytes()
        self._answers_by_prompt.setdefault(key, []).append(answer)
        self._size += len(prompt_ids_T) + len(answer)
        while self._size > self._max_tokens and len(self._answers_by_prompt) > 1:
            old_prompt, forgotten = self._answers_by_prompt.popitem(last=False)
            self._size -= sum(
                len(old_prompt) // 4 + len(tokens) for tokens in forgotten
            )  # a key has four bytes per token

    def sampled(self, ids: list[int], mask: list[int]) -> Tokens:
        """Return the sequence ``ids`` as tokens. In the spans that ``mask`` marks, these are the stored answers with
        their log-probabilities and versions. Outside these spans, and where no stored answer matches, the tokens carry
        no loss. The counts of marked and of unknown tokens are updated."""
        ids_T = np.asarray(ids, np.int32)
        parts: list[Tokens] = []
        position = 0
        for start, end in _marked_spans(mask):
            answer = self._answer(ids_T, start, end)
            parts += [Tokens.observed(ids_T[position:start]), answer]
            position = start + len(answer)
            self.num_marked += end - start
            self.num_unknown += end - position
        return Tokens.concat([*parts, Tokens.observed(ids_T[position:])])

    def _answer(self, ids_T: IntColumn, start: int, end: int) -> Tokens:
        """Return the longest prefix of ``ids_T[start:end]`` that the engine has sampled after the context
        ``ids_T[:start]``, as stored tokens; an empty column of tokens if no stored answer matches."""
        found = Tokens.observed([])
        for answer in self._answers_by_prompt.get(ids_T[:start].tobytes(), ()):
            length = min(len(answer), end - start)
            # argmin finds the first False: the appended one marks the end of a full match
            same = np.append(answer.ids_T[:length] == ids_T[start : start + length], False)
            common = int(np.argmin(same))
            if common > len(found):
                found = answer[:common]
        return found


@asynccontextmanager
async def serving(policy: Policy, *, port: int = 0, name: str = "policy", token: str = "") -> AsyncIterator[Answers]:
    """Serve the policy over OpenAI's completions and chat completions at ``127.0.0.1:port`` (0: a free port) while the
    body of ``async with`` runs, and yield the store of its answers. Requests are answered with the last published
    weights. Clients must send ``token`` as their API key; an empty ``token`` is replaced by a random key, in
    ``Answers.token``. ``name`` is the model's name in requests."""
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
    """Register this trainer with Atropos' API server at ``url``, and yield the queue of the server's batches for the
    body of ``async with``. ``answers`` is the store of the policy's answers that :func:`serving` yields; ``timeout_s``
    is the longest wait for a batch, in seconds. ``registration`` has the fields of the registration."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        queue = Queue(client, answers, timeout_s)
        await queue.ask("POST", "/register", msgspec.to_builtins(registration))
        yield queue


class Queue:
    """A client of the queue of batches in Atropos' API server; :func:`registered` yields it."""

    def __init__(self, client: httpx.AsyncClient, answers: Answers, timeout_s: float) -> None:
        """Create the queue for the server of ``client``. ``answers`` is the store of the policy's answers, and
        ``timeout_s`` the longest wait for a batch, in seconds."""
        self._client = client
        self._answers = answers
        self._timeout_s = timeout_s

    async def batches(self) -> AsyncIterator[list[AtroposGroup]]:
        """Yield the groups of each batch, without end. Sequences without any sampled token are left out and counted;
        groups without any sequence are left out.

        Raises :class:`~headrace.base.errors.DeadlineError` if no batch arrives within the queue's ``timeout_s``.
        """
        while True:
            batch = await self._next_batch()
            groups = [self._match_group(scored) for scored in batch]
            if any(group.sequences for group in groups):
                yield [group for group in groups if group.sequences]

    async def ask(self, method: str, path: str, tree: Any = None) -> Any:
        """Send one request with the HTTP ``method`` to ``path`` with the JSON body ``tree`` (``None``: no body), and
        return the server's JSON answer.

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

    async def _next_batch(self) -> list[_Scored]:
        """Request a batch repeatedly until one is ready, and return its groups. Raises
        :class:`~headrace.base.errors.DeadlineError` if no batch is ready within the queue's ``timeout_s``."""
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
        """Request a batch once, and return its groups; an empty list if no batch is ready."""
        return read_batch(await self.ask("GET", "/batch"))

    def _match_group(self, scored: _Scored) -> AtroposGroup:
        """Return the group ``scored`` with the tokens that the policy has sampled. Sequences without any sampled token
        are left out and counted."""
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
    """A wrapper of an engine that stores finished answers. Only answers that were sampled at the policy's temperature
    are stored, because the learner cannot train others."""

    def __init__(self, engine: Engine, answers: Answers, temperature: float) -> None:
        """Wrap ``engine``, and store its answers in ``answers`` if they were sampled at ``temperature``."""
        self._engine = engine
        self._answers = answers
        self._temperature = temperature

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name`` of the wrapped engine, for all attributes except :meth:`generate`."""
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample an answer to ``prompt_ids_T`` with the wrapped engine, yield its chunks, and store the finished
        answer. ``sampling`` and ``options`` are the settings of the request."""
        sampling = msgspec.structs.replace(sampling, record_kept=sampling.truncated)
        parts: list[Tokens] = []
        async with aclosing(self._engine.generate(prompt_ids_T, sampling, options)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                parts = [chunk.tokens] if chunk.lost else [*parts, chunk.tokens]
                if chunk.stop_reason is not None and sampling.temperature == self._temperature:
                    self._answers.keep(prompt_ids_T, Tokens.concat(parts))
                yield chunk


def _marked_spans(mask: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each span of tokens that the mask marks; the end is exclusive.

    >>> list(_marked_spans([-100, 5, 6, -100, 7]))
    [(1, 3), (4, 5)]
    """
    marked = np.asarray([False, *(value != UNMARKED for value in mask), False])
    edges = np.flatnonzero(marked[1:] != marked[:-1]).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def read_batch(answer: Any) -> list[_Scored]:
    """Return the groups in an answer of ``/batch``; an empty list if no batch is ready.

    Raises :class:`~headrace.base.errors.RunError` for an error of the server, and
    :class:`~headrace.base.errors.DataError` for a group that cannot be used.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("batch") or [], list):
        raise RunError("Atropos' API server answers /batch with no batch", remedy="is it Atropos' API server?")
    if answer.get("status") == "error":
        raise RunError(f"Atropos' API server: {answer.get('message')}", remedy="register again")
    return [_decode_group(tree) for tree in answer.get("batch") or ()]


def _decode_group(tree: Any) -> _Scored:
    """Return the group in ``tree``, a part of the server's JSON answer. Raises
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
