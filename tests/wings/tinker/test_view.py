"""The page of ``headrace view`` about a server: what it says while the server runs, and afterwards."""

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from tinker import types
from typer.testing import CliRunner

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, DataError
from headrace.run.cli.app import app
from headrace.wings.tinker.journal import KEPT_SAMPLES, WAITING, Journal, JournalEntry
from headrace.wings.tinker.records import ServerRecords
from headrace.wings.view.tenants import make_tenants_app
from tests.wings.tinker.offline import train_body
from tests.wings.tinker.serving import NAME, client, datum, served
from tests.wings.view.browsing import ARGUMENTS, CHROMIUM, LET_IN, TOKEN, viewed

IDS = [5, 9, 11, 7, 30, 22, 8, 14]


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def running(model, state):
    """A server with one tenant, which has made two steps and has an in-flight sampler."""
    with served(model, state) as found, client(*found) as service:
        trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
        sampler = loss = None
        for _ in range(2):
            weights = np.array([1, 1, 1, 0, 0, -1, 1], np.float32)
            loss = trained.forward_backward([datum(IDS, weights=weights)], "cross_entropy").result().metrics["loss:sum"]
            trained.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            sampler = trained.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
        sampled = sampler.sample(prompt=types.ModelInput.from_ints(IDS), num_samples=2, sampling_params=params).result()
        yield trained, sampled, loss


@pytest.fixture
def page(state, running):
    app = make_tenants_app(ServerRecords(state), clock=RealClock(), token="t", secure=False, ending=lambda: False)
    with TestClient(app, headers={"authorization": "Bearer t"}) as asking:
        yield asking


def test_the_page_tells_the_tenants_of_a_server_that_runs(page, running):
    trained, _, loss = running
    (tenant,) = page.get("/api/tenants").json()["tenants"]
    facts = {"model": trained.model_id, "base": NAME, "rank": 4, "steps": 2, "waiting": 0, "failed": 0, "loss": loss}
    assert tenant | facts == tenant


def test_the_page_tells_what_each_sampled_token_was(page, running):
    _, sampled, _ = running
    listed = page.get("/api/tenants").json()["samples"]
    shown = [page.get(f"/api/tenants/samples/{one['number']}").json() for one in reversed(listed)]
    assert [one["ids"] for one in shown] == [one.tokens for one in sampled.sequences]
    assert [one["logprobs"] for one in shown] == [pytest.approx(one.logprobs) for one in sampled.sequences]
    assert [one["versions"] for one in shown] == [[2] * 6] * 2
    assert [(one["prompt"], len(one["prompt_text"]), len(one["pieces"])) for one in shown] == [(IDS, len(IDS), 6)] * 2


def test_the_page_tells_what_each_trained_token_was(page, running):
    trained, _, _ = running
    newest, *_ = page.get(f"/api/tenants/trained/{trained.model_id}").json()
    assert newest["targets"] == IDS[1:]
    assert len(newest["pieces"]) == len(IDS) - 1


def test_a_stranger_sees_nothing_and_what_is_not_there_is_named(page):
    assert page.get("/api/tenants", headers={"authorization": "Bearer other"}).status_code == 401
    assert "there is no sampled sequence 99" in page.get("/api/tenants/samples/99").json()["problem"]
    assert page.get("/").text.count("/static/js/tenants.js") == 1
    assert page.get("/static/js/tenants.js").status_code == 200


def test_the_queue_of_a_server_that_has_ended_is_told(tmp_path):
    journal = Journal(tmp_path)
    journal.run("INSERT INTO models VALUES ('s:train:0', 's', 0, 5.0, 5.0, NULL, NULL, -1)")
    body = train_body([[5, 6, 7]], 1)
    journal.accept(JournalEntry(model="s:train:0", seq=1, kind="forward_backward", body=body, status=WAITING), 7.0)
    journal.close()
    records = ServerRecords(tmp_path)
    (waiting,) = records.queue(17.0)
    assert (waiting["model"], waiting["seq"], waiting["bytes"], waiting["waiting_s"]) == (
        "s:train:0",
        1,
        len(body),
        10.0,
    )
    (tenant,) = records.tenants(17.0)
    assert (tenant["waiting"], tenant["waiting_s"], tenant["idle_s"]) == (1, 10.0, 12.0)
    assert records.last_training_data("s:train:0")[0]["ids"] == [5, 6]


def test_the_oldest_samples_are_deleted(tmp_path):
    journal = Journal(tmp_path)
    row = ("s:sample:0:1:0", "s:sample:0", 0.0, b"", b"", b"", b"", "stop")
    journal.keep_samples([row] * (KEPT_SAMPLES + 3))
    journal.forget_samples()
    assert journal.one("SELECT count(*) AS n, min(number) AS first FROM samples")["n"] == KEPT_SAMPLES
    assert journal.one("SELECT min(number) AS first FROM samples")["first"] == 4
    journal.close()


def test_a_state_has_one_server_at_a_time(tmp_path):
    first = Journal(tmp_path)
    with pytest.raises(ConfigError, match="used by another server"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


def test_what_clients_sent_is_readable_by_the_owner_alone(tmp_path):
    (tmp_path / "journal.sqlite").touch(0o644)  # as one was that an older version made
    journal = Journal(tmp_path)
    assert {each.stat().st_mode & 0o077 for each in tmp_path.iterdir()} == {0}
    journal.close()


def test_a_broken_journal_is_refused_by_name(tmp_path):
    (tmp_path / "journal.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        ServerRecords(tmp_path).tenants(0.0)
    (tmp_path / "journal.sqlite").unlink()
    (tmp_path / "journal.sqlite").mkdir()
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal(tmp_path)


def test_the_program_shows_a_state_and_refuses_what_is_about_runs(state, running, tmp_path):
    with viewed("--token", TOKEN, state) as address:
        told = httpx.get(f"{address.partition('?')[0]}api/tenants", headers=LET_IN).json()
    assert told["directory"] == str(state)
    for more in (["--export"], ["--live"], [str(tmp_path)]):
        error = CliRunner().invoke(app, ["view", str(state), *more]).exception
        assert isinstance(error, ConfigError)
        assert "a page of its own" in error.problem


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_shows_tenants_and_the_tokens_that_are_chosen(state, running):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver, viewed("--token", TOKEN, state) as address:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        tab = browser.new_page()
        errors = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(address)
        tab.click("text=/train:0/")
        tab.wait_for_selector(".tokens .t.d2")
        tab.click("table[aria-label=samples] button, [aria-label=samples] button")
        tab.wait_for_selector(".tokens .t.v2")
        assert tab.locator(".tokens .t.v2").count() == 6
        assert errors == []
        browser.close()
