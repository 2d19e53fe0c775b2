"""Between what callers of an engine say and hear and the records that travel to its core and back."""

from __future__ import annotations

from headrace.base.errors import EngineFull, RequestError, SequenceFailed
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import Chunk
from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine.base import RequestOptions, TokenChunk

_KINDS = {kind.__name__: kind for kind in (RequestError, EngineFull, SequenceFailed)}


def generate_request(
    request_id: int, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions
) -> GenerateRequest:  # fmt: skip
    """The record of a request."""
    return GenerateRequest(
        request_id=request_id,
        prompt_ids_T=prompt_ids_T,
        sampling=sampling,
        priority=options.priority,
        deadline_s=options.deadline_s,
        fork=options.fork,
        pinned=options.pinned,
        answer_ids_T=options.answer_ids_T,
        agent=options.agent,
    )


def score_request(call: int, tokens: Tokens, temperature: float, *, top_k: int = 0, top_below: int = 0) -> ScoreTokens:
    """The record of tokens that are to be scored."""
    return ScoreTokens(
        call=call,
        ids_T=tokens.ids_T,
        temperature=temperature,
        kept=tokens.kept,
        routing=tokens.routing,
        top_k=top_k,
        top_below=top_below,
    )


def token_chunk(chunk: Chunk) -> TokenChunk:
    """What the reader of a stream gets. Raises the :class:`~headrace.base.errors.RequestError` that the chunk
    tells of."""
    if chunk.error:
        problem, _, remedy = chunk.error.partition("; ")
        kind = _KINDS.get(chunk.error_kind, SequenceFailed)
        raise kind(problem, remedy=remedy or "look at the request and at the weights")
    return TokenChunk(
        tokens=Tokens(
            ids_T=chunk.ids_T,
            logprobs_T=chunk.logprobs_T,
            versions_T=chunk.versions_T,
            kept=chunk.kept,
            routing=chunk.routing,
            entropies_T=chunk.entropies_T,
        ),
        stop_reason=StopReason(chunk.stop_reason) if chunk.stop_reason else None,
        request_id=chunk.request_id,
        prompt_routing=chunk.prompt_routing,
        restarted=chunk.restarted,
    )
