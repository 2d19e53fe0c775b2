"""Checkpoints of a server, as its client lists, downloads, replaces and samples from them."""

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import httpx
import pytest
import tinker
from tinker import RequestFailedError, RestClient, types
from tinker._exceptions import APIStatusError

from tests.wings.tinker.asking import IDS, create_model, sample, step
from tests.wings.tinker.serving import NAME, client, datum, served


def test_checkpoints_are_listed_downloaded_and_deleted(service, server):
    trained = create_model(service)
    step(trained)
    training = trained.save_state("one", ttl_seconds=3600).result().path
    sampler = trained.save_weights_for_sampler("two").result().path
    external = trained.save_weights_external("three").result().path
    rest = RestClient(base_url=server[0], api_key=server[1])
    listed = rest.list_checkpoints(trained.model_id).result().checkpoints
    assert {each.tinker_path for each in listed} == {training, sampler, external}
    assert [each.expires_at is not None for each in listed if each.tinker_path == training] == [True]
    signed = rest.get_external_weights_urls(external).result()
    assert set(signed.urls) == {"adapter_model.safetensors", "adapter_config.json"}
    assert 3000 < signed.expires.timestamp() - time.time() < 3700
    url = signed.urls["adapter_config.json"]
    assert httpx.get(url).json()["r"] == 4  # without the key
    assert httpx.get(url.replace("adapter_config.json", "adapter_model.safetensors")).status_code == 401
    assert httpx.get(url.replace("expires=", "expires=1")).status_code == 401
    assert httpx.get(url.partition("?")[0]).status_code == 401
    named = service.create_sampling_client(model_path=sampler).result()
    assert named.get_base_model() == NAME
    rest.delete_checkpoint_from_tinker_path(training).result()
    with pytest.raises(APIStatusError, match="there is no checkpoint"):
        service.create_training_client_from_state(training).result()
    with pytest.raises(RequestFailedError, match="exists"):
        trained.save_weights_for_sampler("two").result()


def test_the_programs_of_client_and_cookbook_download_checkpoints(service, server, tmp_path):
    trained = create_model(service)
    step(trained)
    training, external = trained.save_state("one").result().path, trained.save_weights_external("two").result().path
    shell = {**os.environ, "TINKER_BASE_URL": server[0], "TINKER_API_KEY": server[1], "TINKER_TELEMETRY": "0"}
    for path in (training, external):
        command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", path, "-o", str(tmp_path)]
        subprocess.run(command, check=True, env=shell)
    cookbook = f"from tinker_cookbook import weights; weights.download(tinker_path={external!r}, output_dir='book')"
    subprocess.run([sys.executable, "-c", cookbook], check=True, env=shell, cwd=tmp_path)
    files = [tmp_path.rglob(name) for name in ("adapter_model.safetensors", "adapter_config.json")]
    assert [len({each.read_bytes() for each in found}) for found in files] == [1, 1]
    assert len(list(tmp_path.rglob("adapter_model.safetensors"))) == 3


def test_lists_come_in_pages_and_runs_of_a_project_alone(server):
    ask = {"headers": {"x-api-key": server[1]}}
    with tinker.ServiceClient(base_url=server[0], api_key=server[1], project_id="p1") as service:
        trained = create_model(service)
        rest = RestClient(base_url=server[0], api_key=server[1])
        assert [each.training_run_id for each in rest.list_training_runs(project_id="p1").result().training_runs] == [
            trained.model_id
        ]
        assert rest.list_training_runs(project_id="p2").result().training_runs == []
        all_of_them = rest.list_sessions(limit=1000).result().sessions
        assert all_of_them[0] == trained.model_id.partition(":")[0]
        assert rest.list_sessions(limit=1).result().sessions == all_of_them[:1]
        assert rest.list_sessions(limit=1, offset=1).result().sessions == all_of_them[1:2]
    assert httpx.get(f"{server[0]}/api/v1/sessions?limit=x", **ask).status_code == 400


