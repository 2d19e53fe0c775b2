"""Blocking calls are found by reading."""

from __future__ import annotations

import ast
import textwrap

import pytest

from headrace.rollout.environments.blocking import find_blocking_calls


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import time\nasync def f():\n    time.sleep(1)", [(3, "time.sleep", "f")]),
        ("import time as t\nasync def f():\n    x = [t.sleep(1)]", [(3, "time.sleep", "f")]),
        ("from subprocess import run\nclass A:\n    async def f(self):\n        run([])", [(4, "subprocess.run", "f")]),
        ("import requests\nasync def f():\n    return requests.get('x').json()", [(3, "requests.get", "f")]),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(1)", []),
        ("import time\ndef f():\n    time.sleep(1)", []),
        ("import asyncio, time\nasync def f():\n    await asyncio.to_thread(time.sleep, 1)", []),
        ("import time\nasync def f():\n    def g():\n        time.sleep(1)\n    await h(g)", []),
        (
            "import time\nasync def f():\n    async def g():\n        time.sleep(1)\n    await g()",
            [(4, "time.sleep", "g")],
        ),
        ("import httpx\nasync def f():\n    async with httpx.AsyncClient() as c:\n        await c.get('x')", []),
    ],
)
def test_calls_in_async_code_that_block_are_named_with_their_lines(
    code: str, found: list[tuple[int, str, str]]
) -> None:
    assert find_blocking_calls(ast.parse(textwrap.dedent(code))) == found
