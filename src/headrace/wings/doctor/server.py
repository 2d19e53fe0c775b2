"""The client with which ``headrace doctor`` examines a server of OpenAI's completions protocol: Headrace's own server,
vLLM or SGLang. An entry is the logprob of one token at one place of a sequence.

The answers of a server are not trusted: they are parsed as JSON, and printed only as escaped text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from headrace.base.errors import ConfigError, HeadraceError, visible
from headrace.engine.remote import NAMED
from headrace.wings.doctor.candidates import Entries

TOP = 20
"""Number of likeliest tokens whose logprobs are requested at each place."""
DEADLINE_S = 120.0
"""Longest wait for an answer, in seconds."""


class ServerSilent(HeadraceError):
    """The error of a server that does not answer, or whose answer does not follow the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledChoice:
    """The tokens of one choice that a server sampled."""

    ids: list[int]
    """The ids of the tokens."""
    logprobs: list[float]
    """The logprob of each token; NaN for a token without a returned logprob."""


class ServerProbe:
    """A client of the examined server, for one of the server's models. It is a context manager, which closes the
    connection."""

    def __init__(
        self, url: str, *, token: str = "", model: str = "", transport: httpx.BaseTransport | None = None
    ) -> None:
        """Create a client of the server at ``url``. ``token`` is the API key (empty: none), and ``model`` the name of
        the model in requests (empty: :meth:`models` selects the first served model). ``transport`` replaces the network
        in tests."""
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=base, headers=headers, timeout=DEADLINE_S, transport=transport)
        """The HTTP client of the server."""
        self.url = base
        self.model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the served models, and select the first for all requests if no model was named. Raises
        :class:`~headrace.base.errors.ConfigError` if the named model is not served."""
        answer = self._request("GET", "/v1/models")
        names = [str(each["id"]) for each in answer.get("data", []) if isinstance(each, dict) and "id" in each]
        if not names:
            raise ServerSilent(f"{self.url}/v1/models lists no model", remedy="is this a server of OpenAI's protocol?")
        if self.model and self.model not in names:
            raise ConfigError(
                f"--served {self.model} is not served: {', '.join(map(visible, names[:20]))}",
                remedy="name one of these",
            )
        self.model = self.model or names[0]
        return names

    def refuses_token(self, token: int) -> bool:
        """Return whether the server refuses a prompt with the token id ``token``, as it does for an id outside its
        vocabulary."""
        return self._post("/v1/completions", prompt=[token], max_tokens=1, temperature=0) is None

    def prompt_entries(self, sequences: list[list[int]]) -> Entries | None:
        """Send ``sequences`` as prompts, and return the server's logprobs of their tokens and of the likeliest other
        tokens at each place; ``None`` if the server does not return logprobs of prompts."""
        parts: list[tuple[int, int, int, float]] = []
        for number, ids in enumerate(sequences):
            body = {"prompt": ids, "echo": True, "logprobs": TOP, "max_tokens": 1, "temperature": 1.0}
            returned = self._request_logprobs(body)
            if returned is None or len(returned.get("token_logprobs") or ()) < len(ids):
                return None
            parts += _read_entries(returned, number, ids, first=0)
        return _as_columns(sequences, parts)

    def sampled_entries(self, prompts: list[list[int]], num_tokens: int) -> Entries | None:
        """Request ``num_tokens`` sampled tokens after each prompt, at temperature 1. Return the logprobs of the sampled
        tokens and of the likeliest other tokens at each place; ``None`` if the server does not return token ids."""
        sequences, parts = [], list[tuple[int, int, int, float]]()
        for number, prompt in enumerate(prompts):
            body = {"prompt": prompt, "logprobs": TOP, "max_tokens": num_tokens, "temperature": 1.0, "top_p": 1.0}
            returned = self._request_logprobs(body)
            ids = None if returned is None else _parse_token_ids(returned.get("tokens") or [])
            if returned is None or not ids:
                return None
            sequences.append([*prompt, *ids])
            parts += _read_entries(returned, number, sequences[-1], first=len(prompt))
        return _as_columns(sequences, parts)

    def sample(self, prompt: list[int], **body: Any) -> list[SampledChoice] | None:
        """Return the choices that the server samples after ``prompt``; ``None`` if the server refuses the request or
        does not return token ids. ``body`` contains further fields of the request."""
        answer = self._post("/v1/completions", prompt=prompt, logprobs=0, return_tokens_as_token_ids=True, **body)
        found = []
        for choice in (answer or {}).get("choices", []):
            returned = choice.get("logprobs") or {}
            ids, logprobs = _parse_token_ids(returned.get("tokens") or []), returned.get("token_logprobs") or []
            if ids is None or len(ids) != len(logprobs):
                return None
            found.append(
                SampledChoice(ids=ids, logprobs=[np.nan if each is None else float(each) for each in logprobs])
            )
        return found or None

    def tokenize(self, **body: Any) -> list[int] | None:
        """Return the token ids to which the server converts a ``prompt`` or ``messages``; ``None`` if the server has no
        route ``/tokenize``."""
        answer = self._post("/tokenize", **body)
        tokens = (answer or {}).get("tokens")
        return [int(each) for each in tokens] if isinstance(tokens, list) else None

    def count_chat(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        """Return the number of tokens to which the server converts the messages of a chat; ``None`` if it refuses the
        messages."""
        answer = self._post("/v1/chat/completions", messages=list(messages), max_tokens=1)
        usage = (answer or {}).get("usage") or {}
        return int(usage["prompt_tokens"]) if "prompt_tokens" in usage else None

    def _request_logprobs(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Send a completion request, and return the field ``logprobs`` of its first choice; ``None`` if the answer has
        no such field. If the server refuses the request, it is repeated with 5 logprobs per place and without the
        field that requests token ids."""
        answer = self._post("/v1/completions", **body, return_tokens_as_token_ids=True)
        if answer is None:
            answer = self._post("/v1/completions", **{**body, "logprobs": 5})
        choices = (answer or {}).get("choices") or [{}]
        returned = choices[0].get("logprobs")
        return returned if isinstance(returned, dict) else None

    def _post(self, path: str, **body: Any) -> dict[str, Any] | None:
        """Send a POST request for the chosen model with the fields ``body``. Return the JSON answer; ``None`` if the
        server refuses the request (400, 404, 405, 422, 501). Raises :class:`ServerSilent` for another error."""
        try:
            return self._request("POST", path, {"model": self.model, **body})
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (400, 404, 405, 422, 501):
                return None
            raise ServerSilent(
                f"{self.url}{path} answers {error.response.status_code}: {visible(error.response.text, 200)}",
                remedy="look at the server's log; is the token (--token) right?",
            ) from None

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request with the HTTP ``method`` to ``path``, with the JSON ``body`` (``None``: no body), and return
        the JSON object in the server's answer. Raises :class:`ServerSilent` if the answer contains none, and httpx's
        ``HTTPStatusError`` for a refused POST."""
        try:
            answer = self._http.request(method, path, json=body)
            if method == "POST" or answer.status_code < 400:
                answer.raise_for_status()
                tree = answer.json()
            else:
                raise ServerSilent(
                    f"{self.url}{path} answers {answer.status_code}: {visible(answer.text, 200)}",
                    remedy="is the URL right, and the token (--token)?",
                )
        except httpx.HTTPStatusError:
            raise
        except (httpx.HTTPError, ValueError) as error:
            raise ServerSilent(
                f"{self.url}{path} does not answer as a server of OpenAI's protocol: {visible(str(error), 200)}",
                remedy="start the server, and give its URL: http://HOST:PORT",
            ) from None
        if not isinstance(tree, dict):
            raise ServerSilent(f"{self.url}{path} answers no object", remedy="is this a server of OpenAI's protocol?")
        return tree


def _parse_token_ids(names: Sequence[Any]) -> list[int] | None:
    """Return the token ids in ``names`` of the form ``token_id:N``; ``None`` if a name has another form."""
    ids = [str(name).removeprefix(NAMED) for name in names if str(name).startswith(NAMED)]
    return [int(each) for each in ids] if len(ids) == len(names) and all(each.isdecimal() for each in ids) else None


def _read_entries(
    returned: Mapping[str, Any], number: int, ids: list[int], first: int
) -> list[tuple[int, int, int, float]]:
    """Return the entries (sequence, place, token id, logprob) of one answer about the sequence with the index
    ``number`` and the token ids ``ids``. ``returned`` is the field ``logprobs`` of the answer; its first element is
    about the token at index ``first`` of the sequence."""
    own, tops = returned["token_logprobs"], returned.get("top_logprobs") or []
    parts = []
    for place in range(max(first, 1), len(ids)):
        at = place - first
        top = tops[at] if at < len(tops) and isinstance(tops[at], dict) else {}
        pairs = {int(name.removeprefix(NAMED)): value for name, value in top.items() if name.startswith(NAMED)}
        if own[at] is not None:
            pairs[ids[place]] = own[at]
        parts += [(number, place, token, float(value)) for token, value in pairs.items() if value is not None]
    return parts


def _as_columns(sequences: list[list[int]], parts: list[tuple[int, int, int, float]]) -> Entries | None:
    """Return the entries ``parts`` (sequence, place, token id, logprob) as columns; ``None`` if there are none."""
    if not parts:
        return None
    sequence, place, token, logprob = zip(*parts, strict=True)
    return Entries(
        sequences=sequences,
        sequence_E=np.array(sequence, np.int64),
        place_E=np.array(place, np.int64),
        id_E=np.array(token, np.int64),
        logprob_E=np.array(logprob, np.float64),
    )
