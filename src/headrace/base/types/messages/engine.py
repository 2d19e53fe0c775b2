"""The messages that an engine receives. ``call`` is the number of an order; the engine's answer repeats it."""

from __future__ import annotations

import enum

import msgspec

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.base.types.weights import Interrupt, WeightUpdate


class StaleFork(enum.StrEnum):
    """The treatment of a fork whose parent's key-value cache was computed by other weights than those in use. The
    weights are compared when the fork is requested and when it joins the batch. The versions of the fork's tokens show
    which weights computed them."""

    REFUSE = "refuse"
    """The request fails with an error, even if the weights change only while it waits."""
    RECOMPUTE = "recompute"
    """The cache of the prefix is computed again under the weights in use."""
    REUSE = "reuse"
    """The fork shares the parent's cache unchanged while the parent runs. Parts of the cache that the parent no longer
    has, because it has ended, waits or was restarted, are computed under the weights in use."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a fork: a sequence that continues another sequence, its parent, after the parent's prompt and its
    first sampled tokens."""

    parent: int
    """The ``request_id`` of the parent sequence, which may be running or ended."""
    at: int
    """The number of sampled tokens of the parent after which the fork continues."""
    stale: StaleFork = StaleFork.REFUSE
    """The treatment of the fork if the weights have changed since the parent's cache was computed."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of a generation request, apart from its prompt and its sampling parameters. They are passed from the
    caller to the engine unchanged: a new option needs a field here and its use in the engine."""

    priority: int = 0
    """Requests of a higher priority join the batch first and are preempted last."""
    deadline_s: float | None = None
    """The number of seconds after arrival at which the sequence ends with the tokens sampled so far; ``None`` for no
    deadline."""
    fork: ForkRequest | None = None
    """The sequence to continue. The prompt of the request is then empty. ``None`` to begin from the prompt."""
    pinned: bool = False
    """Whether the sequence uses the weights with which it begins until its end, whatever versions are committed."""
    answer_ids_T: IntColumn | None = None
    """Tokens of the answer that this or another engine has sampled before and that the caller already has. The sequence
    continues after them with the same random draws, penalties and limits as if it had not been interrupted. ``None``
    for a new request."""
    session: str = ""
    """A name that related requests share. The engine that served the latest request of the session also serves the
    next."""
    agent: str = ""
    """The agent whose adapter samples the sequence, if several adapters are trained (``model.lora.agents``); empty for
    the policy's adapter."""


PLAIN = RequestOptions()
"""The default options."""


class GenerateRequest(RequestOptions, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to sample, as an engine receives it: the number of the request, the prompt and the sampling
    parameters, with the caller's options."""

    request_id: int
    """The sender's number of the request. The chunks of its tokens repeat it."""
    prompt_ids_T: IntColumn
    """The prompt; empty for a fork, whose prompt the engine already has."""
    sampling: Sampling

    @classmethod
    def create(
        cls, request_id: int, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions
    ) -> GenerateRequest:
        """Return the request with the number ``request_id``, the prompt ``prompt_ids_T``, these sampling parameters and
        every field of ``options``."""
        given = msgspec.structs.asdict(options)
        return cls(request_id=request_id, prompt_ids_T=prompt_ids_T, sampling=sampling, **given)


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to sample sequences. All of them join the batch in the same step."""

    requests: tuple[GenerateRequest, ...]
    """The sequences to sample. They join the batch in the order of this tuple."""
    answers_to: str = ""
    """The address of the process on this machine that receives the chunks of these requests; empty for the controller.
    The controller receives counters and spans in both cases."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to withdraw requests. The engine sends the tokens of each request that were sampled so far as its last
    chunk."""

    request_ids: tuple[int, ...]


class AbortAllOf(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to withdraw all requests of a process that has died. The engine sends no further chunks for them."""

    answers_to: str
    """The address to which their chunks were sent."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to stage a published version: to load its weights next to the engine and verify them, while decoding
    continues."""

    call: int
    update: WeightUpdate


ANNOUNCED = -1
"""The ``call`` of a commit that an engine executes because of the learner's announcement, without an order of the
controller."""


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The announcement of a version that the learner has published. The learner itself sends it to the engines of
    its machine; the engine stages the version and reports to the controller with a
    :class:`~headrace.base.types.messages.controller.StageOutcome`."""

    update: WeightUpdate
    commit: Interrupt | None = None
    """The mode in which the engine commits the version as soon as it is staged; it reports the commit with the call
    number :data:`ANNOUNCED`. ``None``: the engine waits for the controller's order to commit."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to use a staged version from now on."""

    call: int
    version: int
    mode: Interrupt = Interrupt.INFLIGHT


class ScoreTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to compute the log-probability of each of the T tokens but the first, given the tokens before it, under
    the weights in use (with the policy's adapter, if there are several). Nothing is sampled."""

    call: int
    ids_T: IntColumn
    """The vocabulary ids of the T tokens."""
    temperature: float = 1.0
    """The temperature: logits are divided by it."""
    kept: KeptSets | None = None
    """The kept-sets that restrict the distribution of each token; ``None`` for the whole vocabulary."""
    routing: Routing | None = None
    """The experts that compute each token; ``None`` to let the router choose them."""
    top_k: int = 0
    """The number of likeliest vocabulary entries to return for the position of each token; 0 for none."""
    top_below: int = 0
    """The exclusive upper limit of the ids of those entries; 0 for no limit."""

    @classmethod
    def create(
        cls, call: int, tokens: Tokens, temperature: float, *, top_k: int = 0, top_below: int = 0
    ) -> ScoreTokens:
        """Return the order number ``call`` to score ``tokens`` at ``temperature``, and to return the ``top_k``
        likeliest entries with ids below ``top_below`` (0: all) at each position, under the kept-sets and experts that
        were recorded with them."""
        return cls(
            call=call,
            ids_T=tokens.ids_T,
            temperature=temperature,
            kept=tokens.kept,
            routing=tokens.routing,
            top_k=top_k,
            top_below=top_below,
        )


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to stop after the engine's present step; later requests wait in the engine's queue."""

    call: int
    release: bool = False
    """Whether the engine also frees the memory of its key-value cache. Running sequences then continue later from their
    tokens."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to continue after ``Pause``."""

    call: int


Message = Generate | Abort | AbortAllOf | Stage | Announce | Commit | ScoreTokens | Pause | Resume | Shutdown
