"""The embedded engine: continuous batching of any Hugging Face causal language model, on CPU and CUDA.

    add ──▶ intake ──▶ scheduler's queue
    step():  schedule ──▶ run ──────────────────────────────▶ postprocess
             rows that join   one forward pass over blocks:   chunks of rows that ended or are due;
             or leave, and    decoding rows and pieces of     rows that ended leave;
             their tokens     prompts; sample; append         a commit that waited for that happens

:mod:`.scheduler` chooses the tokens of a pass, :mod:`.blocks` allocates the blocks of the cache, :mod:`.rows` stores
the state of each sequence, :mod:`.swaps` commits versions of the weights, and :mod:`.packing` packs staged weights for
the kernels. A commit makes the parameters point to other memory, which the next pass reads. A *row* is the place of a
running sequence in the batch. Shape legend: R rows, N tokens of a pass, D rows that draw a token, V vocabulary, C
columns, B blocks.
"""

from __future__ import annotations

import secrets
from collections import abc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError, ModelError, RequestError, SequenceFailed
from headrace.base.types.columns import FloatColumn
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.adapters import EngineAdapters, PassRows, SwitchedAdapters
from headrace.engine.native.blocks import BlockPool
from headrace.engine.native.checks import refuse_long
from headrace.engine.native.controls import Controls
from headrace.engine.native.heads import HeadDrafter, HeadParts
from headrace.engine.native.intake import STALE_REMEDY, Bounds, Intake, stale_fork
from headrace.engine.native.masks import MaskMaker, Masks
from headrace.engine.native.memory import make_cache
from headrace.engine.native.packing import PackedWeightReceiver
from headrace.engine.native.pins import Pins
from headrace.engine.native.routes import RoutingStore
from headrace.engine.native.rows import ChunkBuilder, Index, Rows
from headrace.engine.native.scheduler import Schedule, Scheduler
from headrace.engine.native.scoring import PrefillScorer
from headrace.engine.native.selfcheck import refuse_unequal
from headrace.engine.native.sequence import NO_ROW, Sequence
from headrace.engine.native.speculation import make_speculation
from headrace.engine.native.states import SequenceStates, make_states, state_kernels
from headrace.engine.native.stops import Stops
from headrace.engine.native.swaps import Swaps, WeightReceiver
from headrace.engine.native.verification import Drawn, TokenDrawer
from headrace.engine.native.waiting import Deadlines
from headrace.models.attention import forward
from headrace.models.indexed import is_indexed
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.deterministic import invariant_log_softmax, is_deterministic
from headrace.models.kernels.fuse import fuse, kernel_dtype
from headrace.models.kernels.ops import kernels as compiled_kernels
from headrace.models.paged import choose
from headrace.models.paged.base import BLOCK, Geometry, LayerShape
from headrace.models.paged.plan import PagedPlan, cache_shapes
from headrace.models.predicting import PredictionHead
from headrace.models.rope import context_limit
from headrace.models.weights import count_vocabulary, weight_tensors

Decode = Callable[[list[int]], str]
"""A function that returns the text of token ids."""


