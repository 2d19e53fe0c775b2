"""A client of an engine behind an OpenAI-compatible completions endpoint: vLLM, SGLang or ``headrace serve``.

Requests and answers are token ids. The server has its own weights, so it can be evaluated but not trained; its tokens
have version 0. It can also be a teacher, which scores tokens that another engine sampled. A completion is streamed as
server-sent events: lines that begin with ``data: ``.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from headrace.base.config.addresses import is_loopback
from headrace.base.errors import ConfigError, EngineFull, RequestError, RunError, SequenceFailed
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import PLAIN, RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import IntColumn, Tokens

if TYPE_CHECKING:
    import httpx

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""The pauses before a request is sent again to a full engine."""
CONNECT_S = 20.0
"""The longest time to open a connection. The time for an answer is limited by the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEndpoint:
    """The address of an engine that was started outside Headrace, and the token for it."""

    url: str
    """The URL of its API, with ``/v1``."""
    model: str = ""
    """The server's name for the model; empty: the first model that it lists."""
    token: str = ""
    """The token sent as ``Authorization: Bearer TOKEN``; empty: none is sent."""


@asynccontextmanager
async def connect(endpoint: RemoteEndpoint) -> AsyncIterator[RemoteEngine]:
    """Connect to the engine at ``endpoint``, and disconnect when the context ends.

    Raises :class:`~headrace.base.errors.ConfigError` if the engine cannot be reached or does not list a model.
    """
    import httpx

    local = is_loopback(
        urlsplit(endpoint.url).hostname or ""
    )  # proxies of the environment do not apply to this machine
    async with httpx.AsyncClient(
        base_url=endpoint.url.rstrip("/") + "/",
        headers={"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {},
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None),
        trust_env=not local,
    ) as client:
        try:
            answer = await client.get("models", timeout=CONNECT_S)
            listed: Any = answer.json()["data"] if answer.status_code == 200 else None
            model = endpoint.model or listed[0]["id"]
            is_ours = listed[0].get("owned_by") == "headrace"
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the engine at {endpoint.url} does not tell its models: {type(error).__name__}: {error}",
                remedy="give the URL of an OpenAI-compatible API, with /v1, and the token that it wants",
            ) from None
        yield RemoteEngine(client, model, is_ours=is_ours)


