"""Fakes of engine, learner and scorer for tests of the controller. They fulfil the contracts of the real components,
and their work takes virtual time.

Virtual time (:class:`~headrace.base.clock.VirtualClock`) advances only while all tasks sleep, and then without a real
wait, so that a run of hours takes a moment. No model is computed: tokens, weights and rewards are simple functions of
their inputs. Shape legend: T tokens, N tokens of a batch, K vocabulary entries.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.clock import VirtualClock
from headrace.base.errors import RequestError, WeightsError
from headrace.base.types.batch import Batch
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import EngineStats, StepReport
from headrace.base.types.outline import BatchOutline
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.task import Task
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.weights import Interrupt, Manifest, SwapReport, WeightUpdate
from headrace.control import Components
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.flow.layout import inline, lay_out
from headrace.learner.base import Publication
from headrace.rollout.environments import SingleTurn
from headrace.rollout.scoring import NO_CONTEXT, Scores, ScoringContext

CHUNK_TOKENS = 16
"""The largest number of tokens in one chunk of an answer."""
_EMPTY = Manifest(entries=(), total_bytes=0)
"""The manifest of weights without tensors."""


class FakeEngine:
    """A fake engine that generates tokens at a constant rate per sequence, independent of the number of sequences. The
    id of each token is the policy version that sampled it, modulo 1,000, and its logprob is −1.
    """

    def __init__(self, *, token_s: float = 0.01, length: Callable[[int], int] = lambda _: 16) -> None:
        """Create an engine without weights. A token takes ``token_s`` seconds of virtual time; ``length`` returns the
        number of tokens of an answer from the seed of its request."""
        self._token_s = token_s
        self._length = length
        self._staged = -1
        """The version that is staged; −1 if there is none."""
        self._not_paused = asyncio.Event()
        """The event that is set unless the engine is paused."""
        self._not_paused.set()
        self._stats = EngineStats()
        """The counters of the engine."""
        self.commits: list[int] = []
        """The versions that were committed, in order, for a test to read."""

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Yield an answer in chunks, each after the virtual time that its tokens take. Answer tokens that ``options``
        already contains count towards the length and are not yielded again. The answer ends with ``STOP``, or with
        ``LENGTH`` if it is truncated at ``sampling.max_new_tokens``."""
        if self._stats.version < 0:
            raise RequestError("no weights are committed", remedy="publish before the first rollout")
        drawn_length = self._length(sampling.seed)
        total = min(drawn_length, sampling.max_new_tokens)
        self._count(running=1)
        try:
            sent = 0 if options.answer_ids_T is None else len(options.answer_ids_T)
            while sent < total:
                size = min(CHUNK_TOKENS, total - sent)
                version = self._stats.version
                await asyncio.sleep(size * self._token_s)
                await self._not_paused.wait()
                sent += size
                self._count(generated_tokens=size, busy_s=size * self._token_s)
                yield TokenChunk(tokens=_tokens(version, size), stop_reason=_stop_reason(sent, total, drawn_length))
        finally:
            self._count(running=-1)

    async def stage(self, update: WeightUpdate) -> float:
        """Stage a version, which takes the virtual time of one token, and return this time in seconds. Raises
        :class:`~headrace.base.errors.WeightsError` for a version that is not newer than the committed one."""
        if update.version <= self._stats.version:
            raise WeightsError(f"version {update.version} is old", remedy="publish versions in order")
        await asyncio.sleep(self._token_s)
        self._staged = update.version
        return self._token_s

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """Return the recorded logprobs of the tokens, as if the weights had not changed since they were sampled."""
        return tokens.logprobs_T

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return the recorded logprobs of the tokens and, as the ``num`` most likely entries of each token, token 0
        with the logprob 0."""
        ids_TK = np.zeros((len(tokens), num), np.int32)
        return TopScores(logprobs_T=tokens.logprobs_T, ids_TK=ids_TK, logs_TK=ids_TK.astype(np.float32))

    async def pause(self, *, release: bool = False) -> None:
        """Yield no more chunks until :meth:`resume`, or until a commit with ``Interrupt.SLEEP``."""
        self._not_paused.clear()

    async def resume(self) -> None:
        """Yield chunks again after :meth:`pause`."""
        self._not_paused.set()

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Commit the staged version, which samples all later chunks, and return a report according to which all running
        sequences continue and the gap is 0 s. Raises :class:`~headrace.base.errors.WeightsError` for a version that is
        not staged."""
        if version != self._staged:
            raise WeightsError(f"version {version} is not staged", remedy="stage it first")
        await asyncio.sleep(0)
        self._stats = msgspec.structs.replace(self._stats, version=version)
        self.commits.append(version)
        if mode is Interrupt.SLEEP:
            self._not_paused.set()
        return SwapReport(version=version, gap_s=0.0, carried_over=self._stats.running, restarted=0, mode=mode)

    def stats(self) -> EngineStats:
        """Return the counters: generated tokens, busy time, running sequences and the committed version."""
        return self._stats

    def _count(self, **changes: float) -> None:
        """Add each number in ``changes`` to the counter of the same name, which :meth:`stats` returns."""
        changed: dict[str, Any] = {name: getattr(self._stats, name) + change for name, change in changes.items()}
        self._stats = msgspec.structs.replace(self._stats, **changed)


