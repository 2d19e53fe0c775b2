"""Several bases in one server: each has its own tenants, samplers and limits, and none is taken for another."""

from pathlib import Path

import httpx
import pytest
from tinker import RequestFailedError, RestClient, types
from tinker._exceptions import APIStatusError
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.run.cli.app import app
from headrace.wings.tinker.verb import make_bases
from tests.wings.tinker.serving import NAME, client, datum, served, tiny

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state:FutureWarning")
OTHER = "other/model"
IDS = [5, 9, 11, 7, 30, 22, 8, 14, 6, 19, 33, 12]
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("other") / "model", init_std=0.3, num_heads=2)


@pytest.fixture(scope="module")
def both(model, other, tmp_path_factory):
    with served(model, tmp_path_factory.mktemp("both"), others={OTHER: other}) as found:
        yield found


def losses(trained, count=3):
    found = []
    for _ in range(count):
        found.append(trained.forward_backward([datum(IDS)], "cross_entropy").result().metrics["loss:sum"])
        trained.optim_step(ADAM).result()
    return found


def new(service, base, rank=4):
    return service.create_lora_training_client(base_model=base, rank=rank, seed=1).result()


def sampled(sampler):
    params = types.SamplingParams(max_tokens=6, seed=3)
    prompt = types.ModelInput.from_ints(IDS)
    return sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0].logprobs


def test_each_tenant_gets_what_a_server_of_its_base_alone_gives(both, model, other, tmp_path):
    alone = {}
    for name, directory in ((NAME, model), (OTHER, other)):
        with served(directory, tmp_path / name) as (url, key):
            trained = new(client(url, key), NAME)
            found = losses(trained)
            sampler = trained.save_weights_and_get_sampling_client().result()
            alone[name] = found, sampled(sampler)
    service = client(*both)
    tenants = {name: new(service, name) for name in (NAME, OTHER)}
    together = {name: losses(each) for name, each in tenants.items()}
    samplers = {name: each.save_weights_and_get_sampling_client().result() for name, each in tenants.items()}
    assert {name: (together[name], sampled(each)) for name, each in samplers.items()} == alone
    assert alone[NAME] != alone[OTHER]
    assert [each.get_info().model_data.model_name for each in tenants.values()] == [NAME, OTHER]
    assert [each.get_info().model_data.tokenizer_id for each in tenants.values()] == [str(model), str(other)]


def test_the_capabilities_list_every_name(both):
    found = RestClient(base_url=both[0], api_key=both[1]).get_server_capabilities().result().supported_models
    assert [each.model_name for each in found] == [NAME, OTHER]


def test_a_checkpoint_goes_to_a_model_of_its_own_base(both):
    service = client(*both)
    trained = new(service, OTHER)
    expected = losses(trained, 2)
    path = trained.save_state("here").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert losses(again, 1) == losses(trained, 1)
    assert expected
    with pytest.raises(RequestFailedError, match=f"is of the base {OTHER}; the model .* of the base {NAME}"):
        new(service, NAME).load_state(path).result()
    with pytest.raises(APIStatusError, match=f"is of {OTHER}"):
        service.create_training_client_from_state(path, base_model=NAME).result()
    sampler = service.create_sampling_client(model_path=trained.save_weights_for_sampler("s").result().path).result()
    assert sampler.get_base_model() == OTHER


def test_models_whose_base_is_not_served_now_are_refused_by_name_and_come_back_with_it(model, other, tmp_path):
    with served(model, tmp_path / "state", others={OTHER: other}) as (url, key):
        trained = new(client(url, key), OTHER)
        found = losses(trained, 1)
    port = int(url.rpartition(":")[2])
    with served(model, tmp_path / "state", port=port):
        body = {"model_id": trained.model_id, "seq_id": 3, "adam_params": {}}
        refused = httpx.post(f"{url}/api/v1/optim_step", json=body, headers={"x-api-key": key})
        assert refused.status_code == 503, "the client asks again"
        assert f"is of {OTHER}, which is not served now; start the server with --name {OTHER}=DIR" in refused.text
    with served(model, tmp_path / "state", others={OTHER: other}, port=port):
        again = trained.forward([datum(IDS)], "cross_entropy").result().metrics["loss:sum"]
    assert again < found[0]


def test_a_name_that_is_now_another_models_is_refused_once_models_were_trained_on_it(model, other, tmp_path):
    with served(model, tmp_path) as (url, key):
        new(client(url, key), NAME)
    with pytest.raises(ConfigError, match="were trained on another"), served(other, tmp_path):
        pass


def test_names_say_which_directory_they_mean(model, other):
    one, two = make_bases(model, ["A", f"B={other}", f"C={model}"])
    assert (one.path, two.path) == (model, other)
    assert one.names == ("A", "C", "model", str(model))
    assert two.names == ("B", str(other)), "the name of the directory is the first one's"


@pytest.mark.parametrize(
    ("names", "words"),
    [(["A={other}", "A"], "A is {other}"), (["=x"], "there is no directory"), (["B=/none"], "there is no directory")],
)
def test_names_that_mean_nothing_or_two_things_are_refused(names, words, model, other, tmp_path):
    given = [argument for name in names for argument in ("--name", name.format(other=other))]
    error = CliRunner().invoke(app, ["tinker", str(model), *given, "--state", str(tmp_path / "s")]).exception
    assert isinstance(error, ConfigError)
    assert words.format(other=other) in error.problem
    assert not Path(tmp_path / "s").exists()


def test_a_directory_of_a_hubs_name_is_served_under_that_name(model, tmp_path, monkeypatch):
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen3-0.6B").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    (one,) = make_bases("Qwen/Qwen3-0.6B", [])
    assert one.names[0] == "Qwen/Qwen3-0.6B"


def test_a_base_that_is_neither_a_directory_nor_a_name_on_a_hub_is_refused_with_both_ways(tmp_path):
    error = CliRunner().invoke(app, ["tinker", "nowhere", "--state", str(tmp_path / "s")]).exception
    assert isinstance(error, ConfigError)
    assert "there is no directory" in error.problem
    assert "or its name on a hub: OWNER/NAME" in error.remedy


def test_a_base_is_served_under_its_name_on_a_hub(model, tmp_path, monkeypatch):
    commit = "0f" * 20
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    (tmp_path / "hub" / "models--acme--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--acme--tiny" / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    begun = []
    monkeypatch.setattr("headrace.wings.tinker.run.serve", lambda config, *_, **__: begun.append(config))
    done = CliRunner().invoke(app, ["tinker", "acme/tiny", "--state", str(tmp_path / "s")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (base,) = begun[0].bases
    assert (str(base.path), base.names[0]) == (str(model), "acme/tiny")
