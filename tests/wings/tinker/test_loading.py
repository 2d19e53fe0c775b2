"""What a server answers while its models are loaded."""

import asyncio
from types import SimpleNamespace

import httpx

from headrace.base.clock import RealClock
from headrace.wings.tinker.app import ServerHolder, make_app


async def answered_while_loading() -> list[int]:
    """Return the status of a request that is sent before there is a service, and of one to a server that ends so."""
    found = []
    for come in (True, False):
        holder = ServerHolder()
        app = make_app(holder, "key", max_body_bytes=100, clock=RealClock())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=20) as asking:
            ask = asking.get("/api/v1/get_server_capabilities", headers={"x-api-key": "key"})
            asked = asyncio.create_task(ask)
            assert (await asking.get("/healthz")).status_code == 503
            holder.serve(SimpleNamespace(capabilities=dict)) if come else holder.end_waits()
            found.append((await asked).status_code)
    return found


def test_requests_wait_while_the_models_are_loaded():
    assert asyncio.run(answered_while_loading()) == [200, 503]