def _tokens(version: int, size: int) -> Tokens:
    """Return ``size`` tokens of the policy version ``version``, whose ids are the version modulo 1,000."""
    return Tokens(
        ids_T=np.full(size, version % 1000, np.int32),
        logprobs_T=np.full(size, -1.0, np.float32),
        versions_T=np.full(size, version, np.int32),
    )


def _stop_reason(num_sent: int, total: int, drawn_length: int) -> StopReason | None:
    """Return the stop reason of an answer of ``total`` tokens; ``None`` while fewer than these are sent. The answer is
    truncated if ``total`` is less than ``drawn_length``."""
    if num_sent < total:
        return None
    return StopReason.STOP if drawn_length == total else StopReason.LENGTH


class FakeLearner:
    """A fake learner that takes a constant virtual time per token. Its "weights" are a hash of all trained batches in
    order, so that two runs have equal weights only if they trained the same batches."""

    def __init__(self, *, token_s: float = 0.0001, snapshot_s: float = 0.001) -> None:
        """Create a learner. Training takes ``token_s`` seconds for each token, and a copy of the weights
        ``snapshot_s``."""
        self._token_s = token_s
        self._snapshot_s = snapshot_s
        self._one_call = asyncio.Lock()
        """The lock that is held during a call, so that calls are executed one after the other."""
        self.weights = "0" * 32
        """The current weights: a hash of 32 hexadecimal digits."""
        self._slots: dict[int, str] = {}
        """The weights in each slot of the buffer, by the slot's index."""
        self._busy_from_s: float | None = None
        """The time at which the running call began; ``None`` between calls."""
        self.batches: list[Batch] = []
        """The batches that were trained, in order, for a test to read."""

    def num_signs(self) -> int:
        """Return a count that increases while the learner works: the number of trained batches plus the seconds of the
        current batch. The controller's stall watchdog reads it."""
        start_s = self._busy_from_s
        return len(self.batches) + (0 if start_s is None else int(VirtualClock().now() - start_s))

    async def step(self, outline: BatchOutline) -> StepReport:
        """Lay out the batch of ``outline``, which refers to no store, and train on it with :meth:`train`."""
        laid_out = lay_out(outline, inline)
        return laid_out.complete_report(await self.train(laid_out.batch))

    async def train(self, batch: Batch) -> StepReport:
        """Train on a batch, which takes ``token_s`` seconds of virtual time for each token, and return a report without
        metrics, in which the learner's logprobs equal the engine's."""
        seconds = batch.num_tokens * self._token_s
        async with self._one_call:
            self._busy_from_s = VirtualClock().now()
            await asyncio.sleep(seconds)
            self._busy_from_s = None
            self._learn(batch)
        return StepReport(
            step=batch.step,
            metrics={},
            trained_tokens=batch.num_loss_tokens,
            dropped_tokens={},
            log_pi_N=np.where(batch.mask_N, batch.logprobs_N, np.float32(np.nan)),
            seconds=seconds,
        )

    def _learn(self, batch: Batch) -> None:
        """Store ``batch``, and replace the weights by a hash of the old weights and the columns of the batch."""
        self.batches.append(batch)
        digest = hashlib.blake2b(self.weights.encode(), digest_size=16)
        for column in (batch.ids_N, batch.logprobs_N, batch.versions_N, batch.advantages_N):
            digest.update(column.tobytes())
        self.weights = digest.hexdigest()

    async def logprobs(self, batch: Batch) -> FloatColumn:
        """Return the engine's logprobs in the batch, ``[N]``, as if engine and learner computed the same values."""
        return batch.logprobs_N

    async def snapshot(self, version: int, slot: int) -> Publication:
        """Copy the weights as version ``version`` to the buffer ``slot``, between two steps, and return the
        publication, which is passed to :meth:`wait_until_published`."""
        async with self._one_call:
            await asyncio.sleep(self._snapshot_s)
            self._slots[slot] = self.weights
        return Publication(version=version, slot=slot, exposed_s=self._snapshot_s)

    async def wait_until_published(self, publication: Publication) -> WeightUpdate:
        """Return the update that an engine stages. It has no tensors; its checksum is a number from the hash of the
        weights."""
        await asyncio.sleep(self._snapshot_s)
        return WeightUpdate(
            version=publication.version,
            slot=publication.slot,
            path="",
            manifest=_EMPTY,
            checksums=(int(self._slots[publication.slot][:15], 16),),
        )

    async def resend(self, publication: Publication) -> WeightUpdate:
        """Return the update again, for an engine that could not use it."""
        return await self.wait_until_published(publication)

    async def save(self, directory: Path) -> None:
        """Write the hash that represents the weights to a text file in ``directory``, between two steps."""
        async with self._one_call:
            (directory / "weights.txt").write_text(self.weights, encoding="utf-8")

    async def wait_until_saved(self, directory: Path) -> None:
        """Return at once, because :meth:`save` has written all files to ``directory``."""

    def restore(self, directory: Path) -> None:
        """Load the weights that :meth:`save` has written to ``directory``."""
        self.weights = (directory / "weights.txt").read_text(encoding="utf-8")


