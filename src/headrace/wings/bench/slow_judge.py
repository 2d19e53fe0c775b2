"""A slow judge for the scoring benchmark: an HTTP server with OpenAI's chat completions protocol, without a model.

``python -m headrace.wings.bench.slow_judge`` prints the port on which it listens. The delay of an answer depends on the
question alone: 0.5 to 2.5 s, the time in which a mid-sized model writes a few sentences. The answer is constant.
"""

from __future__ import annotations

import asyncio
import socket
import zlib

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

LEAST_S, MORE_S = 0.5, 2.0
"""The shortest delay of an answer, and the largest time that is added to it, in seconds."""


async def _answer(request: Request) -> JSONResponse:
    """Return a chat completion with the score 5, after a delay of 0.5 to 2.5 s. The delay is computed from the body of
    the request, so that the same question always has the same delay."""
    await asyncio.sleep(LEAST_S + MORE_S * zlib.crc32(await request.body()) / 0xFFFFFFFF)
    return JSONResponse({"choices": [{"message": {"role": "assistant", "content": 'Well. {"score": 5}'}}]})


def main() -> None:
    """Print the number of a free port of this machine, and serve there until the process is killed."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], flush=True)  # noqa: T201 - the parent process reads the port
        app = Starlette(routes=[Route("/v1/chat/completions", _answer, methods=["POST"])])
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
