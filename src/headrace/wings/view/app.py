"""The HTTP routes of the dashboard.

    /                    the page; its sections are fragments after "#", its files are under /static
    /api/runs            list of the open runs
    /api/runs/N/...      one run: overview, metrics, series, timeline, flow, system, episodes
    /api/compare         all runs side by side
    /api/changes         server-sent events, sent when files of a run change

All routes only read data, and the API answers with JSON. Handlers that read files are plain functions, which Starlette
runs in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from headrace.base.clock import Clock
from headrace.base.errors import DataError, HeadraceError
from headrace.wings.view import episodes, figures
from headrace.wings.view.auth import ViewAuth
from headrace.wings.view.credit import EpisodeAdvantages
from headrace.wings.view.outliers import find_outliers
from headrace.wings.view.run import OpenRun
from headrace.wings.view.timeline import timeline


class _Number(Convertor[int]):
    """A URL converter for non-negative integers that fit into 64 bits; a path with a longer number matches no route."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        """Convert a part of a path to a number."""
        return int(value)

    def to_string(self, value: int) -> str:
        """Convert a number to a part of a path."""
        return str(value)


register_url_convertor("number", _Number())
STATIC = str(files("headrace.wings.view") / "static")


def make_app(
    runs: Sequence[OpenRun], *, clock: Clock, token: str, ending: Callable[[], bool], secure: bool = False
) -> ViewAuth:
    """Return the dashboard of ``runs`` as an ASGI application. Every request must have ``token``. Event streams end
    once ``ending()`` returns true; ``secure`` is true if the dashboard is served over TLS only. ``clock`` limits the
    time of searches."""

    def on_run(answer: Answer) -> Callable[[Request], Response]:
        """Return a request handler that looks up the run by the number in the path of the request, and responds with
        the JSON of ``answer`` for that run."""

        def handler(request: Request) -> Response:
            """Answer a request about one run; status 404 if there is no run with that number."""
            number = request.path_params["run"]
            if number >= len(runs):
                raise HTTPException(404, f"there is no run {number}: {len(runs)} are open")
            return json_response(answer(runs[number], request))

        return handler

    async def stream(request: Request) -> Response:
        """Answer with a stream of events that notify the page whenever a run has changed."""
        return StreamingResponse(stream_changes(runs, ending), media_type="text/event-stream")

    def list_runs(_: Request) -> Response:
        """Answer with the name, directory and state of every run. The index in the list is the number of the run."""
        return json_response([{"name": run.name, "directory": str(run.directory), **run.state()} for run in runs])

    def compare_runs(_: Request) -> Response:
        """Answer with the comparison of all runs."""
        return json_response(figures.compare_runs(runs))

    answers = [
        Route("/api/runs", list_runs),
        Route("/api/compare", compare_runs),
        Route("/api/changes", stream),
        *(Route(f"/api/runs/{{run:number}}/{path}", on_run(answer)) for path, answer in _run_routes(clock).items()),
    ]
    return make_application(answers, _respond_page, token=token, secure=secure)


def make_application(
    answers: Sequence[Route], page: Callable[[Request], Response], *, token: str, secure: bool
) -> ViewAuth:
    """Return an ASGI application with the routes ``answers``, the static files of the dashboard, and the page that
    ``page`` returns at ``/``. Every request must have ``token``; ``secure`` is true if the application is served over
    TLS only. The dashboard of runs and the page about tenants both use this function."""
    routes = [*answers, Mount("/static", StaticFiles(directory=STATIC)), Route("/", page)]
    app = Starlette(routes=routes, exception_handlers={HeadraceError: refused, HTTPException: not_found})
    return ViewAuth(app, token=token, secure=secure)


Answer = Callable[[OpenRun, Request], Any]
"""A function that returns the answer to a request about one run, as a value that is encoded as JSON."""


def _run_routes(clock: Clock) -> dict[str, Answer]:
    """Return the answer functions of the paths below ``/api/runs/N/``, by path. ``clock`` limits the time of
    searches."""
    cache = EpisodeAdvantages()
    return {
        "overview": lambda run, _: figures.overview(run),
        "metrics": lambda run, _: figures.metrics(run),
        "series": lambda run, request: figures.series(
            run, [name for name in _get_parameter(request, "names").split(",") if name]
        ),
        "flow": lambda run, _: figures.flow(run),
        "system": lambda run, _: figures.system(run),
        "timeline": lambda run, request: timeline(
            run, *(_get_parameter(request, name) for name in ("from", "to", "bins"))
        ),
        "outliers/{step:number}": lambda run, request: find_outliers(run, clock, request.path_params["step"]),
        "episodes": lambda run, request: episodes.list_episodes(run, dict(request.query_params)),
        "search": lambda run, request: episodes.search_episodes(
            run, clock, _read_search_text(request), _get_parameter(request, "before")
        ),
        "episodes/{key}": lambda run, request: episodes.read_episode(run, cache, request.path_params["key"]),
        "episodes/{key}/turns/{turn:number}": lambda run, request: _answer_window(run, cache, request),
        "episodes/{key}/turns/{turn:number}/{place:number}": lambda run, request: episodes.read_token(
            run, request.path_params["key"], request.path_params["turn"], request.path_params["place"]
        ),
    }


def _respond_page(_: Request) -> Response:
    """Return the HTML page of the dashboard."""
    return Response((files("headrace.wings.view") / "static" / "index.html").read_bytes(), media_type="text/html")


def _answer_window(run: OpenRun, cache: EpisodeAdvantages, request: Request) -> Any:
    """Return the requested tokens of a turn as aligned columns: ``count`` tokens, beginning with the token number
    ``from``. The path has the episode and the turn. Raises :class:`~headrace.base.errors.DataError` for values that are
    not whole numbers."""
    first, count = (_get_parameter(request, name) or default for name, default in (("from", "0"), ("count", "1024")))
    span = episodes.parse_whole_number(first), episodes.parse_whole_number(count)
    if span[0] is None or span[1] is None:
        raise DataError("from and count are whole numbers", remedy="request from=0&count=1024")
    path = request.path_params
    return episodes.read_window(run, cache, path["key"], path["turn"], (span[0], span[1]))


def _read_search_text(request: Request) -> str:
    """Return the search text of the request. Raises :class:`~headrace.base.errors.DataError` if it is empty or too
    long."""
    words = _get_parameter(request, "words")
    if not words.strip() or len(words) > 200:
        raise DataError(
            "the search text is empty or longer than 200 characters", remedy="give words of 1 to 200 characters"
        )
    return words


def _get_parameter(request: Request, name: str) -> str:
    """Return the parameter ``name`` of the request's query; an empty text if it is not given."""
    return request.query_params.get(name, "")