class FakeScorer:
    """A fake scorer that rewards each completion by a function of its text, after a constant virtual time.
    ``by_group`` says whether all completions of a group are scored in one call."""

    def __init__(
        self,
        *,
        seconds: float = 0.1,
        reward: Callable[[str], float | None] = lambda text: float(len(text) % 2),
        by_group: bool = False,
    ) -> None:
        """Create a scorer whose calls take ``seconds`` seconds of virtual time. ``reward`` returns the reward of a
        completion, or ``None`` for no reward. By default the reward is 1 for a text of odd length, otherwise 0."""
        self._seconds = seconds
        self._reward = reward
        self.by_group = by_group

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Return the reward of each completion, in order, after the scorer's delay."""
        await asyncio.sleep(self._seconds)
        return Scores(rewards=tuple(self._reward(text) for text in completions))


def fake_parts(
    run_dir: Path,
    *,
    engine: FakeEngine | None = None,
    learner: FakeLearner | None = None,
    scorer: FakeScorer | None = None,
    num_tasks: int = 32,
) -> Components:
    """Return the components of a run for a controller, with fakes of engine, learner and scorer: the given ones, or new
    ones. There are ``num_tasks`` tasks with prompts of one token. Call it inside
    :func:`headrace.base.clock.run_virtual`, which provides the virtual time."""
    tasks = [
        Task(row_index=index, row={"prompt": str(index)}, prompt=str(index), prompt_ids_T=np.array([index], np.int32))
        for index in range(num_tasks)
    ]
    learner = learner or FakeLearner()
    return Components(
        engine=engine or FakeEngine(),
        learner=learner,
        work_signs=learner.num_signs,
        scorer=scorer or FakeScorer(),
        env=SingleTurn(),
        clock=VirtualClock(),
        tasks=tasks,
        eval_tasks=[],
        sampling=Sampling(max_new_tokens=1024),
        max_context=2048,
        decode=lambda ids: "x" * len(ids),
        advantages=_centred_rewards,
        run_dir=run_dir,
    )


def _centred_rewards(groups: Sequence[ScoredGroup]) -> list[float]:
    """Return the advantage of each episode of ``groups`` that counts in a baseline, in order: its reward minus the mean
    reward of its group. A missing reward counts as 0."""
    advantages: list[float] = []
    for group in groups:
        rewards = [episode.reward or 0.0 for episode in group.counted]
        mean = sum(rewards) / len(rewards)
        advantages += [reward - mean for reward in rewards]
    return advantages


def lognormal_lengths(mean: float, cv: float, cap: int) -> Callable[[int], int]:
    """Return a function that maps a seed to a length in tokens. Lengths have a lognormal distribution with this mean
    and coefficient of variation, limited to the range from 1 to ``cap``.

    >>> length = lognormal_lengths(mean=100, cv=1.0, cap=1000)
    >>> length(7) == length(7)
    True
    """
    sigma = float(np.sqrt(np.log1p(cv**2)))
    mu = float(np.log(mean)) - sigma**2 / 2

    def length(seed: int) -> int:
        """Return the length for ``seed``, in tokens."""
        drawn = np.random.default_rng(seed).lognormal(mu, sigma)
        return int(np.clip(round(drawn), 1, cap))

    return length
