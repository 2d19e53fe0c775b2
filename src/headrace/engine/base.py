"""The contracts of an engine.

An engine has two contracts. :class:`EngineCore` is the part that computes: a synchronous step loop drives it, in a
process or thread of its own. :class:`Engine` is the asynchronous interface that the rest of the system uses, wherever
the core runs.

A *version* is one set of weights, identified by a number. It is *staged* (loaded beside the weights in use and
verified) while decoding continues, and *committed* (put into use) between two steps, so that every forward pass uses
one version. The tokens of a sequence are returned in *chunks* (:class:`~headrace.base.types.episode.TokenChunk`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import PLAIN, GenerateRequest, RequestOptions, ScoreTokens
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate


class TokenSource(Protocol):
    """An object that generates tokens for a prompt: an engine, or a substitute with the same interface."""

    def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample one sequence after the prompt ``prompt_ids_T`` with the parameters ``sampling``, and yield its new
        tokens in chunks. ``options`` are further properties of the request, such as its deadline. Chunks arrive while
        the sequence grows, and the last one has a stop reason.

        Requests that are made in one iteration of the event loop join the batch together, in that order. Leaving the
        iterator early withdraws the request. Raises :class:`~headrace.base.errors.RequestError` for a request that
        cannot be served.
        """
        ...


class SiblingRequest(NamedTuple):
    """One of several requests with the same prompt, whose answers are siblings."""

    sampling: Sampling
    options: RequestOptions


OnSiblingChunks = Callable[[Sequence[tuple[int, TokenChunk]]], Awaitable[None]]
"""Called with chunks that arrived together, each with the index of its sibling."""
EndEngine = Callable[[str, str, str], None]
"""A function that ends the process of an engine, given the engine's name, the reason and the remedy."""


@runtime_checkable
class SiblingSource(Protocol):
    """A source of tokens that samples several answers to one prompt in a single call, which costs its caller much less
    than one call for each answer."""

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        """Sample one sequence for each of ``siblings`` after the prompt ``prompt_ids_T``, pass its chunks to
        ``on_chunks``, and return when all of them have ended. A sequence that is refused or fails ends with a chunk
        that contains its error; the other sequences continue. Cancelling the call withdraws the sequences that have not
        ended."""
        ...


class Engine(TokenSource, Protocol):
    """The asynchronous interface of an engine, for rollouts and weight sync: it generates tokens, scores given tokens
    and loads new weights."""

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """Return the logprobs of given ``tokens`` at ``temperature`` under the weights in use, computed by one prefill:
        one value for each token, 0 for the first, which nothing precedes. If ``tokens`` contains kept-sets (the entries
        that survived truncation) or the routing of experts, they are applied."""
        ...

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return the logprobs of ``tokens`` at ``temperature``, as :meth:`score` does, and for each position the
        ``num`` most likely entries of the vocabulary with their logprobs. Only entries with ids below ``below`` are
        considered (0: all). Distillation calls this on a teacher's engine."""
        ...

    async def stage(self, update: WeightUpdate) -> float:
        """Load the version ``update`` beside the weights in use and verify its checksums, while decoding continues.
        Return the duration in seconds.

        Raises :class:`~headrace.base.errors.WeightsError` if the update does not fit the model, is corrupt or is older
        than the weights in use; nothing has changed then.
        """
        ...

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Put the staged ``version`` into use, and return a report of the cost once it is in use. ``mode`` decides when
        the change happens and what happens to the running sequences."""
        ...

    async def pause(self, *, release: bool = False) -> None:
        """Stop generating after the present step, until :meth:`resume`; with ``release``, also free the memory of the
        key-value cache. Running sequences are kept."""
        ...

    async def resume(self) -> None:
        """Continue after :meth:`pause`."""
        ...

    def stats(self) -> EngineStats:
        """Return the latest counters of the engine, such as sampled tokens and running sequences."""
        ...


class EngineSet(Protocol):
    """The interface of a changing set of engines behind one :class:`Engine`, for the code that distributes weights.

    An engine *misses* a version if the version cannot reach it. It gets no new requests until it receives a later one.
    """

    async def wait_for_any(self) -> None:
        """Wait until at least one engine is present that has not missed the newest version, whether it has weights
        already or not, or until all engines of the set are present. The controller calls this before it lets the
        learner send a version again."""
        ...

    def drop_lagging(self, version: int, why: str) -> bool:
        """Mark the engines that lack ``version`` as having missed it, for the reason ``why``, if at least one other
        engine has staged it: the run then continues with the others. Return whether another engine has staged it; if
        none has, nothing changes."""
        ...

    async def wait_for_lagging(self) -> None:
        """Wait until an engine is present that lacks the version committed last. The caller then stages and commits
        that version once more, which does not affect the other engines."""
        ...


class EngineCore(Protocol):
    """The synchronous engine that computes: a step loop calls it in its own process or thread.

    It is not thread-safe, except for :meth:`stage`. Only :meth:`step`, :meth:`score` and :meth:`top_scores` may block.
    """

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises :class:`~headrace.base.errors.RequestError` if it can never be served, or if the
        queue is full."""
        ...

    def abort(self, request_ids: Sequence[int]) -> list[TokenChunk]:
        """Withdraw the requests ``request_ids`` and return their last chunks, which hold the tokens that were sampled
        and not yet returned. Unknown ids are ignored, since a request may just have ended."""
        ...

    def has_work(self) -> bool:
        """Return whether a step would do anything: whether a sequence runs or waits, or chunks are due. The step loop
        waits for messages if not."""
        ...

    def step(self) -> list[TokenChunk]:
        """Schedule, run one forward pass, sample, and return the chunks that are due: one for each sequence that has
        ended, and one for each that has at least ``engine.flush_tokens`` tokens that were not returned yet."""
        ...

    def score(self, request: ScoreTokens) -> FloatColumn:
        """Return the logprobs of the tokens of ``request``, one for each token and 0 for the first, by one prefill
        between two steps."""
        ...

    def top_scores(self, request: ScoreTokens) -> TopScores:
        """Return the logprobs of given tokens and the most likely entries at each position, as many as the request
        sets."""
        ...

    def stage(self, update: WeightUpdate) -> None:
        """Load the version ``update`` beside the weights in use and verify it, so that it can be committed. May run in
        another thread while :meth:`step` runs. Raises :class:`~headrace.base.errors.WeightsError` if the version cannot
        be used."""
        ...

    def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
        """Begin to use a staged version; called between two steps. :meth:`take_swaps` returns its report, at once or,
        where ``mode`` lets sequences finish first, after a later step."""
        ...

    def take_swaps(self) -> list[SwapReport]:
        """Remove and return the reports of the commits that have been completed since the last call, in their order."""
        ...

    def pause(self, *, release: bool = False) -> None:
        """Stop working until :meth:`resume`, or until a commit with ``Interrupt.SLEEP``. With ``release``, also free
        the memory of the key-value cache."""
        ...

    def resume(self) -> None:
        """Start working again after :meth:`pause`; a released cache is allocated again."""
        ...

    def stats(self) -> EngineStats:
        """Return the counters of the engine since its start, and its load at this moment."""
        ...