def json_response(value: Any, status: int = 200) -> Response:
    """Return ``value`` as a JSON response with the HTTP ``status``."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def refused(_: Request, error: Exception) -> Response:
    """Return the response to a request that failed with an error of Headrace: the problem and the remedy as JSON, with
    status 422."""
    assert isinstance(error, HeadraceError)
    return json_response({"problem": error.problem, "remedy": error.remedy}, 422)


def not_found(_: Request, error: Exception) -> Response:
    """Return the response to a request that failed with an HTTP error, such as an unknown path: the problem as JSON,
    with the error's status."""
    assert isinstance(error, HTTPException)
    return json_response({"problem": str(error.detail), "remedy": "choose a page from the list"}, error.status_code)


EVERY_S = 0.4
"""Interval in seconds between two checks of the run directories for changes."""
ALIVE_S = 15.0
"""Interval in seconds between comment lines, which prevent proxies from closing an idle stream."""


async def stream_changes(runs: Sequence[OpenRun], ending: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield server-sent events for an open page, until ``ending()`` returns true because the server shuts down. The
    first event is ``hello``. Each event ``change`` has the numbers of the runs whose files have changed. Comment lines
    between events keep the connection open."""
    stamps = [run.stamp() for run in runs]
    yield b"retry: 1000\nevent: hello\ndata: {}\n\n"
    silent_s = 0.0
    while not ending():
        await asyncio.sleep(EVERY_S)
        silent_s += EVERY_S
        fresh = [run.stamp() for run in runs]
        changed = [number for number, (old, new) in enumerate(zip(stamps, fresh, strict=True)) if old != new]
        stamps = fresh
        if changed:
            silent_s = 0.0
            yield b"event: change\ndata: " + msgspec.json.encode({"runs": changed}) + b"\n\n"
        elif silent_s >= ALIVE_S:
            silent_s = 0.0
            yield b": alive\n\n"
