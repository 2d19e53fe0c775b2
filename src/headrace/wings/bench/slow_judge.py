"""A slow judge for the scoring benchmark: an endpoint with OpenAI's chat completions protocol.

``python -m headrace.wings.bench.slow_judge`` prints the port that it listens on. The time of an answer is determined
by the question: 0.5 to 2.5 s, as a mid-sized model takes for a few sentences. The answer is constant.
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


async def _answer(request: Request) -> JSONResponse:
    """Answer a request for a chat completion after 0.5 to 2.5 s, with the score 5. The delay follows from the body, so
    that the same question always takes equally long."""
    await asyncio.sleep(LEAST_S + MORE_S * zlib.crc32(await request.body()) / 0xFFFFFFFF)
    return JSONResponse({"choices": [{"message": {"role": "assistant", "content": 'Well. {"score": 5}'}}]})


def main() -> None:
    """Serve on a free port of this machine, which is printed first, until the process is killed."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], flush=True)  # noqa: T201 - the parent process reads the port
        app = Starlette(routes=[Route("/v1/chat/completions", _answer, methods=["POST"])])
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
