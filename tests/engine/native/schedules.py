"""Random lives of an engine, and what each of its requests gets alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from headrace.base.errors import RequestError
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, StaleFork
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import oldest
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models.routing import find_routing
from tests.engine.native.alone import Alone, decode, sample_alone
from tests.engine.native.harness import ManualClock, Weights, joined, request

POOL = 24
MODES = tuple(Interrupt)
COMMON = tuple(np.random.default_rng(99).integers(3, 40, 22).tolist())


def pooled(which: int, request_id: int = 0, *, pinned: bool = False, routed: bool = False) -> GenerateRequest:
    """Half of them begin with the same tokens; every rule of sampling is somebody's, alone and with others. With
    ``routed`` some record their routing."""
    rng = np.random.default_rng(which)
    prompt = [*(COMMON[: 16 + which] if which % 2 else ()), *rng.integers(3, 40, rng.integers(1, 14))]
    truncation = ({}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "min_p": 0.03})[which % 4]
    penalties = ({}, {"presence_penalty": 0.7}, {"repetition_penalty": 1.3, "frequency_penalty": 0.2})[which % 3]
    made = request(
        request_id,
        prompt,
        max_new_tokens=int(rng.integers(1, 22)),
        temperature=(1.0, 0.0, 0.8)[which % 3],
        seed=which,
        stop_ids=(3, 4) if which % 4 == 0 else (),
        stop=(decode([7]), decode([11, 12]), decode([23])) if which % 5 == 0 else (),
        logit_bias={5: 1.5, 9: -50.0} if which % 5 == 2 else {},
        record_kept=which % 2 == 0,
        record_entropy=which % 5 != 1,
        record_routing=routed and which % 3 != 1,
        **truncation,
        **penalties,
    )
    deadline_s = float(rng.integers(5, 40)) if which % 6 == 4 else None
    return msgspec.structs.replace(made, priority=which % 3, pinned=pinned, deadline_s=deadline_s)


@dataclass
class Asked:
    """One request of a life: what it begins with, and what is sampled of it alone."""

    request: GenerateRequest
    given: list[int]
    num_prompt: int
    """How many of these nobody sampled."""
    due_s: float
    """When its time is up."""
    ended_s: float = 0.0
    aborted: bool = False


@dataclass
class Life:
    """One engine whose versions all hold the same weights, so that no schedule may change a token. A step takes a
    second."""

    engine: NativeEngine
    weights: Weights
    reference: torch.nn.Module
    clock: ManualClock
    version: int = 0
    next_id: int = 0
    pending: bool = False
    asked: dict[int, Asked] = field(default_factory=dict)
    chunks: dict[int, list[TokenChunk]] = field(default_factory=dict)
    modes: list[Interrupt] = field(default_factory=list)
    ends: Counter[StopReason] = field(default_factory=Counter)
    """How often requests of the lives so far have ended for each reason."""

    def __post_init__(self) -> None:
        self._routed = find_routing(self.engine._model) is not None
        self._alone: dict[tuple[tuple[int, ...], int, int], Alone] = {}

    def alone(self, asked: Asked) -> Alone:
        """What it gets alone."""
        key = tuple(asked.given), asked.num_prompt, asked.request.sampling.seed  # which names its place in the pool
        if key not in self._alone:
            self._alone[key] = sample_alone(self.reference, asked.request.sampling, asked.given, asked.num_prompt)
        return self._alone[key]

    def add(self, which: int, pinned: bool) -> None:
        made = pooled(which, self.next_id, pinned=pinned, routed=self._routed)
        given = made.prompt_ids_T.tolist()
        self._add(made, given, len(given))

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
            pooled(which, self.next_id, routed=self._routed),
            prompt_ids_T=np.zeros(0, np.int32),
            fork=ForkRequest(parent=parent, at=at, stale=stale),
        )
        try:
            self._add(made, known.given + sampled[:at], known.num_prompt)
        except RequestError:
            if Interrupt.ABORT_RETRY not in self.modes:  # else its parent has begun again, which we have yet to hear
                raise

    def _add(self, made: GenerateRequest, given: list[int], num_prompt: int) -> None:
        self.engine.add(made)
        due_s = self.clock.time_s + (made.deadline_s or np.inf)
        self.asked[self.next_id] = Asked(request=made, given=given, num_prompt=num_prompt, due_s=due_s)
        self.next_id += 1

    def keep(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.lost:
                self.chunks[chunk.request_id] = []
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
            self.asked[chunk.request_id].ended_s = self.clock.time_s
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
        self.clock.time_s += 1.0
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
                self.stand_still(rng)
            elif action == "abort" and self.asked:
                self.abort(int(rng.choice(list(self.asked))))
            else:
                self.steps(int(rng.integers(1, 7)))
        self.steps(5000)
        assert not self.engine.has_work(), "it does not come to an end"

    def stand_still(self, rng: np.random.Generator) -> None:
        """For a while; only deadlines pass."""
        self.engine.pause(release=bool(rng.integers(2)))
        for _ in range(int(rng.integers(3))):
            self.clock.time_s += 1.0
            if self.engine.has_work():
                before = self.engine.stats().generated_tokens
                self.keep(self.engine.step())
                assert self.engine.stats().generated_tokens == before
        assert not self.engine.has_work()
        if rng.random() < 0.3:
            self.commit(Interrupt.SLEEP)
        self.engine.resume()

    def steps(self, max_steps: int) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()

    def abort(self, victim: int) -> None:
        last = self.engine.abort([victim, -7])
        for chunk in last:  # with what others have yet to hear
            self.asked[chunk.request_id].aborted |= chunk.request_id == victim
        self.keep(last)

    def check(self) -> None:
        """Every request has got what it gets alone, once, with all that was to be recorded of it."""
        for request_id, asked in self.asked.items():
            chunks, tokens, alone = self.chunks[request_id], self.tokens(request_id), self.alone(asked)
            count, reason = len(tokens), chunks[-1].stop_reason
            self.ends[reason] += 1
            assert np.all(np.diff(oldest(tokens.versions_T)) >= 0)
            if asked.request.pinned:
                assert len(set(tokens.versions_T.tolist())) <= 1
            if asked.aborted:
                assert reason == StopReason.ABORTED
            elif reason is StopReason.DEADLINE:
                assert asked.ended_s == asked.due_s
            else:
                assert asked.ended_s < asked.due_s
                assert (reason, count) == (alone.stop_reason, len(alone.ids))
            assert tokens.ids_T.tolist() == alone.ids[:count], (request_id, asked)
            np.testing.assert_allclose(tokens.logprobs_T, alone.logprobs[:count], atol=1e-4)
            self._check_recorded(asked, chunks, tokens, alone)
        self.engine._pool.check([])
        stats = self.engine.stats()
        assert stats.running == stats.waiting == stats.cache_blocks_used == 0
        assert self.engine._pins.num_bytes == 0
        self.asked.clear()
        self.chunks.clear()

    def _check_recorded(self, asked: Asked, chunks: list[TokenChunk], tokens: Tokens, alone: Alone) -> None:
        sampling, count = asked.request.sampling, len(tokens)
        assert (tokens.kept is not None) == sampling.record_kept or not count
        if sampling.record_kept and count:
            assert [span.tolist() for span in tokens.kept.spans()] == alone.kept[:count]
        for chunk in chunks:
            assert (chunk.tokens.entropies_T is not None) == sampling.record_entropy
            if sampling.record_entropy:
                assert len(chunk.tokens.entropies_T) == len(chunk.tokens.ids_T)
                assert (chunk.tokens.entropies_T >= 0).all()
                assert sampling.temperature or not chunk.tokens.entropies_T.any()
        told = [chunk.prompt_routing for chunk in chunks if chunk.prompt_routing is not None]
        if not sampling.record_routing or not count:
            assert len(told) <= sampling.record_routing
            return
        assert len(told) == 1
        routing = told[0] if count == 1 else told[0] + tokens.routing
        num_known = len(asked.given) + count - 1
        assert routing.known_T[:num_known].all()
        found_TLK = np.sort(routing.experts_RLK[:num_known], axis=-1)
        np.testing.assert_array_equal(found_TLK, alone.experts_TLK[:num_known])
