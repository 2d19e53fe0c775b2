"""The messages that an engine receives. ``call`` is the number of an order, which its answer repeats."""

from __future__ import annotations

import enum

import msgspec

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.base.types.weights import Interrupt, WeightUpdate


class StaleFork(enum.StrEnum):
    """What happens to a fork whose parent's key-value cache was computed by other weights than those in use, at the
    request or when the fork joins the batch. Its tokens show what happened: they carry the version that computed them,
    as its parent's do."""

    REFUSE = "refuse"
    """The request fails with an error, also if the weights change while it waits."""
    RECOMPUTE = "recompute"
    """The prefix is computed again under the weights in use."""
    REUSE = "reuse"
    """The prefix's cache is shared unchanged while the parent runs. If the parent no longer holds a part of it (it has
    ended, waits, or was restarted), that part is computed under the weights in use."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a fork: a sequence that continues another one, its parent, after the parent's prompt and first
    sampled tokens."""

    parent: int
    """The ``request_id`` of the sequence to continue, running or ended."""
    at: int
    """The number of the parent's sampled tokens to keep."""
    stale: StaleFork = StaleFork.REFUSE
    """What to do if the weights have changed since the parent's cache was computed."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of a generation request, beside its prompt and its sampling parameters. They reach the engine as the
    caller gave them: a new option needs a field here and its use in the engine."""

    priority: int = 0
    """Requests of a higher priority join the batch first and are preempted last."""
    deadline_s: float | None = None
    """Seconds after arrival at which the sequence ends with the tokens it has; ``None`` for no deadline."""
    fork: ForkRequest | None = None
    """The sequence to continue, instead of a prompt, which is then empty; ``None`` to begin from a prompt."""
    pinned: bool = False
    """Whether the sequence keeps the weights that it begins with, whatever version is committed meanwhile."""
    answer_ids_T: IntColumn | None = None
    """Tokens of the answer that were sampled before, by this or another engine, and that the caller already has: the
    sequence continues after them, with the draws, penalties and limits it would have had. ``None`` for a new
    request."""
    session: str = ""
    """A name that related requests share: among several engines, the one that served the last of them gets the next."""
    agent: str = ""
    """The agent whose adapter samples the sequence, if several are trained (``model.lora.agents``); empty for the
    policy's."""


PLAIN = RequestOptions()
"""The default options."""


class GenerateRequest(RequestOptions, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to sample, as an engine receives it: the number of the request, the prompt and the sampling
    parameters, with the caller's options."""

    request_id: int
    """The number by which the sender knows the request; chunks of its tokens repeat it."""
    prompt_ids_T: IntColumn
    """The prompt; empty for a fork, whose prompt the engine has."""
    sampling: Sampling

    @classmethod
    def of(
        cls, request_id: int, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions
    ) -> GenerateRequest:
        """Return the request with the number ``request_id``, this prompt and these parameters, and with every field of
        ``options``."""
        given = msgspec.structs.asdict(options)
        return cls(request_id=request_id, prompt_ids_T=prompt_ids_T, sampling=sampling, **given)


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to sample sequences. All of them join the batch in the same step, in this order."""

    requests: tuple[GenerateRequest, ...]
    answers_to: str = ""
    """The address of the process of this machine that reads the chunks of these requests; empty for the controller.
    Counters and spans go to the controller in any case."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to withdraw requests. The tokens of each that were sampled so far are sent as its last chunk."""

    request_ids: tuple[int, ...]


class AbortAllOf(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to withdraw all requests of a process that has died. Nothing more is sent of them."""

    answers_to: str
    """The address to which their chunks were sent."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to stage a published version: to bring its weights next to the engine and verify them, while decoding
    continues."""

    call: int
    update: WeightUpdate


ANNOUNCED = -1
"""The ``call`` of a commit that the engine makes because of the learner's announcement, without an order of the
controller."""


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The announcement of a version that the learner has published. The learner itself sends it to the engines of
    its machine; the engine stages the version and reports to the controller with a
    :class:`~headrace.base.types.messages.controller.StageOutcome`."""

    update: WeightUpdate
    commit: Interrupt | None = None
    """The mode in which the engine commits the version as soon as it is staged; it reports that commit under the call
    :data:`ANNOUNCED`. ``None``: the controller orders the commit."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to use a staged version from now on. ``mode`` says when, and what happens to running sequences."""

    call: int
    version: int
    mode: Interrupt = Interrupt.INFLIGHT


class ScoreTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to compute the log-probability of each of the T tokens but the first, given those before it, under the
    weights in use (the policy's, if there are several adapters). Nothing is sampled."""

    call: int
    ids_T: IntColumn
    """The vocabulary ids of the T tokens."""
    temperature: float = 1.0
    """The temperature: logits are divided by it."""
    kept: KeptSets | None = None
    """The kept-sets that restrict the distribution of each token; ``None`` for the whole vocabulary."""
    routing: Routing | None = None
    """The experts that compute each token; ``None`` to route by the weights in use."""
    top_k: int = 0
    """The number of likeliest vocabulary entries to return at the position of each token; 0 for none."""
    top_below: int = 0
    """Only entries with ids below this one are returned; 0 for all."""

    @classmethod
    def of(cls, call: int, tokens: Tokens, temperature: float, *, top_k: int = 0, top_below: int = 0) -> ScoreTokens:
        """Return the order number ``call`` to score ``tokens`` at ``temperature``, under the kept-sets and experts that
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
    """The order to stop after the engine's present step; requests wait in its queue. With ``release``, the engine also
    frees the memory of its key-value cache, and running sequences continue later from their tokens."""

    call: int
    release: bool = False


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to continue after ``Pause``."""

    call: int


Message = Generate | Abort | AbortAllOf | Stage | Announce | Commit | ScoreTokens | Pause | Resume | Shutdown
