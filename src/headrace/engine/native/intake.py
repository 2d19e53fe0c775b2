"""The admission of requests to the embedded engine: checks against its limits, and the record of each new sequence.

A *fork* is a request that continues an earlier one, its *parent*, from one of its tokens; it is *stale* if the parent's
cache was computed with other weights than those in use. *Given* tokens are the tokens with which a sequence begins.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.base.errors import EngineFull, RequestError, nearest
from headrace.base.types.columns import IntColumn
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, StaleFork
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.native.adapters import EngineAdapters
from headrace.engine.native.blocks import count_blocks
from headrace.engine.native.checks import check_ids, request_problem
from headrace.engine.native.masks import MaskMaker
from headrace.engine.native.rows import Rows
from headrace.engine.native.sequence import NO_ROW, FinishedSequence, Sequence
from headrace.models.paged.base import BLOCK

STALE_REMEDY = "set stale to 'recompute' or 'reuse'"


def stale_fork(request: GenerateRequest, version: int) -> str:
    """Return the error text for the fork ``request``, whose parent's cache was computed with other weights than
    ``version``, the version in use."""
    assert request.fork is not None
    weights = "the mixed weights" if version < NOT_SAMPLED else f"version {version}"
    return (
        f"request {request.request_id} forks request {request.fork.parent}, whose cache is not of {weights}, "
        "which is in use now"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of an engine and its optional capabilities, against which every request is checked."""

    vocab_size: int
    """The number of token ids: every id of a request must be smaller."""
    max_context: int
    """The most tokens of a prompt and its answer together."""
    num_blocks: int
    """The number of blocks of the whole cache."""
    max_waiting: int
    """The most requests in the queue."""
    stop_strings: bool
    """Whether the engine can decode tokens to text, which stop strings need."""
    masks: MaskMaker | None
    """The function that makes the masks of structured answers; ``None``: requests with a structure are refused."""
    adapters: EngineAdapters
    """The adapters that requests can choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForkSource:
    """The tokens of a running, waiting or ended sequence from which a fork can begin."""

    ids_T: IntColumn
    num_given: int
    """The number of these tokens with which the sequence began."""
    num_prompt: int
    """The number of these tokens that belong to the prompt, which no engine sampled."""
    version: int
    """The version of its cached context; ``NOT_SAMPLED`` if there is none."""


class Intake:
    """The admission of requests to an engine with the limits ``bounds`` and the batch ``rows``. It records all
    sequences that have not ended, and keeps the tokens of the last ``fork_memory`` ended ones for forks."""

    def __init__(self, bounds: Bounds, rows: Rows, fork_memory: int) -> None:
        """Create the record without any sequence. The arguments are described at the class."""
        self._bounds = bounds
        self._rows = rows
        self._fork_memory = fork_memory
        self._ended: OrderedDict[int, _ForkSource] = OrderedDict()
        """The tokens of the ended sequences that are kept for forks, by request id, the oldest first."""
        self._arrivals = 0
        """The number of admitted requests, which numbers the sequences."""
        self._last_checked: tuple[object, ...] = ()
        """The options of the last request that were valid, without its seed: requests often differ in it alone."""
        self.known: dict[int, Sequence] = {}
        """Every sequence that has not ended, by its request id."""

    def admit(self, request: GenerateRequest, *, version: int, num_waiting: int, now_s: float) -> Sequence:
        """Return a new sequence for ``request``, ready for the queue. ``version`` is the version in use
        (``NOT_SAMPLED`` before the first), ``num_waiting`` the length of the queue, ``now_s`` the time on the engine's
        clock. Raises :class:`~headrace.base.errors.RequestError` for a request that cannot be served; nothing has
        changed then."""
        name = f"request {request.request_id}"
        if version == NOT_SAMPLED:
            raise RequestError(
                f"{name} came before the first weights: its tokens would carry no version",
                remedy="commit a version first: weights are published before the first rollout",
            )
        if request.request_id in self.known:
            raise RequestError(f"{name} is already in the engine", remedy="give every request an id of its own")
        if num_waiting >= self._bounds.max_waiting:
            raise EngineFull(
                f"{name} would be the {num_waiting + 1}th that waits, more than engine.max_waiting="
                f"{self._bounds.max_waiting}",
                remedy="ask again later, or raise engine.max_waiting",
            )
        sequence = self._sequence(request, name, version, now_s)
        self._refuse_if_unfit(name, sequence)
        self._arrivals += 1
        self.known[request.request_id] = sequence
        return sequence

    def record_end(self, sequence: Sequence) -> None:
        """Record the end of ``sequence``, and keep its tokens for forks. It must be called before the sequence's row is
        freed, while the tokens can still be read."""
        del self.known[sequence.request.request_id]
        if self._fork_memory:
            self._ended[sequence.request.request_id] = self._fork_source(sequence)
            self._ended.move_to_end(sequence.request.request_id)
            if len(self._ended) > self._fork_memory:
                self._ended.popitem(last=False)

    def _sequence(self, request: GenerateRequest, name: str, version: int, now_s: float) -> Sequence:
        """Check ``request`` and return its sequence, with the tokens of its parent if it is a fork. ``name`` is the
        name of the request in errors; ``version`` and ``now_s`` are as in :meth:`admit`."""
        prompt_ids_T, fork = self._check(request, name), request.fork
        if fork is None:
            given = prompt_ids_T
            num_prompt, parent, required_version, parent_ids = len(given), None, None, None
        else:
            source = self._find_fork_source(request, fork, name, version)
            given = source.ids_T[: source.num_given + fork.at].copy()
            num_prompt, parent_ids = source.num_prompt, source.ids_T
            parent = self.known.get(fork.parent)
            required_version = version if fork.stale is StaleFork.REFUSE and source.version != NOT_SAMPLED else None
        return Sequence(
            request=request,
            given_ids_T=given,
            num_prompt=num_prompt,
            arrival=self._arrivals,
            deadline_s=np.inf if request.deadline_s is None else now_s + request.deadline_s,
            adapter=self._adapter(request, name),
            parent=parent,
            reuses_stale=fork is not None and fork.stale is StaleFork.REUSE,
            parent_ids_T=parent_ids,
            required_version=required_version,
            answer=self._answer(request, name),
        )

    def _adapter(self, request: GenerateRequest, name: str) -> int:
        """Return the index of the adapter of the request's agent. Raises :class:`~headrace.base.errors.RequestError` if
        the agent has none. ``name`` is the name of the request in errors."""
        adapters = self._bounds.adapters
        place = adapters.find(request.agent)
        if place is None:
            raise RequestError(
                f"{name}: agent {request.agent[:80]!r} has no adapter here",
                remedy=f"{nearest(request.agent[:80], filter(None, adapters.names()))}; or leave agent out",
            )
        return place

    def _answer(self, request: GenerateRequest, name: str) -> FinishedSequence | None:
        """Return the answer tokens that another engine has sampled for this request, which errors call ``name``, in the
        form that a preempted sequence has; ``None`` for a request without such tokens. All of them count as sent.
        Raises :class:`~headrace.base.errors.RequestError` for an answer that cannot be continued."""
        if request.answer_ids_T is None:
            return None
        checked = check_ids("answer", request.answer_ids_T, self._bounds.vocab_size)
        count, most = len(checked.ids_T), request.sampling.max_new_tokens
        problem = checked.problem
        if request.fork is not None:
            problem = "a fork has the answer of its parent, and none of its own"
        elif count >= most:
            problem = f"an answer of {count} tokens has reached max_new_tokens={most}"
        if problem:
            raise RequestError(f"{name}: {problem}", remedy="continue only what has not ended, with its own ids")
        # the caller already has the logprobs and versions of these tokens, so these columns are never sent
        none, zero = np.zeros(count, np.int32), np.zeros(count, np.float32)
        earlier = Tokens(ids_T=checked.ids_T, logprobs_T=zero, versions_T=none)
        return FinishedSequence(tokens=earlier, num_flushed=count)

    def _check(self, request: GenerateRequest, name: str) -> IntColumn:
        """Check every number of the request, and return the ids of its prompt as int32. Raises
        :class:`~headrace.base.errors.RequestError`, which begins with ``name``, for an invalid number."""
        options = (request.priority, request.deadline_s, msgspec.structs.replace(request.sampling, seed=0))
        if options != self._last_checked:
            problem = request_problem(request, self._bounds.vocab_size)
            if problem:
                raise RequestError(f"{name}: {problem}", remedy="correct its sampling")
            # the dictionary of a bias belongs to the caller, who may change it
            self._last_checked = () if request.sampling.logit_bias else options
        checked = check_ids("prompt", request.prompt_ids_T, self._bounds.vocab_size)
        if checked.problem:
            raise RequestError(
                f"{name}: {checked.problem}", remedy="encode with the tokenizer of the engine's model"
            )  # fmt: skip
        return checked.ids_T

    def _find_fork_source(self, request: GenerateRequest, fork: ForkRequest, name: str, version: int) -> _ForkSource:
        """Return the tokens of the running or recently ended sequence that a fork continues. ``name`` is the name of
        the request in errors; ``version`` is the version in use. Raises :class:`~headrace.base.errors.RequestError` if
        there is no such sequence, or if it cannot be forked at the token ``fork.at``."""
        live = self.known.get(fork.parent)
        source = self._ended.get(fork.parent) if live is None else self._fork_source(live)
        if source is None:
            raise RequestError(
                f"{name} forks request {fork.parent}, which is neither running nor among the last "
                f"{self._fork_memory} that ended",
                remedy="raise engine.fork_memory, or send its tokens as a prompt",
            )
        if len(request.prompt_ids_T):
            raise RequestError(
                f"{name} is a fork and has a prompt of {len(request.prompt_ids_T)} tokens of its own",
                remedy="leave the prompt of a fork empty: it begins with its parent's tokens",
            )
        num_sampled = len(source.ids_T) - source.num_given
        if not 0 <= fork.at <= num_sampled:
            raise RequestError(
                f"{name} forks request {fork.parent} at={fork.at}, but that one has sampled {num_sampled} tokens",
                remedy=f"set at to a number from 0 to {num_sampled}",
            )
        if fork.stale is StaleFork.REFUSE and source.version not in (version, NOT_SAMPLED):
            raise RequestError(stale_fork(request, version), remedy=STALE_REMEDY)
        return source

    def _fork_source(self, sequence: Sequence) -> _ForkSource:
        """Return the tokens from which ``sequence`` can be forked, and the version of its cached keys and values."""
        is_waiting = sequence.row == NO_ROW
        return _ForkSource(
            ids_T=sequence.ids() if is_waiting else self._rows.get_ids(sequence.row).copy(),
            num_given=len(sequence.given_ids_T),
            num_prompt=sequence.num_prompt,
            version=NOT_SAMPLED if is_waiting else sequence.chain.version,
        )

    def _refuse_if_unfit(self, name: str, sequence: Sequence) -> None:
        """Raise :class:`~headrace.base.errors.RequestError` for a sequence that this engine can never serve: with an
        empty prompt, with stop strings or a structure that it cannot follow, or with more tokens than the context or
        the cache holds. ``name`` is the name of the request in the error."""
        length, sampling, bounds = len(sequence.given_ids_T), sequence.request.sampling, self._bounds
        if length == 0:
            raise RequestError(f"{name} has an empty prompt", remedy="give at least one token")
        if sampling.stop and not bounds.stop_strings:
            raise RequestError(
                f"{name}: stop={sampling.stop}, but this engine has no tokenizer",
                remedy="give stop_ids, or give the engine a decode function",
            )
        if sampling.structure and bounds.masks is None:
            raise RequestError(
                f"{name}: structure={sampling.structure[:80]!r}, but this engine has no masks",
                remedy="leave structure out, or give the engine a maker of masks",
            )
        if sampling.structure and bounds.masks is not None:
            bounds.masks(sampling.structure)  # raises for an invalid structure, before the sequence joins the batch
        if sequence.max_length > bounds.max_context:
            raise RequestError(
                f"{name}: prompt of {length} tokens + max_new_tokens={sampling.max_new_tokens} "
                f"exceed max_context={bounds.max_context}",
                remedy="shorten the prompt, lower max_new_tokens, or raise engine.max_context",
            )
        if count_blocks(sequence.max_length - 1) > bounds.num_blocks:
            raise RequestError(
                f"{name}: prompt of {length} tokens + max_new_tokens={sampling.max_new_tokens} "
                f"exceed the cache of {bounds.num_blocks * BLOCK} tokens",
                remedy="shorten the prompt, lower max_new_tokens, or raise engine.cache_tokens",
            )