class RemoteEngine:
    """A :class:`~headrace.engine.TokenSource` behind an HTTP endpoint. :func:`connect` makes one.

    ``model`` is the server's name for the model. ``is_ours`` says that the server is ``headrace serve``, which always
    returns token ids.
    """

    def __init__(self, client: httpx.AsyncClient, model: str, *, is_ours: bool) -> None:
        """Use the open ``client``, whose base URL is the URL of the API. The other arguments are described at the
        class."""
        self._client = client
        self._model = model
        self._extra: dict[str, Any] = (
            {} if is_ours else {"return_token_ids": True}
        )  # headrace serve always returns token ids
        """The fields that ask the server for token ids; empty if it is ``headrace serve``, which always returns
        them."""
        self._stats = EngineStats(version=0)
        """The counters of the requests so far."""

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample one sequence after the prompt ``prompt_ids_T`` with the parameters ``sampling``, and yield its tokens
        in chunks, of which the last has a stop reason.

        If ``options.answer_ids_T`` holds tokens that another engine has sampled, the answer continues after them. Its
        further tokens differ from the tokens that the first engine would have sampled.
        """
        import httpx

        answer_ids = [] if options.answer_ids_T is None else options.answer_ids_T.tolist()
        body = {**self._body(sampling, len(answer_ids)), "prompt": [*prompt_ids_T.tolist(), *answer_ids]}
        body["model"] = options.agent or self._model  # a server lists each agent's adapter as a model
        self._add_to_stats(running=1)
        try:
            async with aclosing(await self._send(body)) as answer:
                async for chunk in _chunks(answer):
                    self._add_to_stats(steps=1, generated_tokens=len(chunk.tokens))
                    yield chunk
        except httpx.ConnectError as error:
            raise RunError(f"the engine cannot be reached: {error}", remedy="is it still running?") from None
        except httpx.HTTPError as error:
            text = f"the engine's answer broke off: {type(error).__name__}: {error}"
            raise SequenceFailed(text, remedy="look at the engine's log") from None
        finally:
            self._add_to_stats(running=-1)

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return the logprobs of ``tokens`` (0 for the first) and the ``num`` likeliest entries at each position.

        Raises :class:`~headrace.base.errors.RequestError` for a temperature other than 1, at which servers return no
        logprobs; for an entry with an id of ``below`` or more, which the server cannot exclude; and for an answer
        without these scores. Raises :class:`~headrace.base.errors.RunError` if the engine cannot be reached.
        """
        if temperature != 1.0:
            raise RequestError(
                f"logprobs at temperature {temperature} are asked of an engine behind OpenAI's protocol",
                remedy="set the temperature to 1, or take an engine of your own",
            )
        ids = tokens.ids_T.tolist()
        body = {"model": self._model, "prompt": ids, "echo": True, "logprobs": num, "max_tokens": 0}
        answer = await self._post_json("completions", {**body, "return_tokens_as_token_ids": True})
        scores = read_scores(answer, ids, num)
        foreign = int(scores.ids_TK.max(initial=0))
        if below and foreign >= below:
            raise RequestError(
                f"the engine names the token {foreign}, and the vocabulary here has {below}: it knows more tokens",
                remedy="take a model whose vocabulary is the same, or fewer likeliest entries",
            )
        return scores

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens ``ids``, special ones included. Raises
        :class:`~headrace.base.errors.RequestError` if the engine does not have these tokens, or has no
        ``/detokenize``."""
        path = str(self._client.base_url.join("../detokenize"))  # beside /v1, as in vLLM
        text = (await self._post_json(path, {"model": self._model, "tokens": list(ids)})).get("prompt")
        if not isinstance(text, str):
            raise RequestError("the engine's /detokenize tells no text", remedy="take headrace serve, or vLLM")
        return text

    def stats(self) -> EngineStats:
        """Return the counters that the client can observe: running requests, chunks (as ``steps``) and sampled
        tokens."""
        return self._stats

    async def _post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send ``body`` to ``path`` and return the JSON object of the response. Raises
        :class:`~headrace.base.errors.RunError` if the engine cannot be reached, and
        :class:`~headrace.base.errors.RequestError` if it refuses the request or returns anything but a JSON object."""
        import httpx

        try:
            answer = await self._send(body, path)
            try:
                text = await answer.aread()
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            problem = f"the engine at {self._client.base_url} cannot be reached: {type(error).__name__}: {error}"
            raise RunError(problem, remedy="is it still running?") from None
        try:
            tree = json.loads(text)
        except ValueError:
            tree = None
        if not isinstance(tree, dict):
            raise RequestError(f"the engine answers {path} with something else than an object", remedy=_SCORES_REMEDY)
        return tree

    async def _send(self, body: dict[str, Any], path: str = "completions") -> httpx.Response:
        """Send the request to ``path`` until the engine accepts it, and return the response, whose body has not been
        read yet. If the engine is full (HTTP 429 or 503), the request is sent again after each pause of ``PAUSES_S``.
        Raises :class:`~headrace.base.errors.RequestError` for any other refusal and after the last attempt."""
        for pause_s in (*PAUSES_S, None):
            request = self._client.build_request("POST", path, json=body)
            answer = await self._client.send(request, stream=True)
            if answer.status_code == 200:
                return answer
            text = (await answer.aread())[:500].decode("utf-8", "replace")
            await answer.aclose()
            if answer.status_code not in (429, 503) or pause_s is None:
                raise _refused(answer.status_code, text)
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _body(self, sampling: Sampling, num_sampled: int) -> dict[str, Any]:
        """Return the JSON body of a completion request with the parameters ``sampling``, without the prompt.
        ``num_sampled`` tokens of the answer exist already and count towards its limit ``max_new_tokens``. Raises
        :class:`~headrace.base.errors.RequestError` for options that the protocol cannot express."""
        if sampling.structure or sampling.record_top:
            raise RequestError(
                "a structure, or likeliest entries, are asked of an engine behind OpenAI's protocol",
                remedy="leave structure and record_top out",
            )
        given, default = msgspec.structs.asdict(sampling), msgspec.structs.asdict(Sampling(max_new_tokens=1))
        own = {name: given[name] for name in _EXTRA_OPTIONS if given[name] != default[name]}
        if sampling.logit_bias:
            own["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        return {
            "model": self._model,
            "max_tokens": sampling.max_new_tokens - num_sampled,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_ids),
            "seed": sampling.seed,
            "logprobs": 0,
            "stream": True,
            **own,
            **self._extra,
        }

    def _add_to_stats(self, **changes: int) -> None:
        """Add the given numbers to the counters of the statistics: ``running=-1`` means one request fewer."""
        changed: dict[str, Any] = {
            name: msgspec.structs.asdict(self._stats)[name] + change for name, change in changes.items()
        }
        self._stats = msgspec.structs.replace(self._stats, **changed)


async def _chunks(answer: httpx.Response) -> AsyncIterator[TokenChunk]:
    """Yield the chunks of a streamed completion, up to the one with a stop reason. Raises
    :class:`~headrace.base.errors.SequenceFailed` if the stream ends without one."""
    async for line in answer.aiter_lines():
        chunk = _chunk(line)
        if chunk is None:
            continue
        yield chunk
        if chunk.stop_reason is not None:
            return
    raise SequenceFailed("the engine ended its answer without a reason", remedy="look at the engine's log")


