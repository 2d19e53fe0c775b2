"""The dashboard's routes.

    /                    the page, whose parts are behind its "#"; its files are under /static
    /api/runs            which runs there are
    /api/runs/N/...      one run: overview, metrics, series, timeline, flow, system, episodes
    /api/compare         all of them side by side
    /api/changes         server-sent events

Every answer is read-only JSON. Handlers that read files are plain functions: they run in threads.
"""

from __future__ import annotations

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
from headrace.wings.view.changes import changes
from headrace.wings.view.credit import Credits
from headrace.wings.view.door import ViewAuth
from headrace.wings.view.outliers import outliers
from headrace.wings.view.run import OpenRun
from headrace.wings.view.timeline import timeline


class _Number(Convertor[int]):
    """A number of a path, within what 64 bits hold: longer ones match no route."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("number", _Number())
STATIC = str(files("headrace.wings.view") / "static")


def make_app(
    runs: Sequence[OpenRun], *, clock: Clock, token: str, ending: Callable[[], bool], secure: bool = False
) -> ViewAuth:
    """The whole dashboard of ``runs`` as an ASGI application; ``ending`` says when streams must end, ``secure`` that it
    is reached over TLS only."""

    def of_run(answer: Answer) -> Callable[[Request], Response]:
        def handler(request: Request) -> Response:
            number = request.path_params["run"]
            if number >= len(runs):
                raise HTTPException(404, f"there is no run {number}: {len(runs)} are open")
            return _json(answer(runs[number], request))

        return handler

    async def stream(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            async for event in changes(runs, ending):
                yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    def listed(_: Request) -> Response:
        return _json([{"name": run.name, "directory": str(run.directory), **run.state()} for run in runs])

    def compared(_: Request) -> Response:
        return _json(figures.compared(runs))

    app = Starlette(
        routes=[
            Route("/api/runs", listed),
            Route("/api/compare", compared),
            Route("/api/changes", stream),
            *(Route(f"/api/runs/{{run:number}}/{path}", of_run(answer)) for path, answer in _questions(clock).items()),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/", _page),
        ],
        exception_handlers={HeadraceError: _refused, HTTPException: _not_found},
    )
    return ViewAuth(app, token=token, secure=secure)


Answer = Callable[[OpenRun, Request], Any]


def _questions(clock: Clock) -> dict[str, Answer]:
    """What can be asked of one run."""
    credits = Credits()
    return {
        "overview": lambda run, _: figures.overview(run),
        "metrics": lambda run, _: figures.metrics(run),
        "series": lambda run, asked: figures.series(run, [name for name in _asked(asked, "names").split(",") if name]),
        "flow": lambda run, _: figures.flow(run),
        "system": lambda run, _: figures.system(run),
        "timeline": lambda run, asked: timeline(run, *(_asked(asked, name) for name in ("from", "to", "bins"))),
        "outliers/{step:number}": lambda run, asked: outliers(run, clock, asked.path_params["step"]),
        "episodes": lambda run, asked: episodes.listed(run, dict(asked.query_params)),
        "search": lambda run, asked: episodes.searched(run, clock, _words(asked), _asked(asked, "before")),
        "episodes/{key}": lambda run, asked: episodes.shown(run, credits, asked.path_params["key"]),
        "episodes/{key}/turns/{turn:number}": lambda run, asked: _window(run, credits, asked),
        "episodes/{key}/turns/{turn:number}/{place:number}": lambda run, asked: episodes.token(
            run, asked.path_params["key"], asked.path_params["turn"], asked.path_params["place"]
        ),
    }


def _page(_: Request) -> Response:
    return Response((files("headrace.wings.view") / "static" / "index.html").read_bytes(), media_type="text/html")


def _window(run: OpenRun, credits: Credits, asked: Request) -> Any:
    first, count = (_asked(asked, name) or default for name, default in (("from", "0"), ("count", "1024")))
    span = episodes.whole_number(first), episodes.whole_number(count)
    if span[0] is None or span[1] is None:
        raise DataError("from and count are whole numbers", remedy="ask for from=0&count=1024")
    path = asked.path_params
    return episodes.window(run, credits, path["key"], path["turn"], (span[0], span[1]))


def _words(asked: Request) -> str:
    words = _asked(asked, "words")
    if not words.strip() or len(words) > 200:
        raise DataError("there is nothing to search for", remedy="give words of 1 to 200 characters")
    return words


def _asked(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return _json({"problem": error.problem, "remedy": error.remedy}, 422)


def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"problem": str(error.detail), "remedy": "choose a page from the list"}, error.status_code)