class NativeEngine:
    """An :class:`~headrace.engine.base.EngineCore` over a model of :func:`headrace.models.load_model`.

    ``max_context`` is the most tokens of a prompt and its completion together. ``receiver`` receives new weights.
    ``decode`` returns the text of token ids, for stop strings; ``None``: requests with stop strings are refused.
    ``adapters`` are the adapters that requests may choose; ``None``: the adapters that the model was loaded with.
    ``masks`` makes the masks of structured answers; ``None``: requests with a structure are refused. ``history`` is the
    file in which answers are kept for drafts, if ``config`` enables drafts; ``None``: in memory. ``head`` is the
    model's prediction head, which is needed if ``config`` enables its drafts. The same calls in the same order give the
    same tokens and logprobs, bit for bit; a draw does not depend on the other sequences of the batch.
    """

    _paused_s: float | None = None
    """The time at which the engine was paused, in seconds of its clock; ``None``: it is not paused."""
    _weights: PackedWeightReceiver
    """The receiver that stages the weights, and packs them for kernels."""
    _states: SequenceStates | None
    """The states of recurrent layers; ``None`` if the model has none."""
    _pool: BlockPool
    """The allocation of the cache's blocks."""
    _rows: Rows
    """The sequences of the batch."""
    _head: HeadDrafter | None
    """The drafter with the prediction head; ``None`` if it is not used."""
    _drawer: TokenDrawer
    """The object that draws the tokens of each pass and verifies drafts."""
    _routes: RoutingStore
    """The experts of all tokens in the cache."""
    _outbox: ChunkBuilder
    """The chunks that the next call returns."""
    _pins: Pins
    """The copies of older weights for sequences that are pinned to them."""
    _swaps: Swaps
    """The commits of staged weights."""
    _intake: Intake
    """The admission of requests, and the record of all sequences that have not ended."""
    _controls: Controls
    """The sampling parameters of the rows."""
    _forks_checked_version: int
    """The version for which waiting forks were checked last."""
    _implementations: dict[str, str]
    """The implementations of attention, kernels and other parts in words, for the record of the run."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        max_context: int,
        receiver: WeightReceiver,
        clock: Clock,
        decode: Decode | None = None,
        adapters: EngineAdapters | None = None,
        masks: MaskMaker | None = None,
        history: Path | None = None,
        head: PredictionHead | None = None,
    ) -> None:
        """Allocate the cache and construct the parts of the engine; ``clock`` measures deadlines and durations. The
        other arguments are described at the class. Raises :class:`~headrace.base.errors.ConfigError` or
        :class:`~headrace.base.errors.ModelError` if the engine cannot serve the model."""
        refuse_long(max_context, context_limit(model.config))
        self._model, self._config, self._clock, self._device = model, config, clock, model.device
        size = self._vocab_size = count_vocabulary(model)
        exact = invariant_log_softmax if is_deterministic(model) else None
        kernels, shapes = _fuse_kernels(model, config), cache_shapes(model)
        self._weights = PackedWeightReceiver(receiver, model)
        attention, self._maker = choose(model.dtype, self._device)
        refuse_unequal(model, shapes, self._maker, max_context, state_kernels(model, config))
        self._states = make_states(model, config)
        self._cache = make_cache(config, max_context, shapes + _head_shapes(head, config), model.dtype, self._device)
        snapshots = None if self._states is None else self._states.snapshots
        self._pool = BlockPool(self._cache.num_blocks, secret=secrets.randbits(64), states=snapshots)
        self._controls = Controls(config.max_sequences, self._device, exact, None if masks is None else Masks(masks))
        stops = None if decode is None else Stops(decode)
        listeners = [each for each in (self._controls, stops, self._states) if each]
        self._rows = Rows(config.max_sequences, max_context, listeners)
        self._adapters = adapters or SwitchedAdapters(model)
        self._head = self._drafter(head)
        self._speculation = make_speculation(config, self._rows, self._pool, size, file=history, head=self._head)
        self._drawer = TokenDrawer(self._rows, self._controls, stops, self._speculation)
        self._routes = RoutingStore(model, self._cache.num_blocks)
        self._outbox = ChunkBuilder(self._rows, self._routes)
        self._pins = Pins(weight_tensors(model).values(), config.max_pinned_versions)
        self._scheduler = Scheduler(
            self._rows, self._pool, max_step_tokens=config.max_step_tokens, states=self._states,
            before_change=self._outbox.before_change, may_pin=self._can_pin,
        )  # fmt: skip
        self._swaps = Swaps(self._weights, self._scheduler, self._rows, self._pool, clock)
        self._scorer = PrefillScorer(model, self._cache, self._maker, exact, self._states)
        bounds = self._bounds(max_context, masks, stop_strings=decode is not None)
        self._intake = Intake(bounds, self._rows, config.fork_memory)
        self._deadlines = Deadlines(self._intake.known)
        self._forks_checked_version = self._swaps.stamp
        self._busy_s, self._steps, self._generated_tokens = 0.0, 0, 0
        """The time in seconds in which steps were computed, their number, and the number of sampled tokens."""
        self._implementations = {"attention": attention, "kernels": kernels, **_names_of_torch_parts(model, config)}

    def facts(self) -> dict[str, str | int | float]:
        """Return facts for the record of the run, by name: the implementations of attention and kernels, and the sizes
        of the cache and other stores in bytes."""
        return {
            **self._implementations,
            "cache_blocks": self._cache.num_blocks,
            "cache_bytes": self._cache.num_bytes,
            "routing_bytes": self._routes.num_bytes,
            "pinned_bytes": self._pins.num_bytes,
            "packed_bytes": self._weights.num_bytes,
            **({} if self._speculation is None else self._speculation.history.store.facts()),
            **({} if self._head is None else {"head_weights": self._head.num_weights}),
            **(
                {}
                if self._states is None
                else {"recurrence": self._states.computed_by, "state_bytes": self._states.num_bytes}
            ),
        }

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; it joins the batch in a later step. Raises :class:`~headrace.base.errors.RequestError` if it
        cannot be served."""
        now_s = self._clock.now()
        if request.sampling.record_routing:
            self._open_routes(request.request_id)
        sequence = self._intake.admit(
            request, version=self._swaps.stamp, num_waiting=self._scheduler.num_waiting, now_s=now_s
        )
        self._scheduler.add(sequence)
        self._deadlines.add(sequence)

    def abort(self, request_ids: abc.Sequence[int]) -> list[TokenChunk]:
        """End the requests with the ids ``request_ids`` before they are complete. Return all chunks that are due,
        including the last chunks of these requests. Unknown ids are ignored."""
        known = self._intake.known
        self._end([known[one] for one in dict.fromkeys(request_ids) if one in known], StopReason.ABORTED)
        self._swaps.settle()
        return self._outbox.pop()

    def has_work(self) -> bool:
        """Return whether :meth:`step` would do anything: a sequence runs or waits, a chunk is due or, while the engine
        is paused, a deadline has passed."""
        if self._paused_s is None:
            return self._outbox.any or not self._scheduler.idle
        return self._deadlines.has_expired(self._clock.now())

    def step(self) -> list[TokenChunk]:
        """Run one step: schedule the rows, run the model, sample a token for each row whose context is complete, and
        return the chunks that are due. A paused engine only ends the requests whose deadline has passed."""
        if not self.has_work():
            return []
        started_s = self._clock.now()
        self._end(self._deadlines.pop_expired(started_s), StopReason.DEADLINE)
        if self._paused_s is None:
            self._swaps.advance()
            self._refuse_stale_forks()
            schedule = self._scheduler.schedule()
            if self._speculation is not None:
                schedule = self._speculation.extend(schedule)
            self._postprocess(self._run(schedule) if len(schedule.rows_R) else [])
            self._steps += 1
        self._swaps.settle()
        self._busy_s += self._scheduler.account_time(self._clock.now() - started_s)
        return self._outbox.pop()

    def score(self, request: ScoreTokens) -> FloatColumn:
        """Return the logprob of each token of ``request`` under the weights in use; 0 for the first, which nothing
        precedes."""
        return self.top_scores(request).logprobs_T

    def top_scores(self, request: ScoreTokens) -> TopScores:
        """Return the logprobs of given tokens and the most likely entries at each position, under the weights in use.
        The computation uses blocks borrowed from the cache. Raises :class:`~headrace.base.errors.RequestError` if no
        weights have been committed yet, and while the cache is released."""
        count = self._scorer.blocks(request, self._vocab_size)
        if self._swaps.stamp == NOT_SAMPLED or not self._cache.allocated:
            missing = "the cache, which was given back" if not self._cache.allocated else "the first weights"
            raise RequestError(f"tokens to score came without {missing}", remedy="score after a commit, or a resume")
        self._swaps.finish()  # half-exchanged weights belong to no version
        table = self._scheduler.borrow(count)
        self._clear_dirty()
        try:
            return self._scorer.score(request, table, self._vocab_size)
        finally:
            self._scheduler.return_blocks(table)

    def stage(self, update: WeightUpdate) -> None:
        """Load the version ``update`` into memory and verify it, while steps continue; called in another thread."""
        self._weights.stage(update)

    def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
        """Begin to use the staged ``version`` in ``mode``; :meth:`take_swaps` returns the report. A commit with
        ``Interrupt.SLEEP`` also wakes the paused engine."""
        self._swaps.begin(version, mode, self._config.stream_steps, self._paused_s)
        if mode is Interrupt.SLEEP:
            self.resume()

    def take_swaps(self) -> list[SwapReport]:
        """Remove and return the reports of the commits that have been completed since the last call."""
        return self._swaps.pop_reports()

    def pause(self, *, release: bool = False) -> None:
        """Stop sampling until :meth:`resume`. With ``release``, the running sequences return to the queue with their
        tokens, and the memory of the cache is freed."""
        if self._paused_s is None:
            self._paused_s = self._clock.now()
        if release and self._cache.allocated:
            for sequence in list(self._rows.sequences):
                self._scheduler.requeue(sequence)
            self._pool.forget(self._pool.version)
            self._cache.release()
            if self._states is not None:
                self._states.release()
            self._pins.move(torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # else torch would keep the memory for this process

    def resume(self) -> None:
        """Continue to sample; a released cache is allocated again."""
        if not self._cache.allocated:
            self._cache.allocate()
            if self._states is not None:
                self._states.allocate()
            self._pins.move(self._device)
        self._paused_s = None

    def stats(self) -> EngineStats:
        """Return the engine's counters since its start, and its load at this moment."""
        scheduler = self._scheduler
        return EngineStats(
            version=self._swaps.version,
            busy_s=self._busy_s,
            prefill_s=scheduler.prefill_s,
            steps=self._steps,
            generated_tokens=self._generated_tokens,
            prompt_tokens=scheduler.prompt_tokens,
            running=self._rows.count,
            waiting=scheduler.num_waiting,
            restarted=self._swaps.num_restarted,
            preempted=scheduler.num_preempted,
            cached_tokens=scheduler.cached_tokens,
            cache_blocks=self._pool.num_blocks,
            cache_blocks_used=self._pool.used,
            cache_bytes=self._cache.num_bytes,
            wasted_tokens=self._swaps.wasted_tokens,
            routing_bytes=self._routes.num_bytes,
            pinned_bytes=self._pins.num_bytes,
            drafted_tokens=0 if self._speculation is None else self._speculation.num_drafted,
            accepted_tokens=0 if self._speculation is None else self._speculation.num_accepted,
        )

    def _run(self, schedule: Schedule) -> list[Drawn]:
        """Run one forward pass for each set of weights that the scheduled rows use, and return the tokens drawn in each
        pass. Usually there is one set. Rows pinned to an older version need a pass of their own, and rows with another
        adapter may need one."""
        for sequence in schedule.joining:
            if sequence.pin is not None:
                self._pins.hold(sequence.pin, sequence.arrival)
        self._prepare_blocks(schedule)
        rows, stamp, drawn = self._rows, self._swaps.stamp, list[Drawn]()
        pin_R = rows.pin_R[schedule.rows_R]
        for pin, part in schedule.split(np.where(pin_R == stamp, NO_ROW, pin_R)):
            with self._pins.weights(pin):
                of_adapters = [part]
                if not self._adapters.share_passes:
                    of_adapters = [each for _, each in part.split(rows.adapter_R[part.rows_R])]
                drawn += [self._forward_pass(each, stamp if pin == NO_ROW else pin) for each in of_adapters]
        if self._states is not None:
            self._states.save()
        return drawn

    def _prepare_blocks(self, schedule: Schedule) -> None:
        """Prepare the cache for a pass: clear blocks that may hold NaN, copy the blocks that forked sequences write to,
        and restore the states of recurrent layers for sequences that begin at a cached prefix."""
        self._clear_dirty()
        if schedule.copies:
            sources, targets = (list(blocks) for blocks in zip(*schedule.copies, strict=True))
            self._cache.copy(sources, targets)
            self._routes.copy(sources, targets)
            if self._head is not None:
                self._head.copy(sources, targets)
        if self._states is not None:
            self._states.restore(list(schedule.restores))

    def _clear_dirty(self) -> None:
        """Set the blocks of the cache that may contain NaN or infinity to zero, before they are used again."""
        if dirty := self._scheduler.pop_dirty():
            self._cache.clear(dirty)

    @torch.inference_mode()
    def _forward_pass(self, schedule: Schedule, stamp: int) -> Drawn:
        """Compute the schedule's tokens in one forward pass, and sample tokens for the rows whose context is complete.
        ``stamp`` is the version with which the sampled tokens are recorded."""
        rows, rows_R, counts_R = self._rows, schedule.rows_R, schedule.counts_R
        starts_R = rows.computed_R[rows_R]
        geometry = Geometry(
            tables_RB=rows.tables_RB[rows_R, : int(rows.num_blocks_R[rows_R].max())],
            starts_R=starts_R,
            counts_R=counts_R,
            num_decode=schedule.num_decode,
        )
        states = None if self._states is None else self._states.make_pass(rows_R)
        plan = PagedPlan(self._cache, geometry, self._maker, self._device, states)
        drafts_R, drafts_D = schedule.drafts_R, None
        if schedule.num_decode == len(rows_R):  # every row has one new token, which completes its context
            ids_N, rows_D, keep_P = rows.ids_RC[rows_R, starts_R], rows_R, None
            num_logits_R = np.ones(len(rows_R), np.int64)
        else:
            ids_N = rows.ids_RC[np.repeat(rows_R, counts_R), geometry.positions_N()]
            certain_R = counts_R if drafts_R is None else counts_R - drafts_R
            complete_R = starts_R + certain_R == rows.length_R[rows_R]
            num_logits_R = np.where(complete_R, counts_R - certain_R + 1, 0)
            rows_D, keep_P = rows_R[complete_R], self._tensor(_last_places(counts_R, num_logits_R))
            drafts_D = None if drafts_R is None else drafts_R[complete_R]
        self._routes.record(bool(rows.records_routing_R[rows_R].any()))
        computed = PassRows(adapter_R=rows.adapter_R[rows_R], counts_R=counts_R, num_logits_R=num_logits_R)
        with self._adapters.on(computed):
            stamps = self._adapters.versions(rows.adapter_R[rows_D], stamp)
            logits_PV = forward(self._model, self._tensor(ids_N.astype(np.int64)), plan, keep_P)
        self._routes.store(geometry)
        rows.computed_R[rows_R] += counts_R if drafts_R is None else counts_R - drafts_R
        drawn = self._draw(logits_PV, rows_D, drafts_D, stamps)
        if self._head is not None:
            self._head.advance(rows_R, plan, geometry)
        return drawn

    def _bounds(self, max_context: int, masks: MaskMaker | None, *, stop_strings: bool) -> Bounds:
        """Return the bounds of the requests that the engine takes; ``stop_strings`` says whether it can find them."""
        return Bounds(
            vocab_size=self._vocab_size, max_context=max_context, num_blocks=self._cache.num_blocks,
            max_waiting=self._config.max_waiting, stop_strings=stop_strings, adapters=self._adapters, masks=masks,
        )  # fmt: skip

    def _drafter(self, head: PredictionHead | None) -> HeadDrafter | None:
        """Return the drafts of ``head``, which the rows tell of their changes; ``None`` without a head."""
        if head is None:
            return None
        drafter = HeadDrafter(
            HeadParts(
                model=self._model, head=head, cache=self._cache, attention=self._maker, rows=self._rows,
                controls=self._controls, adapters=self._adapters,
            )
        )  # fmt: skip
        self._rows.add_follower(drafter)
        return drafter

    def _draw(self, logits_PV: Tensor, rows_D: Index, drafts_D: Index | None, stamps: int | Index) -> Drawn:
        """Sample the next tokens of ``rows_D`` from the logits ``logits_PV`` of the pass, and record them with the
        versions ``stamps``. ``drafts_D`` is the number of drafted tokens of each row in the pass (``None``: no row has
        any). Blocks that accepted drafts have filled are registered, and invalid keys and values are cleared."""
        rows, before_D = self._rows, self._rows.computed_R[rows_D]
        drawn = self._drawer.draw(logits_PV, rows_D, drafts_D, stamps)
        self._generated_tokens += drawn.num_tokens
        if drafts_D is None:
            return drawn
        rows.computed_R[rows_D] = rows.length_R[rows_D] - 1
        self._scheduler.register_computed(rows_D[rows.computed_R[rows_D] // BLOCK > before_D // BLOCK])
        rows_T, positions_T = drawn.spoilt
        if len(rows_T):
            blocks_T = rows.tables_RB[rows_T, positions_T // BLOCK].astype(np.int64)
            self._cache.clear_places(blocks_T, positions_T % BLOCK)
            spoilt = np.unique(rows_T)
            self._pool.taint(rows.tables_RB[spoilt, rows.computed_R[spoilt] // BLOCK].tolist())
        return drawn

    def _postprocess(self, drawn: list[Drawn]) -> None:
        """End the rows that have stopped, are full or have invalid logits, and make chunks for the other rows that have
        enough tokens to send. ``drawn`` are the draws of this step, one for each pass."""
        if not drawn:
            return
        rows = self._rows
        rows_D, broken = drawn[0].rows_D, ~drawn[0].sound_D
        if len(drawn) > 1:
            rows_D = np.concatenate([part.rows_D for part in drawn])
            broken = ~np.concatenate([part.sound_D for part in drawn])
        stopped = rows.stopped(rows_D) | np.concatenate([part.completed_D for part in drawn])
        ended = stopped | rows.full(rows_D) | broken
        due = rows.due(rows_D, self._config.flush_tokens)
        if not (ended | due).any():
            return
        for place in np.flatnonzero(ended | due).tolist():
            row = int(rows_D[place])
            if broken[place]:
                self._end_broken(row)
            elif ended[place]:
                self._outbox.end(rows.sequences[row], StopReason.STOP if stopped[place] else StopReason.LENGTH)
            else:
                self._outbox.next(row)
        for row in rows_D[ended].tolist():
            self._forget(rows.sequences[row])
        self._scheduler.remove(rows_D[ended])

    def _end_broken(self, row: int) -> None:
        """End a row whose last token was drawn from logits that are not finite: remove that token, report the sequence
        as failed, and mark its cache blocks to be cleared before they are used again."""
        rows = self._rows
        pin, length = int(rows.pin_R[row]), int(rows.length_R[row]) - 1
        version = self._swaps.version if pin == NO_ROW else pin
        (own,) = np.broadcast_to(self._adapters.versions(rows.adapter_R[row : row + 1], version), 1).tolist()
        rows.remove_last(row)
        self._generated_tokens -= 1
        self._pool.taint(rows.table(row))
        error = SequenceFailed(
            f"the logits after {length} tokens of context hold NaN or infinity under the weights of version {own}",
            remedy="look at the request and at the weights",
        )
        self._outbox.end(rows.sequences[row], None, error)

    def _refuse_stale_forks(self) -> None:
        """Refuse waiting forks that require the weights of their parent's cache, if other weights have been committed
        since the last check."""
        version = self._swaps.stamp
        if version == self._forks_checked_version:
            return
        self._forks_checked_version = version
        waiting = self._scheduler.waiting_sequences()
        stale = [sequence for sequence in waiting if sequence.required_version not in (None, version)]
        for sequence in stale:
            self._outbox.end(sequence, None, RequestError(stale_fork(sequence.request, version), remedy=STALE_REMEDY))
        self._withdraw(stale)

    def _end(self, sequences: list[Sequence], reason: StopReason) -> None:
        """End ``sequences`` before they are complete, each with a last chunk that contains the stop ``reason``."""
        for sequence in sequences:
            self._outbox.end(sequence, reason)
        self._withdraw(sequences)

    def _withdraw(self, sequences: list[Sequence]) -> None:
        """Remove from the engine ``sequences``, which run or wait, after their last chunks have been made."""
        for sequence in sequences:
            self._forget(sequence)
        self._scheduler.withdraw(sequences)

    def _can_pin(self) -> bool:
        """Return whether a sequence can be pinned to the weights in use now: no exchange part by part is in progress,
        and there is memory for a copy."""
        return not self._swaps.streaming and self._pins.may_hold(self._swaps.version)

    def _forget(self, sequence: Sequence) -> None:
        """Remove the engine's records of a sequence that ends, except the tokens kept for forks, and release the older
        weights to which it was pinned."""
        self._intake.record_end(sequence)
        if self._speculation is not None and sequence.row != NO_ROW:
            self._speculation.learn(sequence.row)
        if sequence.pin is not None:
            self._pins.drop(sequence.pin, sequence.arrival)

    def _open_routes(self, request_id: int) -> None:
        """Allocate the store of routing (the experts chosen per token) for the first request that records it. Raises
        :class:`~headrace.base.errors.RequestError` if the routing of this model cannot be recorded."""
        try:
            problem = self._routes.open()
        except ModelError as error:
            problem = error.problem
        if problem:
            raise RequestError(
                f"request {request_id} wants its routing recorded: {problem}", remedy="leave record_routing out"
            )

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        """Return the array as a tensor on the engine's device."""
        return torch.from_numpy(array).to(self._device)


def _last_places(counts_R: Index, num_R: Index) -> Index:
    """Return the indices, among all tokens of a pass, of the last ``num_R`` of each row's ``counts_R`` tokens, in
    order.

    >>> _last_places(np.array([1, 3, 2]), np.array([1, 2, 0])).tolist()
    [0, 2, 3]
    """
    ends_R, ends = np.cumsum(counts_R), np.cumsum(num_R)
    places: Index = np.arange(int(num_R.sum())) + np.repeat(ends_R - ends, num_R)
    return places


def _names_of_torch_parts(model: PreTrainedModel, config: EngineConfig) -> dict[str, str]:
    """Return facts about the parts that run on plain torch: ``indexed_attention``, if the model has sparse attention;
    and ``fallback``, the reason why the compiled kernels are missing on this machine, if they would speed up this model
    and are not switched off."""
    indexed = {"indexed_attention": "torch"} if is_indexed(model) else {}
    dtype = kernel_dtype(model)
    loaded = compiled_kernels(dtype) if config.kernels == "auto" and dtype is not None else None
    return indexed | ({"fallback": str(loaded)} if isinstance(loaded, Unavailable) else {})


def _head_shapes(head: PredictionHead | None, config: EngineConfig) -> tuple[LayerShape, ...]:
    """Prepare the prediction head of an engine, and return the shapes of its keys and values; empty without a head.
    Raises :class:`~headrace.base.errors.ConfigError` if ``config`` asks for its drafts and there is none."""
    if config.speculation == "heads" and head is None:
        raise ConfigError(
            "engine.speculation='heads', and this engine was given a model without a prediction head",
            remedy="set engine.speculation = 'history'",
        )
    if head is None:
        return ()
    _fuse_kernels(head.layer, config)
    return cache_shapes(head.layer)


def _fuse_kernels(model: PreTrainedModel, config: EngineConfig) -> str:
    """Replace modules of the model by fused kernels, if the settings allow it, and return a description of the kernels
    in use for the record of the run. A deterministic model keeps its own kernels."""
    if is_deterministic(model):
        return "deterministic"
    return str(fuse(model)) if config.kernels == "auto" else "off"
