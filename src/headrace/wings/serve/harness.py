"""The implementation of ``headrace eval --harness``: a harness, which is an evaluation program of another project,
measures the weights of a run through a server.

    run or checkpoint ──export──▶ a plain model ──headrace serve, free port──▶ its URL ──▶ the harness, unmodified

The harness runs as a separate process with the user's arguments. Its output is not changed.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from headrace.base.environ import program_environment
from headrace.base.errors import ConfigError, RunError
from headrace.models.settings import context_length
from headrace.run.session.exporting import export

START_S = 900.0
"""Longest time in seconds for the server to load its model."""
END_S = 30.0
"""Seconds between the request to exit and the kill of the server."""
POLL_S = 0.2
_PROGRAM = "from headrace.run.cli import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSnapshot:
    """A model that is served for a harness, with the address and the key of its server."""

    url: str
    """The server's URL without ``/v1``."""
    token: str
    """The key that callers must send."""
    name: str
    """The model's name in requests."""
    directory: Path
    """The directory of the model's files, for harnesses that load its tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessProgram:
    """The description of a harness: its Python module, and the way to pass the address of a server to it. Calling an
    instance runs the harness."""

    module: str
    """The module that is run with ``python -m``."""
    install: str
    """The arguments of ``pip install`` that install it."""
    arguments: Callable[[ServedSnapshot, Sequence[str]], list[str]]
    """A function that returns the harness's command-line arguments for a served model, including the user's
    arguments."""
    variables: Callable[[ServedSnapshot], Mapping[str, str]]
    """A function that returns the environment variables from which the harness reads the address and the key of the
    server."""

    def __call__(self, source: Path, arguments: Sequence[str]) -> int:
        """Serve the newest weights of ``source``, a run directory or a checkpoint, run the harness on them with the
        user's ``arguments``, and return its exit code. Raises :class:`~headrace.base.errors.ConfigError` if the harness
        is not installed."""
        if find_spec(self.module.partition(".")[0]) is None:
            raise ConfigError(f"the harness {self.module} is not installed", remedy=f"pip install '{self.install}'")
        with _serve_snapshot(source) as served:
            command = [sys.executable, "-m", self.module, *self.arguments(served, arguments)]
            done = subprocess.run(command, env=program_environment(self.variables(served)), check=False)
        return done.returncode


@contextmanager
def _serve_snapshot(source: Path) -> Iterator[ServedSnapshot]:
    """Export the newest weights of ``source``, a run directory or a checkpoint, serve them on a free port of this
    machine, and yield the served model; the server ends after the body of ``with``."""
    with tempfile.TemporaryDirectory(prefix="headrace-harness-") as scratch:
        name = source.expanduser().absolute().name
        directory, token = Path(scratch) / name, secrets.token_hex(16)
        export(source, directory)
        log = Path(scratch) / "serve.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, "serve", str(directory), "--port", "0", "--set", f"serve.name={name}"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=program_environment({"HEADRACE_SERVE_TOKEN": token, "COLUMNS": "200"}),
            )
        try:
            url = _wait_until_ready(process, log, token)
            yield ServedSnapshot(url=url, token=token, name=name, directory=directory)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, token: str) -> str:
    """Wait until the server ``process`` has loaded its model, and return its URL, which it writes into the file
    ``log``. Raises :class:`~headrace.base.errors.RunError` if it ends or takes longer than :data:`START_S`."""
    for _ in range(int(START_S / POLL_S)):
        said = log.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            raise RunError(f"the server ended with code {process.returncode}: {said[-800:]}", remedy="see its words")
        url = said.partition("listening on ")[2].partition(";")[0].strip()
        if url and _is_healthy(url, token):
            return url
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    raise RunError(f"the server was not ready after {START_S:g} s", remedy="serve the model alone: headrace serve")


def _is_healthy(url: str, token: str) -> bool:
    """Return whether the server at ``url`` answers a health check with status 200."""
    try:
        return httpx.get(f"{url}/health", headers={"authorization": f"Bearer {token}"}, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _lm_eval(served: ServedSnapshot, arguments: Sequence[str]) -> list[str]:
    """Return the command-line arguments of lm-eval for the served snapshot."""
    length = context_length(str(served.directory))
    model = (
        f"model={served.name},base_url={served.url}/v1/completions,tokenizer={served.directory},"
        f"max_length={length},num_concurrent=4"
    )
    return ["--model", "local-completions", "--model_args", model, *arguments]


def _inspect(served: ServedSnapshot, arguments: Sequence[str]) -> list[str]:
    """Return the command-line arguments of Inspect for the served model."""
    return ["eval", *arguments, "--model", f"openai-api/headrace/{served.name}"]


LM_EVAL = HarnessProgram(
    module="lm_eval",
    install="lm_eval[api]",
    arguments=_lm_eval,
    variables=lambda served: {"OPENAI_API_KEY": served.token},
)
"""EleutherAI's lm-evaluation-harness: tasks of likelihood, multiple choice, perplexity and generation."""
INSPECT = HarnessProgram(
    module="inspect_ai",
    install="inspect-ai openai",
    arguments=_inspect,
    variables=lambda served: {"HEADRACE_BASE_URL": f"{served.url}/v1", "HEADRACE_API_KEY": served.token},
)
"""The UK AI Security Institute's Inspect: tasks in Python, over chats."""
