"""`headrace trace` and `headrace watch`, on runs of any state."""

import gzip
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError, DataError
from headrace.base.types.observation import LiveState, Wait
from headrace.launch.order import ComponentStatus
from headrace.run.cli.app import app
from headrace.run.observe import load_run
from headrace.run.observe.otel import send_trace
from headrace.run.session.directory import Status
from tests.run.observe.synthetic import MakeRun


def said(*arguments: object) -> str:
    answer = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.stdout


def test_trace_says_where_the_time_went_and_writes_a_file_for_perfetto(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    text = said("trace", make_run(10), "--out", out)
    assert " ".join(text.split()).startswith("generation-bound: The learner works 42% of the time and waits 58%: ")
    assert len(json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]) > 90


def test_trace_as_json_has_the_account(make_run: MakeRun) -> None:
    tree = json.loads(said("trace", make_run(10), "--json"))
    assert tree["account"]["seconds"] == pytest.approx(10)
    assert tree["verdict"].startswith("generation-bound")
    assert tree["notes"] == []


def test_trace_of_a_run_that_is_being_written_says_what_it_can(make_run: MakeRun) -> None:
    run = make_run(3)
    (run / "summary.json").unlink()
    with (run / "trace.jsonl").open("ab") as file:
        file.write(b'["engine","gener')
    text = said("trace", run)
    assert "the run has not ended, or was killed" in text
    assert "generation-bound" in text


@pytest.mark.parametrize("verb", ["trace", "watch"])
def test_a_directory_without_a_run_is_named(tmp_path: Path, verb: str) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        said(verb, tmp_path)


def test_watch_draws_the_present_moment_of_a_run(tmp_path: Path) -> None:
    state = LiveState(
        steps_done=42, steps_total=100, wall_s=9.0, eta_s=61.0, verdict="learner-bound: the engine waits."
    )
    (tmp_path / "live.json").write_bytes(msgspec.json.encode(state))
    text = said("watch", tmp_path)
    for words in ("step 42/100", "1 min 01 s left", "learner-bound: the engine waits."):
        assert words in text


def test_watch_says_how_a_run_ended_and_shows_no_loop_at_work(tmp_path: Path) -> None:
    wait = Wait(loop="learner", state="busy", what="snapshot of step 100", since_s=1.0)
    state = LiveState(steps_done=100, steps_total=100, phase="training", eta_s=0.0, waits=(wait,))
    (tmp_path / "live.json").write_bytes(msgspec.json.encode(state))
    no_process = 2**22 + 1  # the kernel gives no number this large
    controller = ComponentStatus(role="controller", pid=no_process, state="ready", version=None)
    status = Status(
        phase="training", steps_done=100, steps_total=100, version=100, written_s=0.0, components=[controller], waits=[]
    )
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(status))
    text = said("watch", tmp_path)
    assert "killed" in text
    assert not any(words in text for words in ("training", "snapshot of step 100", "left"))


def test_watch_of_a_run_whose_controller_is_stopped_says_so_beside_its_last_state(tmp_path: Path) -> None:
    (tmp_path / "live.json").write_bytes(msgspec.json.encode(LiveState(steps_done=7, steps_total=20, phase="training")))
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            controller = ComponentStatus(role="controller", pid=process.pid, state="ready", version=None)
            status = Status(
                phase="training",
                steps_done=7,
                steps_total=20,
                version=7,
                written_s=0.0,
                components=[controller],
                waits=[],
            )
            (tmp_path / "status.json").write_bytes(msgspec.json.encode(status))
            text = said("watch", tmp_path, "--once")
        finally:
            process.kill()
    assert f"the controller is stopped (SIGSTOP; kill -CONT {process.pid}" in text
    assert "step 7/20" in text


def test_watch_shows_every_word_of_the_verdict_on_a_narrow_terminal(tmp_path: Path) -> None:
    words = " ".join(["learner-bound: the engine waits", *map(str, range(100, 150)), "last"])
    (tmp_path / "live.json").write_bytes(msgspec.json.encode(LiveState(steps_done=7, steps_total=20, verdict=words)))
    text = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["watch", str(tmp_path)], catch_exceptions=False).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert words in " ".join(text.replace("│", " ").split())


def test_watch_names_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "live.json").write_bytes(b'{"steps_done": "many"}')
    with pytest.raises(DataError, match=r"live\.json is damaged"):
        said("watch", tmp_path)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector of OpenTelemetry: its address, and what it was sent."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_every_span_at_its_time(make_run: MakeRun, collector: tuple[str, list[bytes]]) -> None:
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    run = load_run(make_run(80))
    url, bodies = collector
    assert send_trace(run, url) == len(run.spans)
    requests = [trace_service.ExportTraceServiceRequest.FromString(gunzipped(body)) for body in bodies]
    spans = [
        s for r in requests for resource in r.resource_spans for scope in resource.scope_spans for s in scope.spans
    ]
    offset_s = run.steps[0].unix_s - run.steps[0].clock_s
    got = sorted((s.name, round(s.start_time_unix_nano / 1e9 - offset_s, 3)) for s in spans)
    assert got == sorted((s.name, round(s.start_s, 3)) for s in run.spans)


def gunzipped(body: bytes) -> bytes:
    return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body


def test_without_the_packages_the_extra_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as caught:
        send_trace(load_run(make_run(1)), "http://127.0.0.1:1/v1/traces")
    assert "headrace[otel]" in caught.value.remedy
