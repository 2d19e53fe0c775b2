"""A server process over a tiny model, and its clients."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from headrace.models.tiny import TinySpec, make_tiny
from tests.run.session.runs import command

TOKEN = "a-token-of-the-tests"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'boss' %}{{ raise_exception('no bosses here') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if shout is defined %}!{% endif %}{% endif %}"
)
CONTEXT = 512
DEADLINE_S = 60.0


def make_model(directory: Path, **changes: Any) -> Path:
    spec = {
        "vocab": string.ascii_letters + string.digits + " .,!?[]:é",
        "hidden_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "intermediate_size": 64,
        "max_positions": CONTEXT,
        "init_std": 0.3,
        "chat_template": TEMPLATE,
        **changes,
    }
    return make_tiny(directory, TinySpec(**spec))


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    said: list[str]

    def client(self, token: str = TOKEN) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=DEADLINE_S)

    def http(self, token: str = TOKEN) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=DEADLINE_S)

    def figures(self) -> dict[str, float]:
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def _until(words: str, process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if line.startswith(words):
            return


@contextmanager
def served(model: Path, *arguments: str, token: str = TOKEN) -> Iterator[Server]:
    """A server, once its model is loaded; it is ended afterwards."""
    process = subprocess.Popen(
        command("serve", model, "--port", "0", *arguments),
        env={**os.environ, "HEADRACE_SERVE_TOKEN": token, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
    )
    with process:
        try:
            said = list(_until("end it", process))
            yield Server(process, said[0].split()[2].rstrip(";"), said)
        finally:
            process.terminate()