def _chunk(line: str) -> TokenChunk | None:
    """Return the chunk of tokens that one line of a streamed completion adds; ``None`` for a line that adds nothing.
    Tokens have version 0, and the logprob NaN where the engine sends none. Raises
    :class:`~headrace.base.errors.SequenceFailed` for a line that reports an error or is not a completion, and
    :class:`~headrace.base.errors.RequestError` for text without token ids."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    try:
        tree = json.loads(line.removeprefix("data: "))
        if "error" in tree:
            raise SequenceFailed(f"the engine says: {str(tree['error'])[:300]}", remedy="look at the engine's log")
        if not tree["choices"]:
            return None
        choice = tree["choices"][0]
        reason = choice.get("finish_reason")
        ids = choice.get("token_ids") or []
        token_logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if not ids and (choice.get("text") or token_logprobs):
            raise RequestError(
                "the engine does not tell the ids of its tokens",
                remedy="take one that knows return_token_ids: vLLM from 0.10.2 on, or headrace serve",
            )
        logprobs = [math.nan if value is None else value for value in token_logprobs] or [math.nan] * len(ids)
        if not ids and reason is None:
            return None
        tokens = Tokens(
            ids_T=np.array(ids, np.int32),
            logprobs_T=np.array(logprobs[: len(ids)], np.float32),
            versions_T=np.zeros(len(ids), np.int32),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, RequestError):
            raise
        raise SequenceFailed(
            f"the engine sent something that is not a completion: {error}", remedy="is it one?"
        ) from None
    return TokenChunk(tokens=tokens, stop_reason=_STOP_REASONS.get(reason, StopReason.ABORTED) if reason else None)


def read_scores(answer: Mapping[str, Any], ids: Sequence[int], num: int) -> TopScores:
    """Return the logprobs of ``ids`` and the ``num`` likeliest entries at each position, the likeliest first. They are
    read from ``answer``, a completion that repeats (echoes) its prompt and names each token ``token_id:N``. The first
    token, which nothing precedes, gets zeros. Raises :class:`~headrace.base.errors.RequestError` if ``answer`` does not
    contain these scores.

    >>> echo = {"tokens": ["token_id:4", "token_id:5"], "token_logprobs": [None, -2.0],
    ...         "top_logprobs": [None, {"token_id:5": -2.0, "token_id:7": -0.5}]}
    >>> scores = read_scores({"choices": [{"logprobs": echo}]}, [4, 5], 1)
    >>> scores.logprobs_T.tolist(), scores.ids_TK.tolist(), scores.logs_TK.tolist()
    ([0.0, -2.0], [[0], [7]], [[0.0], [-0.5]])
    """
    logprobs_T = np.zeros(len(ids), np.float32)
    ids_TK, logs_TK = np.zeros((len(ids), num), np.int32), np.zeros((len(ids), num), np.float32)
    try:
        echo = answer["choices"][0]["logprobs"]
        names, tops = echo["tokens"][: len(ids)], echo["top_logprobs"]
        if names != [f"{NAMED}{token}" for token in ids]:
            raise ValueError("the tokens of its echo are not those of the prompt")
        for place in range(1, len(ids)):
            entries = sorted(((float(log), -int(name.removeprefix(NAMED))) for name, log in tops[place].items()))
            best = entries[: -num - 1 : -1]  # a server adds the token itself where it is not among the likeliest
            if len(best) < num:  # numpy would repeat a single one
                raise ValueError(f"there are {len(best)}")
            logprobs_T[place] = float(echo["token_logprobs"][place])
            ids_TK[place], logs_TK[place] = [-token for _, token in best], [log for log, _ in best]
        if not (np.isfinite(logprobs_T).all() and np.isfinite(logs_TK).all() and ids_TK.min(initial=0) >= 0):
            raise ValueError("a logprob is not finite, or an id negative")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        problem = f"the engine does not tell the {num} likeliest entries of each token of a prompt: {error!r}"
        raise RequestError(problem, remedy=_SCORES_REMEDY) from None
    return TopScores(logprobs_T=logprobs_T, ids_TK=ids_TK, logs_TK=logs_TK)


NAMED = "token_id:"
"""The prefix of a token's name before its id, in responses to ``return_tokens_as_token_ids``."""
_SCORES_REMEDY = "take headrace serve or vLLM, and as many likeliest entries as it tells (20, of vLLM: --max-logprobs)"
_EXTRA_OPTIONS = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Options that not every endpoint supports. An option is sent only if it differs from the default."""
_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


def _refused(status: int, text: str) -> RequestError:
    """Return the error for a response whose HTTP ``status`` is a failure, with the ``text`` of the response. For 429
    and 503 it is :class:`~headrace.base.errors.EngineFull`: a later attempt may succeed."""
    problem = f"the engine answered {status}: {text}"
    if status in (429, 503):
        return EngineFull(problem, remedy="ask for less at once")
    return RequestError(problem, remedy="look at the request, the model's name and the token")
