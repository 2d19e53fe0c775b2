"""TLS where it is asked for, with a real certificate: who has not got it learns nothing, who is not meant is not
believed."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import torch

from headrace.base.config.tls import client_context, server_context
from headrace.base.errors import ConfigError, WeightsError
from headrace.run.observe import RunFacts
from headrace.run.observe.writers.prometheus import Prometheus
from headrace.sync.config import Route, SyncConfig
from headrace.sync.http import HttpInbox
from headrace.sync.transports import make_publisher
from headrace.testing.sync import TOKEN, are_equal, open_pair
from headrace.wings.serve.config import ServeSection
from headrace.wings.view.serving import ViewConfig
from tests.base.net.certificates import certificate
from tests.wings.serve.server_process import make_model, served
from tests.wings.view.browsing import viewed
from tests.wings.view.synthetic import write_run

torch.set_num_threads(1)


def route(crt: Path, key: Path) -> Route:
    return Route(transport="http", deadline_s=5.0, tls_certificate=str(crt), tls_key=str(key))


def test_weights_travel_under_tls_to_the_engine_that_holds_the_key(tmp_path: Path) -> None:
    with open_pair(route(*certificate(tmp_path)), seed=3) as pair:
        assert pair.receiver.address.startswith("https://127.0.0.1:")
        for _ in range(3):
            expected = pair.learn()
            pair.transfer()
            assert are_equal(pair.engine, expected)


def test_a_learner_believes_its_own_certificate_and_no_other(tmp_path: Path) -> None:
    real, other = certificate(tmp_path / "real"), certificate(tmp_path / "other")
    with open_pair(route(*real), seed=3) as pair:
        deceived = make_publisher(route(*other), pair.learner, TOKEN)
        deceived.copy(0)
        with pytest.raises(WeightsError, match="CERTIFICATE_VERIFY_FAILED"):
            deceived.announce(0, 0, [pair.receiver.address])
        pair.transfer()


def test_clear_text_is_not_answered_where_tls_is_asked_for(tmp_path: Path) -> None:
    inbox = HttpInbox(TOKEN, 1000, 5.0, tls=server_context(*map(str, certificate(tmp_path))))
    host, port = inbox.address.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as clear:
        clear.sendall(b"PUT /weights/1-0123456789abcdef HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in clear.recv(1000)
    inbox.close()


def test_a_handshake_that_never_ends_keeps_nobody_out(tmp_path: Path) -> None:
    pair = certificate(tmp_path)
    inbox = HttpInbox(TOKEN, 1000, 1.0, tls=server_context(*map(str, pair)))
    place = inbox.address.removeprefix("https://").split(":")
    with socket.create_connection((place[0], int(place[1])), timeout=10) as silent:
        client = httpx.Client(verify=client_context(str(pair[0])), timeout=10)
        assert client.put(f"{inbox.address}/weights/x").status_code == 401
        assert silent.recv(1) == b""  # it was cut after the deadline
        client.close()
    inbox.close()


@pytest.mark.slow
def test_serve_answers_over_tls_and_not_without(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path)
    settings = ("--set", f"serve.tls_certificate={crt}", "--set", f"serve.tls_key={key}")
    with served(make_model(tmp_path / "model"), *settings) as server:
        assert server.url.startswith("https://127.0.0.1:")
        headers = {"authorization": "Bearer a-token-of-the-tests"}
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(crt))) as client:
            assert client.get("/health").status_code == 401
            assert client.get("/health", headers=headers).json()["status"] == "ok"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url.replace('https', 'http')}/health")


def test_the_view_answers_over_tls_with_a_cookie_for_tls_alone(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path)
    run = write_run(tmp_path / "run", steps=1)
    with viewed(run, "--tls-certificate", crt, "--tls-key", key) as address:
        assert address.startswith("https://127.0.0.1:")
        with httpx.Client(verify=ssl.create_default_context(cafile=str(crt))) as client:
            let_in = client.get(address)
            assert "Secure" in let_in.headers["set-cookie"]
            assert client.get(f"{address.partition('?')[0]}api/runs").status_code == 200


def test_metrics_are_read_over_tls(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path)
    writer = Prometheus(port=19466, tls_certificate=str(crt), tls_key=str(key)).open(
        RunFacts(run_dir=tmp_path, config={})
    )
    token = (tmp_path / "metrics.token").read_text()
    with httpx.Client(base_url="https://127.0.0.1:19466", verify=client_context(str(crt))) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert (tmp_path / "metrics.token").stat().st_mode & 0o077 == 0
    writer.close()


def test_half_a_setting_and_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    one, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    for make in (
        lambda: ServeSection(tls_certificate="x"),
        lambda: ViewConfig(tls_key="x"),
        lambda: SyncConfig(transport="http", tls_key="x"),
        lambda: Prometheus(tls_key="x"),
        lambda: SyncConfig(tls_certificate="x", tls_key="y"),
    ):
        with pytest.raises(ValueError, match="tls_"):  # pydantic's, until a run file is loaded
            make()
    with pytest.raises(ConfigError, match=r"KEY_VALUES_MISMATCH|mismatch"):
        server_context(str(one[0]), str(other[1]))
    with pytest.raises(ConfigError, match="No such file"):
        server_context(str(tmp_path / "nothing"), str(one[1]))
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot be used"):
        client_context(str(tmp_path / "text"))
