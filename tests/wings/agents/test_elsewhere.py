"""The endpoint at an address that is named, and under TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.base.errors import ConfigError, RunError
from headrace.base.types.episode import EpisodeStatus
from headrace.launch.endpoints import ListenAddress
from headrace.wings.agents import Access
from tests.base.net.certificates import certificate
from tests.wings.agents.harness import world

HI: Any = [{"role": "user", "content": "hi"}]


async def greet(access: Access, **how: Any) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"{access.base_url}/v1", api_key=access.api_key, max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False, **how),
    )  # fmt: skip
    async with client:
        await client.chat.completions.create(model="m", messages=HI)


@pytest.mark.parametrize(("host", "url"), [("127.0.0.2", "http://127.0.0.2:"), ("::1", "http://[::1]:")])
def test_programs_are_led_to_the_address_that_is_named(host: str, url: str) -> None:
    async def main() -> None:
        async with world(at=ListenAddress(host=host)) as here:
            assert here.endpoint.base_url.startswith(url)
            assert (await here.play(greet)).status is EpisodeStatus.FINISHED

    asyncio.run(main())


def test_an_episode_is_reached_over_https_and_not_without(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(crt))

    async def safely(access: Access) -> None:
        await greet(access, verify=trust)
        with pytest.raises(openai.APIConnectionError):
            await greet(access)
        with pytest.raises(openai.APIConnectionError):
            await greet(Access(base_url=access.base_url.replace("https", "http"), api_key=access.api_key))

    async def main() -> None:
        async with world(at=ListenAddress(tls_certificate=str(crt), tls_key=str(key))) as here:
            assert here.endpoint.base_url.startswith("https://127.0.0.1:")
            assert (await here.play(safely)).status is EpisodeStatus.FINISHED

    asyncio.run(main())


def test_an_address_or_a_certificate_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    async def main(at: ListenAddress) -> None:
        async with world(at=at):
            pass

    with pytest.raises(RunError, match="cannot listen on 192"):
        asyncio.run(main(ListenAddress(host="192.0.2.1")))
    with pytest.raises(ConfigError, match="TLS with the certificate"):
        asyncio.run(main(ListenAddress(tls_certificate=str(tmp_path / "none.crt"), tls_key=str(tmp_path / "none.key"))))
