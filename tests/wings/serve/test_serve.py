"""``headrace serve`` as a program: what it says, what it refuses, how it ends."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError
from headrace.run.cli.app import app
from tests.wings.serve.server_process import DEADLINE_S, Server, make_model, served


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain") / "plain", chat_template=None, max_positions=16_384)


def test_the_verb_explains_itself() -> None:
    said = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert said.exit_code == 0
    for words in ("MODEL", "--token-file", "HEADRACE_SERVE_TOKEN", "--set"):
        assert words in said.output


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["none"], "there is no directory", "give the directory of a Hugging Face"),
        (["MODEL", "--host", "0.0.0.0"], "can be reached from other machines", "--token-file"),
        (["MODEL", "--port", "BUSY"], "cannot listen there: Address already in use", "choose another --port"),
        (["MODEL", "--host", "no.such.host.invalid", "--token", "x"], "cannot listen there", "--host"),
        (["MODEL", "--set", "engine.max_seqs=3"], "engine.max_seqs is not a setting", "did you mean"),
        (["MODEL", "--set", "serve.max_n=0"], "serve.max_n=0", "change serve.max_n"),
        (["MODEL", "--token-file", "none"], "--token-file none cannot be read", "give a file"),
        (["MODEL", "--token-file", "EMPTY"], "is empty", "write the token into it"),
        (["EMPTY_DIR"], "holds no *.safetensors", "give the directory of a Hugging Face"),
    ],
)
def test_what_cannot_be_served_is_told_in_words(
    arguments: list[str], problem: str, remedy: str, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "no-model").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        places = {
            "MODEL": model_dir, "BUSY": busy.getsockname()[1], "EMPTY": tmp_path / "empty",
            "EMPTY_DIR": tmp_path / "no-model",
        }  # fmt: skip
        given = [str(places.get(argument, argument)) for argument in arguments]
        default = [] if "--port" in given else ["--port", "0"]
        said = CliRunner().invoke(app, ["serve", *given, *default])
    error = said.exception
    assert isinstance(error, HeadraceError)
    assert problem in error.problem
    assert remedy in error.remedy


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("secret") / "token"
    file.write_text("from-a-file\n")
    settings = ["--set", "serve.name=mine", "--set", "serve.grace_s=0.2"]
    with served(model_dir, "--token-file", str(file), *settings, token="overruled") as running:
        yield running


def test_what_it_prints_is_what_it_does(server: Server) -> None:
    with server.http("from-a-file") as http:
        (model,) = http.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mine", 16_384)
        chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert (chat.status_code, chat.json()["error"]["code"]) == (400, "no_chat_template")
    said = "".join(server.said)
    assert "listening on http://127.0.0.1:" in said
    assert re.search(r"device +cpu, weights of [\d,]+ MiB", said)
    assert re.search(r"kernels +compiled kernels run .*; attention: (compiled|reference)", said)
    assert re.search(r"cache +[\d,]+ MiB, [\d,]+ blocks", said)
    assert "chat       no" in said
    assert "token      needed" in said
    assert "from-a-file" not in said
    command = shlex.split(said[said.index("curl") : said.index("end it")].replace("\\\n", " "))
    assert command[1] == f"{server.url}/v1/completions"
    assert command[command.index("-H") + 1] == "Content-Type: application/json"
    assert json.loads(command[command.index("-d") + 1])["model"] == "mine"


def test_ctrl_c_ends_open_streams_with_what_they_have(server: Server) -> None:
    body = {"prompt": "Hi", "max_tokens": 16_000, "ignore_eos": True, "stream": True}
    with server.http("from-a-file") as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        server.process.send_signal(signal.SIGINT)
        *_, last, done = lines
        assert server.process.stdout is not None
        assert server.process.stdout.readline().startswith("ending     1 open requests have 0.2 s to finish")
    assert json.loads(last.removeprefix("data: "))["choices"][0]["stop_reason"] == "aborted"
    assert done == "data: [DONE]"
    assert server.process.wait(DEADLINE_S) == 0
