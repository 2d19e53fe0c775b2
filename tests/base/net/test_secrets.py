"""A real run with every kind of secret: none of them is left anywhere that others could read."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from headrace.base.clock import RealClock
from headrace.base.config.load import merge
from headrace.base.errors import ConfigError
from headrace.flow.config import FlowConfig
from headrace.flow.ledger.opening import open_ledger
from headrace.run.session import load_config
from headrace.wings.view.app import make_app
from headrace.wings.view.run import OpenRun
from tests.redis_server import started
from tests.rollout.environments.tasks import chat_model, make_env_run
from tests.run.session.runs import make_run, running, tiny_model
from tests.wings.view.browsing import LET_IN, TOKEN

JUDGE_KEY = "sk-judge-5d41402abc4b2a76b9719d911017c592"
PASSWORD = "redis-7d793037a0760186574b0282f2f435e7"
REPLY = json.dumps({"choices": [{"message": {"content": '{"score": 5}'}}]}).encode()


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        right = self.headers["authorization"] == f"Bearer {JUDGE_KEY}"
        self.send_response(200 if right else 401)
        self.send_header("content-length", str(len(REPLY)))
        self.end_headers()
        self.wfile.write(REPLY)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def judge() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def arguments_of(pid: int) -> str:
    """The command lines of a process and of all that it has started."""
    parent = psutil.Process(pid)
    return "\n".join(" ".join(process.cmdline()) for process in (parent, *parent.children(recursive=True)))


def telling(file: Path) -> str:
    """The program, which writes down the tokens that it draws."""
    return f"""
import secrets
real = secrets.token_hex
def told(size=None):
    drawn = real(size)
    if size == 32:
        open({str(file)!r}, "a").write(drawn + " ")
    return drawn
secrets.token_hex = told
from headrace.run.cli import main; main()
"""


SPY = """
import glob, os, sys

def seen(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("latin-1")
    except OSError as error:
        return str(error)

def leads_to(path):
    try:
        return os.readlink(path)
    except OSError as error:
        return str(error)

found = [f"{name}={value}" for name, value in os.environ.items()]
for directory in glob.glob("/proc/[0-9]*"):
    found += [seen(f"{directory}/environ"), seen(f"{directory}/cmdline")]
    for descriptor in glob.glob(f"{directory}/fd/*"):
        found.append(leads_to(descriptor))
for number in range(3, 64):
    try:
        os.set_blocking(number, False)
        found.append(os.read(number, 1 << 16).decode("latin-1"))
    except OSError:
        pass
for path in glob.glob(os.environ.get("TMPDIR", "/tmp") + "/headrace*/**", recursive=True):
    found.append(seen(path) if os.path.isfile(path) else path)
text = "\\n".join(found)
"""
AS_PROGRAM = """
import json, urllib.request
open(sys.argv[1], "a").write(text)
task = json.load(open(os.environ["HEADRACE_TASK"]))
urllib.request.urlopen(urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/responses", data=json.dumps({"input": task["prompt"]}).encode(),
    headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)).read()
print(json.dumps({"reward": len(task) % 2}))
"""
AS_CODE = """
from headrace.rollout.scoring.sandbox import run_python

def reward(completion):
    done = run_python({code!r})
    with open({file!r}, "a") as seen:
        seen.write(done.stdout + done.stderr)
    return len(completion) / 4