def test_weights_that_are_not_finite_are_not_saved(service):
    trained = create_model(service)
    sampler = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    trained.forward_backward([datum(IDS)], "cross_entropy").result()
    trained.optim_step(types.AdamParams(learning_rate=1e39)).result()
    for save in (
        lambda: trained.save_state("far"),
        lambda: trained.save_weights_for_sampler("far"),
        lambda: trained.save_weights_and_get_sampling_client(kind="inflight"),
    ):
        with pytest.raises(RequestFailedError, match=r"after 1 optimizer steps hold values .* nothing is saved"):
            save().result()
    assert sample(sampler).sequences[0].tokens


@pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state:FutureWarning")
def test_a_model_whose_weights_are_lost_goes_on_from_a_checkpoint(model, tmp_path):
    with served(model, tmp_path) as (url, key):
        service = client(url, key)
        trained = create_model(service)
        good = trained.save_state("good").result().path
        trained.forward_backward([datum(IDS)], "cross_entropy").result()
        trained.optim_step(types.AdamParams(learning_rate=1e39)).result()
    with served(model, tmp_path, port=int(url.rpartition(":")[2])):
        with pytest.raises(RequestFailedError, match="cannot be restored"):
            step(trained)
        other = create_model(service, rank=8).save_state("other").result().path
        with pytest.raises(RequestFailedError, match=r"has rank 8, .* the model has rank 4"):
            trained.load_state(other).result()
        trained.load_state(good).result()
        assert step(trained).metrics["loss:sum"] > 0
        service.close("success").result()


@pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state:FutureWarning")
def test_a_model_keeps_its_name_of_the_base_whatever_it_loads(model, tmp_path):
    with served(model, tmp_path, alias="alias/one") as (url, key), client(url, key) as service:
        path = create_model(service).save_state("named").result().path
        trained = service.create_lora_training_client(base_model="alias/one", rank=4).result()
        trained.save_weights_and_get_sampling_client(kind="inflight").result()
        trained.load_state(path).result()
        assert trained.get_info().model_data.model_name == "alias/one"
        step(trained)
        sampler = trained.save_weights_and_get_sampling_client(kind="inflight").result()
        assert sampler.get_base_model() == "alias/one"
        assert sample(sampler).sequences[0].tokens


def test_what_a_sampler_of_a_living_session_uses_stays_when_its_maker_leaves(model, tmp_path):
    with served(model, tmp_path) as (url, key), client(url, key) as other:
        maker = client(url, key)
        trained = create_model(maker)
        path = trained.save_state("again").result().path
        unused = trained.save_state("unused").result().path
        sampler = other.create_sampling_client(model_path=path).result()
        for name in ("again", "unused"):
            trained.save_state(name, overwrite=True).result()
        maker.close("success").result()
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
            rows = dict(db.execute("SELECT directory, expires_s FROM checkpoints WHERE kind = 'ephemeral'"))
        left = {each.rpartition("/")[2].partition("@")[0]: expires_s - time.time() for each, expires_s in rows.items()}
        assert left["again"] > 3600
        assert left.get("unused", 0) <= 0
        assert unused
        assert sample(sampler).sequences[0].tokens


def test_a_sampler_keeps_the_weights_of_a_checkpoint_that_is_replaced(service):
    trained = create_model(service)
    path = trained.save_state("again").result().path
    used, later = (service.create_sampling_client(model_path=path).result() for _ in range(2))
    before = sample(used, temperature=1.0).sequences[0]
    for _ in range(3):
        step(trained)
    trained.save_state("again", overwrite=True).result()
    trained.save_weights_and_get_sampling_client(kind="inflight").result()
    assert sample(later, temperature=1.0).sequences[0].logprobs == before.logprobs
    newest = service.create_sampling_client(model_path=path).result()
    assert sample(newest, temperature=1.0).sequences[0].logprobs != before.logprobs
