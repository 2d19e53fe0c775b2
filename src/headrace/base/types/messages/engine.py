"""The messages that an engine receives."""

from __future__ import annotations

import enum

import msgspec

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.base.types.weights import Interrupt, WeightUpdate


class StaleFork(enum.StrEnum):
    """The treatment of a fork whose parent's cache was computed by other weights than those in use, at the request
    or when the fork joins the batch. Its tokens show what happened: they carry the version that computed them, as
    its parent's do."""

    REFUSE = "refuse"
    """The request fails with an error, also if the weights change while it waits."""
    RECOMPUTE = "recompute"
    """The prefix is computed again under the weights in use."""
    REUSE = "reuse"
    """The prefix's cache is shared unchanged while the parent runs. A part that is no longer there (the parent has
    ended, waits, or was restarted) is computed under the weights in use."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to continue another sequence after its prompt and its first sampled tokens."""

    parent: int
    """The ``request_id`` of the sequence to continue, running or ended."""
    at: int
    """The number of its sampled tokens to keep."""
    stale: StaleFork = StaleFork.REFUSE


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of a request, beside its prompt and its sampling. They reach the engine as the caller gave them: a
    new option needs a field here and its use."""

    priority: int = 0
    """Requests of a higher priority join the batch first and are preempted last."""
    deadline_s: float | None = None
    """Seconds after arrival at which the sequence ends with the tokens it has; ``None`` for no deadline."""
    fork: ForkRequest | None = None
    """The sequence to continue, instead of a prompt, which is then empty; ``None`` to begin from a prompt."""
    pinned: bool = False
    """Whether the sequence keeps the weights that it begins with, whatever version is committed meanwhile."""
    answer_ids_T: IntColumn | None = None
    """Tokens that an engine has sampled before and the caller has: the sequence continues after them, with the
    draws, penalties and limits it would have had. ``None`` for a new request."""
    session: str = ""
    """A name that related requests share: among several engines, the one that served the last of them gets the next."""
    agent: str = ""
    """The agent whose adapter samples the sequence, if several are trained (``model.lora.agents``); empty for the
    policy's."""


PLAIN = RequestOptions()
"""The default options."""


class GenerateRequest(RequestOptions, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to sample, as an engine receives it: the caller's options with the number of the request."""

    request_id: int
    prompt_ids_T: IntColumn
    """The prompt; empty for a fork, whose prompt the engine has."""
    sampling: Sampling

    @classmethod
    def of(
        cls, request_id: int, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions
    ) -> GenerateRequest:
        """Return the request with this number and these options."""
        given = msgspec.structs.asdict(options)
        return cls(request_id=request_id, prompt_ids_T=prompt_ids_T, sampling=sampling, **given)


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to sample sequences. All of them join the batch in the same step, in this order."""

    requests: tuple[GenerateRequest, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to withdraw requests. The tokens sampled so far are sent as a last chunk."""

    request_ids: tuple[int, ...]


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to bring a published version next to the engine and verify it, while decoding continues."""

    call: int
    update: WeightUpdate


ANNOUNCED = -1
"""The ``call`` of a commit that follows from the learner's announcement, and that the controller has not ordered."""


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The announcement of a version that the learner has published. The learner itself sends it to the engines of
    its machine; the engine stages the version and reports to the controller with a
    :class:`~headrace.base.types.messages.controller.StageOutcome`."""

    update: WeightUpdate
    commit: Interrupt | None = None
    """The mode in which the engine commits the version as soon as it is staged, reported as call :data:`ANNOUNCED`;
    ``None``: the controller orders the commit."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to use a staged version. ``mode`` says when, and what happens to running sequences."""

    call: int
    version: int
    mode: Interrupt = Interrupt.INFLIGHT


class ScoreTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to compute the log-probability of each of these tokens but the first, under the weights in use (the
    policy's, if there are several adapters). Nothing is sampled."""

    call: int
    ids_T: IntColumn
    temperature: float = 1.0
    """The temperature: logits are divided by it."""
    kept: KeptSets | None = None
    """The kept-sets that restrict the distribution of each token; ``None`` for the whole vocabulary."""
    routing: Routing | None = None
    """The experts that compute each token; ``None`` to route by the weights in use."""
    top_k: int = 0
    """The number of likeliest entries to return at the position of each token; 0 for none."""
    top_below: int = 0
    """Only entries with ids below this one are returned; 0 for all."""

    @classmethod
    def of(cls, call: int, tokens: Tokens, temperature: float, *, top_k: int = 0, top_below: int = 0) -> ScoreTokens:
        """Return the order to score ``tokens``, under the kept-sets and experts that were recorded with them."""
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
    """The order to stop after the present step; requests queue. With ``release``, the engine frees the memory of its
    cache, and running sequences continue later from their tokens."""

    call: int
    release: bool = False


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to continue after ``Pause``."""

    call: int


Message = Generate | Abort | Stage | Announce | Commit | ScoreTokens | Pause | Resume | Shutdown
