"""Random lives of an engine, and what each of its requests gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import msgspec
import numpy as np
import torch

from headrace.engine.native import NativeEngine
from headrace.errors import RequestError
from headrace.types.episode import StopReason
from headrace.types.messages.controller import Chunk
from headrace.types.messages.engine import Fork, GenerateRequest, StaleFork
from headrace.types.tokens import Tokens
from headrace.types.versions import oldest
from headrace.types.weights import Interrupt
from tests.engine.harness import Weights, alone, joined, logprobs, request

POOL = 12
MODES = tuple(Interrupt)
COMMON = tuple(np.random.default_rng(99).integers(3, 40, 22).tolist())


def pooled(which: int, request_id: int = 0, pinned: bool = False) -> GenerateRequest:
    """Half of them begin with the same tokens."""
    rng = np.random.default_rng(which)
    prompt = [*(COMMON[: 16 + which] if which % 2 else ()), *rng.integers(3, 40, rng.integers(1, 14))]
    made = request(
        request_id,
        prompt,
        max_new_tokens=int(rng.integers(1, 22)),
        temperature=(1.0, 0.0, 0.8)[which % 3],
        seed=which,
        stop_ids=(3, 4) if which % 4 == 0 else (),
    )
    return msgspec.structs.replace(made, priority=which % 3, pinned=pinned)


@dataclass
class Asked:
    """One request of a life: what it begins with, and what is sampled of it alone."""

    request: GenerateRequest
    given: list[int]
    which: int
    """Its place in the pool."""
    aborted: bool = False


@dataclass
class Life:
    """One engine whose versions all hold the same weights, so that no schedule may change a token."""

    engine: NativeEngine
    weights: Weights
    reference: torch.nn.Module
    version: int = 0
    next_id: int = 0
    pending: bool = False
    asked: dict[int, Asked] = field(default_factory=dict)
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    modes: list[Interrupt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._alone: Callable[[tuple[int, ...], int], tuple[list[int], np.ndarray]] = cache(self._sample)

    def _sample(self, given: tuple[int, ...], which: int) -> tuple[list[int], np.ndarray]:
        sampling = pooled(which).sampling
        asked = GenerateRequest(request_id=0, prompt_ids_T=np.array(given, np.int32), sampling=sampling)
        sampled = alone(self.reference, asked)
        if sampling.temperature == 0:
            return sampled, np.zeros(len(sampled))
        return sampled, logprobs(self.reference, list(given), sampled, sampling.temperature)

    def add(self, which: int, pinned: bool) -> None:
        made = pooled(which, self.next_id, pinned)
        self._add(made, made.prompt_ids_T.tolist(), which)

    def fork(self, rng: np.random.Generator, which: int) -> None:
        if not self.asked:
            return
        parent = int(rng.choice(list(self.asked)))
        known = self.asked[parent]
        sampled = self.tokens(parent).ids_T.tolist()
        at = int(rng.integers(0, len(sampled) + 1))
        if len(known.given) + at + 22 > 96:
            return
        stale = StaleFork.REUSE if which % 2 else StaleFork.RECOMPUTE
        made = msgspec.structs.replace(
            pooled(which, self.next_id),
            prompt_ids_T=np.zeros(0, np.int32),
            fork=Fork(parent=parent, at=at, stale=stale),
        )
        try:
            self._add(made, known.given + sampled[:at], which)
        except RequestError:
            if Interrupt.ABORT_RETRY not in self.modes:  # else its parent has begun again, which we have yet to hear
                raise

    def _add(self, made: GenerateRequest, given: list[int], which: int) -> None:
        self.engine.add(made)
        self.asked[self.next_id] = Asked(request=made, given=given, which=which)
        self.next_id += 1

    def keep(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk.restarted:
                self.chunks[chunk.request_id] = []
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
        for report in self.engine.take_swaps():
            assert report.version == self.version
            self.pending = False

    def tokens(self, request_id: int) -> Tokens:
        return joined(self.chunks.get(request_id, []))

    def commit(self, mode: Interrupt) -> None:
        if self.pending:
            return
        self.version += 1
        self.pending = True
        self.modes.append(mode)
        self.weights.stage(self.engine, self.version)
        self.engine.commit(self.version, mode)
        self.keep([])

    def step(self) -> None:
        before = self.engine.stats()
        self.keep(self.engine.step())
        after = self.engine.stats()
        moved = after.generated_tokens > before.generated_tokens or after.prompt_tokens > before.prompt_tokens
        assert moved or after.steps > before.steps
        assert after.cache_blocks_used <= after.cache_blocks

    def live(self, rng: np.random.Generator, num_actions: int) -> None:
        """Random actions, then on to the end of all requests."""
        for _ in range(num_actions):
            action = rng.choice(["add", "add", "fork", "step", "step", "step", "abort", "commit", "pause"])
            if action == "add":
                self.add(int(rng.integers(POOL)), bool(rng.random() < 0.2))
            elif action == "fork":
                self.fork(rng, int(rng.integers(POOL)))
            elif action == "commit":
                self.commit(MODES[rng.integers(len(MODES))])
            elif action == "pause":
                self.engine.pause(release=bool(rng.integers(2)))
                assert not self.engine.has_work()
                self.engine.resume()
            elif action == "abort" and self.asked:
                self.abort(int(rng.choice(list(self.asked))))
            else:
                self.steps(int(rng.integers(1, 7)))
        self.steps(5000)
        assert not self.engine.has_work(), "it does not come to an end"

    def steps(self, most: int) -> None:
        for _ in range(most):
            if not self.engine.has_work():
                return
            self.step()

    def abort(self, victim: int) -> None:
        last = self.engine.abort([victim, -7])
        for chunk in last:
            self.asked[chunk.request_id].aborted = True
        self.keep(last)

    def check(self) -> None:
        """Every request has got what it gets alone, once."""
        for request_id, asked in self.asked.items():
            chunks, tokens = self.chunks[request_id], self.tokens(request_id)
            expected, expected_logprobs = self._alone(tuple(asked.given), asked.which)
            assert np.all(np.diff(oldest(tokens.versions_T)) >= 0)
            if asked.request.pinned:
                assert len(set(tokens.versions_T.tolist())) <= 1
            if asked.aborted:
                assert chunks[-1].stop_reason == StopReason.ABORTED
            else:
                stopped = expected[-1] in asked.request.sampling.stop_ids
                assert chunks[-1].stop_reason == (StopReason.STOP if stopped else StopReason.LENGTH)
                assert len(tokens) == len(expected)
            assert tokens.ids_T.tolist() == expected[: len(tokens)], (request_id, asked)
            np.testing.assert_allclose(tokens.logprobs_T, expected_logprobs[: len(tokens)], atol=1e-4)
        self.engine._pool.check([])
        stats = self.engine.stats()
        assert stats.running == stats.waiting == stats.cache_blocks_used == 0
        assert self.engine._pins.num_bytes == 0
        self.asked.clear()
        self.chunks.clear()
