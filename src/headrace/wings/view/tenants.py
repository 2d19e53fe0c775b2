"""The page about a server of the Tinker protocol, and its JSON API: the tenants (models in training), their queues, and
the tokens that were sampled and trained.

    /api/tenants                   tenants, waiting requests, the last samples
    /api/tenants/samples/N         one sampled sequence: text, log-probability and version of each token
    /api/tenants/trained/MODEL     the data of the model's last forward_backward requests

The records are read from the server's state directory; no requests are sent to the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.base.clock import Clock
from headrace.wings.tinker.records import ServerRecords
from headrace.wings.view.app import json_response, make_application
from headrace.wings.view.auth import ViewAuth
from headrace.wings.view.text import DirectoryTokenizer


def make_tenants_app(
    records: ServerRecords, *, clock: Clock, token: str, secure: bool, ending: Callable[[], bool]
) -> ViewAuth:
    """Return the ASGI application that serves the page about a server, with its JSON API. ``records`` reads the state
    of the server, and ``clock`` provides the current time. Every request must have ``token``; ``secure`` is true if the
    application is served over TLS only. ``ending``, an argument of every
    :class:`headrace.wings.view.serving.AppFactory`, is not used, because the application has no event streams to
    end."""
    texts = _Texts(records)

    def tenants(_: Request) -> Response:
        """Answer with the tenants, the waiting requests and the last samples."""
        now_s = clock.wall()
        lists = {"tenants": records.tenants(now_s), "queue": records.queue(now_s), "samples": records.samples()}
        return json_response({"directory": str(records.directory), "now_s": now_s, **lists})

    def sample(request: Request) -> Response:
        """Answer with the sampled sequence whose number is in the path, its tokens as pieces of text."""
        found = records.sample(request.path_params["number"])
        pieces = texts.decode(found["base"], [*found["prompt"], *found["ids"]])
        first = len(found["prompt"])
        return json_response({**found, "prompt_text": "".join(pieces[:first]), "pieces": pieces[first:]})

    def trained(request: Request) -> Response:
        """Answer with the data of the last training requests of the model in the path, their target tokens as pieces of
        text."""
        model = request.path_params["model"]
        base = next((each["base"] for each in records.tenants(clock.wall()) if each["model"] == model), "")
        data = records.last_training_data(model)
        return json_response([{**datum, "pieces": texts.decode(base, _take_first(datum["targets"]))} for datum in data])

    answers = [
        Route("/api/tenants", tenants),
        Route("/api/tenants/samples/{number:number}", sample),
        Route("/api/tenants/trained/{model}", trained),
    ]
    return make_application(answers, _respond_page, token=token, secure=secure)


class _Texts:
    """A converter of token ids to text, by the tokenizer of a base model. Each tokenizer is loaded once."""

    def __init__(self, records: ServerRecords) -> None:
        """Create a converter; ``records`` has the directory of each base model."""
        self._records = records
        self._tokenizers: dict[str, DirectoryTokenizer] = {}
        """The loaded tokenizer of each base model, by the name of the base."""

    def decode(self, base: str, ids: Sequence[int]) -> list[str]:
        """Return the text of each of ``ids`` by the tokenizer of the base model named ``base``."""
        if base not in self._tokenizers:
            self._tokenizers[base] = DirectoryTokenizer(self._records.bases().get(base, ""))
        return self._tokenizers[base].pieces(ids)


def _take_first(targets: Sequence[Any]) -> list[int]:
    """Return one target token for each position of a sequence: the first token where a position has a list of
    tokens."""
    return [each[0] if isinstance(each, list) else each for each in targets]


def _respond_page(_: Request) -> Response:
    """Return the HTML page about the server."""
    page = files("headrace.wings.view") / "static" / "tenants.html"
    return Response(page.read_bytes(), media_type="text/html")