"""


@pytest.mark.parametrize("kind", ["program", pytest.param("code", marks=pytest.mark.slow)])
def test_nothing_that_a_program_can_list_holds_the_token_of_the_run(kind: str, tmp_path: Path) -> None:
    file, drawn = tmp_path / "seen", tmp_path / "drawn"
    file.touch()
    sections: dict[str, Any] = {"flow": {"max_age": 0, "group_size": 2}, "run": {"steps": 1}}
    if kind == "program":
        spy = tmp_path / "spy.py"
        spy.write_text(SPY + AS_PROGRAM)
        env = {"kind": "program", "entry": "", "command": [sys.executable, str(spy), str(file)]}
        run_file = make_env_run(tmp_path / "it", chat_model(tmp_path / "model"), "", "agent", env=env, **sections)
    else:
        reward = AS_CODE.format(code=SPY + "print(text)", file=str(file))
        run_file = make_run(tmp_path / "it", tiny_model(tmp_path / "model"), reward=reward, **sections)
    with running("train", run_file, program=telling(drawn)) as life:
        said = life.rest()
        assert life.process.returncode == 0, said + "".join(life.lines)
    seen = file.read_text(encoding="latin-1")
    assert "PATH=" in seen
    assert len(drawn.read_text().split()) >= 1
    assert not [token for token in drawn.read_text().split() if token in seen]


def test_no_secret_of_a_run_is_left_in_what_it_writes_says_or_shows(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = pytest.importorskip("redis")
    server = started(tmp_path / "redis")
    monkeypatch.setenv("JUDGE_KEY", JUDGE_KEY)
    monkeypatch.setenv("LEDGER_PASSWORD", PASSWORD)
    admin = redis.Redis(unix_socket_path=str(server.socket))
    admin.config_set("requirepass", PASSWORD)
    admin.close()
    try:
        with judge() as url:
            run_file = make_run(
                tmp_path / "it", model_dir, sync={"transport": "http"}, env={"reward_workers": 1},
                flow={"ledger": "redis", "ledger_url": server.url, "ledger_password_env": "LEDGER_PASSWORD"},
            )  # fmt: skip
            text = run_file.read_text().replace('reward = "reward.py:reward"\n', "")
            text += f'[[env.rewards]]\nkind = "judge"\nbase_url = "{url}"\nmodel = "m"\napi_key_env = "JUDGE_KEY"\n'
            text += '[[observe.writers]]\nkind = "prometheus"\nport = 19467\n'
            run_file.write_text(text)
            with running("train", run_file, program=telling(tmp_path / "drawn")) as life:
                life.until_step()
                arguments = arguments_of(life.process.pid)
                said = life.rest() + "".join(life.lines)
            assert life.process.returncode == 0, said
        run_dir = run_file.parent / "run"
        token = (tmp_path / "drawn").read_text().split()[0]
        metrics = (run_dir / "metrics.token").read_text()
        secrets = {"the judge's key": JUDGE_KEY, "the password": PASSWORD, "the token": token, "the metrics'": metrics}
        ledger = open_ledger(run_dir)
        notes = str(ledger.notes())
        ledger.close()
        kept = (server.directory / "appendonlydir").rglob("*")
        places = {"arguments": arguments, "output": said, "notes": notes, "the view": shown(run_dir)}
        places |= {
            str(path): path.read_bytes().decode("latin-1") for path in [*run_dir.rglob("*"), *kept] if path.is_file()
        }
        assert len(places) > 10
        for place, words in places.items():
            for name, secret in secrets.items():
                own = place.endswith("metrics.token") and secret == metrics
                assert own or secret not in words, f"{name} is in {place}"
        assert (run_dir / "metrics.token").stat().st_mode & 0o077 == 0
    finally:
        server.kill()


def shown(run_dir: Path) -> str:
    """Everything that the dashboard tells of a run as a whole."""
    run = OpenRun(run_dir, RealClock())
    app = make_app([run], clock=RealClock(), token=TOKEN, ending=lambda: True)
    with TestClient(app, headers=LET_IN) as client:
        pages = ("overview", "system", "metrics", "flow", "timeline", "series?names=reward_mean")
        told = [client.get(f"/api/runs/0/{page}").text for page in pages]
        told += [client.get("/api/compare").text, client.get("/api/runs").text]
    run.close()
    return "\n".join(told)


@pytest.mark.parametrize("url", ["redis://user:hush@host/0", "redis://:hush@host", "unix:///r.sock?password=hush"])
def test_a_password_in_the_settings_is_refused_without_being_said(url: str) -> None:
    with pytest.raises(ValueError, match="ledger_url holds a password") as refused:
        FlowConfig.model_validate({"ledger": "redis", "ledger_url": url})
    words = str(refused.value).partition("[type=")[0]
    assert "hush" not in words
    assert "ledger_password_env" in words


JUDGE = {"kind": "judge", "model": "m"}
REWARDS = {"rewards": [{**JUDGE, "base_url": "http://127.0.0.1/v1"}]}
HUSH = (
    ("env.rewards 'judge': base_url", {"env": {"rewards": [{**JUDGE, "base_url": "https://me:hush@x/v1"}]}}),
    ("env.rewards 'judge': base_url", {"env": {"rewards": [{**JUDGE, "base_url": "https://hush@x/v1"}]}}),
    ("env.rewards 'judge': base_url", {"env": {"rewards": [{**JUDGE, "base_url": "http://x/v1?api_key=hush"}]}}),
    ("engine.server.urls", {"engine": {"kind": "vllm", "server": {"urls": ["http://me:hush@x:8000"]}}}),
    ("flow.ledger_url", {"flow": {"ledger": "redis", "ledger_url": "redis://:hush@x/0"}}),
    ("launch.join", {"launch": {"join": "redis://me:hush@x/0"}}),
    (
        "observe.writers[0].tracking_uri",
        {"observe": {"writers": [{"kind": "mlflow", "tracking_uri": "http://a:hush@x"}]}},
    ),
    ("env.entry", {"env": {"kind": "bridge", "entry": "openenv/http://me:hush@x:8000"}}),
    ("env.entry", {"env": {"kind": "bridge", "entry": "mcp/https://x/mcp?token=hush"}}),
)


@pytest.mark.parametrize(("setting", "settings"), HUSH)
def test_no_url_of_a_run_file_may_hold_a_secret(setting: str, settings: dict[str, Any]) -> None:
    tree = merge({"model": {"path": "m"}, "data": {"path": "d"}, "env": REWARDS}, settings)
    if tree["env"].get("entry"):
        del tree["env"]["rewards"]
    with pytest.raises(ConfigError, match="stand in its files") as refused:
        load_config(tree)
    assert setting in refused.value.problem
    assert "hush" not in f"{refused.value.problem} {refused.value.remedy}"


@pytest.mark.parametrize("url", ["http://x:8000/v1?version=2", "https://x/token/v1", "http://[::1]:8000/v1?token="])
def test_urls_without_a_secret_are_taken(url: str) -> None:
    load_config({"model": {"path": "m"}, "env": {"rewards": [{**JUDGE, "base_url": url}]}, "data": {"path": "d"}})


def test_a_password_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.flow.ledger.redis import RedisLedger

    monkeypatch.delenv("LEDGER_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=r"LEDGER_PASSWORD.* is not set"):
        RedisLedger("redis://127.0.0.1:1", "r", group_size=2, groups_per_step=1, password_env="LEDGER_PASSWORD")
