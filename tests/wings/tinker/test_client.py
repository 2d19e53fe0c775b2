"""The unmodified client of the protocol against a server."""

import itertools
import re
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import httpx
import numpy as np
import pytest
import torch
from tinker import RequestFailedError, types
from tinker._exceptions import APIStatusError
from tinker.proto import tinker_public_pb2 as messages
from tinker.types import RequestErrorCategory

from headrace.base.errors import ConfigError
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.wings.tinker import tenants
from headrace.wings.tinker.jobs import ResultResponse
from headrace.wings.tinker.journal import Journal
from headrace.wings.tinker.service import TinkerService
from tests.wings.tinker.asking import ADAM, IDS, create_model, sample, step
from tests.wings.tinker.serving import NAME, client, datum, served

ONES, NUMBERS = np.ones(11, np.float32), itertools.count(900)


@pytest.fixture(scope="module")
def base_logprobs(model):
    """Return log p ``[N, V]`` of the base after each of the tokens."""

    def compute(ids):
        with torch.no_grad():
            logits = forward(load_model(ModelConfig(path=str(model))), torch.tensor(ids), PackedPlan([len(ids)]))
        return logits.log_softmax(-1).numpy()

    return compute


def test_training_lowers_the_loss_and_the_sampler_learns_it(service):
    trained = create_model(service)
    losses = [step(trained).metrics["loss:sum"] for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    sampler = trained.save_weights_and_get_sampling_client().result()
    assert sample(sampler, IDS[:4], temperature=0.0, max_tokens=8).sequences[0].tokens == IDS[4:]


def test_the_first_forward_is_the_base_and_changes_nothing(service, base_logprobs):
    trained = create_model(service)
    first = trained.forward([datum(IDS)], "cross_entropy").result()
    expected = base_logprobs(IDS)[np.arange(len(IDS) - 1), IDS[1:]]
    assert np.allclose(first.loss_fn_outputs[0]["logprobs"].data, expected, atol=1e-5)
    assert first.metrics["loss:sum"] == pytest.approx(-expected.sum(), abs=1e-4)
    assert trained.optim_step(ADAM).result().metrics["version"] == 0
    assert trained.forward([datum(IDS)], "cross_entropy").result().metrics == first.metrics


def test_gradients_of_several_calls_add_up_until_the_step(service):
    once, twice = create_model(service), create_model(service)
    data = [datum(IDS), datum(IDS[3:])]
    once.forward_backward(data, "cross_entropy").result()
    for each in data:
        twice.forward_backward([each], "cross_entropy").result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (once, twice)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_chunks_of_one_call_arrive_last_first_and_add_up(service):
    trained, whole = create_model(service), create_model(service)
    trained.holder._client_config = trained.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    data = [datum([*IDS, extra]) for extra in range(5, 14)]
    found = trained.forward_backward(data, "cross_entropy").result()
    trained.holder._client_config = trained.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 1024})
    expected = whole.forward_backward(data, "cross_entropy").result()
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    for one, other in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        assert np.allclose(one["logprobs"].data, other["logprobs"].data, atol=1e-6)


def test_a_snapshot_sampler_stays_what_it_was_while_the_model_trains(service):
    trained = create_model(service)
    step(trained)
    sampler = trained.save_weights_and_get_sampling_client().result()
    before = sample(sampler, n=3)
    for _ in range(5):
        step(trained)
    after = sample(sampler, n=3)
    assert [one.tokens for one in after.sequences] == [one.tokens for one in before.sequences]
    newer = trained.save_weights_and_get_sampling_client().result()
    scores = [each.compute_logprobs(types.ModelInput.from_ints(IDS)).result() for each in (sampler, newer)]
    assert sum(scores[1][1:]) > sum(scores[0][1:]) + 1


def test_an_inflight_sampler_takes_the_weights_of_the_next_inflight_save(service):
    trained = create_model(service)
    sampler = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt = types.ModelInput.from_ints(IDS)
    before = sampler.compute_logprobs(prompt).result()
    sample(sampler)
    for _ in range(5):
        step(trained)
    assert sampler.compute_logprobs(prompt).result() == before
    trained.save_weights_and_get_sampling_client(kind="inflight").result()
    assert sum(sampler.compute_logprobs(prompt).result()[1:]) > sum(before[1:]) + 1


def test_logits_that_overflow_are_refused_with_the_version_of_the_adapter(service):
    trained = create_model(service)
    trained.forward_backward([datum(IDS)], "cross_entropy").result()
    trained.optim_step(types.AdamParams(learning_rate=1e20)).result()
    sampler = trained.save_weights_and_get_sampling_client().result()
    with pytest.raises(RequestFailedError, match="NaN or infinity under the weights of version 1"):
        sampler.sample(types.ModelInput.from_ints(IDS), 1, types.SamplingParams(max_tokens=4)).result()


def test_an_inflight_sampler_reads_no_cached_prompt_of_its_older_weights(service):
    trained, prompt = create_model(service), IDS * 4
    sampler = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    before = sample(sampler, prompt, temperature=0.0).sequences[0]
    for _ in range(5):
        step(trained)
    trained.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = trained.save_weights_and_get_sampling_client().result()
    found, expected = (sample(each, prompt).sequences[0] for each in (sampler, snapshot))
    assert found.tokens == expected.tokens
    assert np.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert before.tokens


def test_sampled_logprobs_and_prompt_logprobs_are_those_of_the_model(service, base_logprobs):
    sampler = service.create_sampling_client(base_model=NAME).result()
    found = sample(sampler, n=2, max_tokens=6)
    for one in found.sequences:
        whole = [*IDS, *one.tokens]
        expected = base_logprobs(whole)[np.arange(len(IDS) - 1, len(whole) - 1), one.tokens]
        assert np.allclose(one.logprobs, expected, atol=1e-4)
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()
    assert scores[0] is None
    assert np.allclose(scores[1:], base_logprobs(IDS)[np.arange(len(IDS) - 1), IDS[1:]], atol=1e-5)


def test_top_entries_and_targets_are_those_of_the_model(service, base_logprobs):
    sampler = service.create_sampling_client(base_model=NAME).result()
    targets = np.array([[7, -1]] * (len(IDS) - 1))
    found = sampler.sample(
        prompt=types.ModelInput.from_ints(IDS),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2, seed=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=4,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
    ).result()
    every = base_logprobs([*IDS, *found.sequences[0].tokens])
    assert [each is None for each in found.prompt_logprobs] == [True] * 8 + [False] * 4
    assert found.topk_prompt_logprobs[-1][0][0] == every[len(IDS) - 2].argmax()
    assert found.topk_prompt_logprobs[0] is None
    top = found.sequences[0].topk_logprobs
    assert top[0][0][0] == every[len(IDS) - 1].argmax()
    assert len(top[0]) == 3
    assert np.allclose(found.target_prompt_logprobs.data[0::2], every[: len(IDS) - 1, 7], atol=1e-5)
    assert found.target_prompt_logprobs.data[1::2] == [0.0] * (len(IDS) - 1)


def test_sparse_targets_are_scored_in_their_layout(service, base_logprobs):
    sampler = service.create_sampling_client(base_model=NAME).result()
    targets = np.full((len(IDS) - 1, 3), -1)
    targets[[0, 0, 4, 10], [0, 2, 1, 2]] = listed = [7, 0, 3, 9]
    given = types.TensorData.from_torch_sparse(torch.from_numpy(targets), pad_value=-1)
    assert given.sparse_crow_indices is not None
    params = types.SamplingParams(max_tokens=1)
    prompt = types.ModelInput.from_ints(IDS)
    asked = {"prompt": prompt, "num_samples": 1, "sampling_params": params}
    found = sampler.sample(target_prompt_logprobs=given, **asked).result().target_prompt_logprobs
    assert (found.sparse_crow_indices, found.sparse_col_indices) == (given.sparse_crow_indices, [0, 2, 1, 2])
    assert np.allclose(found.data, base_logprobs(IDS)[[0, 0, 4, 10], listed], atol=1e-5)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"data": [1.5, 7]}, "holds 1.5"),
        ({"data": [1e30, 7]}, "holds 1e\\+30"),
        ({"data": [7]}, "has 1 ids"),
        ({"sparse_crow_indices": [0, 2, 1], "sparse_col_indices": [0, 0]}, "do not fit"),
        ({"sparse_crow_indices": [0, 1, 2]}, "do not fit"),
        ({"sparse_crow_indices": [], "sparse_col_indices": [0, 0]}, "do not fit"),
        ({"shape": [2, 10**9], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 0]}, "a sparse tensor"),
    ],
)
def test_targets_that_cannot_be_scored_are_refused_by_name(service, server, how, words):
    sampler = service.create_sampling_client(base_model=NAME).result()
    tensor = {"data": [7, 7], "dtype": "int64", "shape": [2, 1], **how}
    body = {
        "sampling_session_id": sampler._sampling_session_id, "seq_id": next(NUMBERS), "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS[:3]}]}, "sampling_params": {"max_tokens": 1},
        "target_prompt_logprobs": tensor,
    }  # fmt: skip
    ask = {"headers": {"x-api-key": server[1]}}
    url = f"{server[0]}/api/v1"
    name = httpx.post(f"{url}/asample", json=body, **ask).json()["request_id"]
    found = httpx.post(f"{url}/retrieve_future", json={"request_id": name}, **ask).json()
    assert re.search(words, found["error"])
    assert found["category"] == "user"


def test_a_prompt_that_fills_the_context_is_scored(service, base_logprobs):
    sampler = service.create_sampling_client(base_model=NAME).result()
    ids = (IDS * 22)[:256]
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
    assert np.allclose(scores[1:], base_logprobs(ids)[np.arange(255), ids[1:]], atol=1e-4)
    with pytest.raises(RequestFailedError, match="exceed the context of 256"):
        sample(sampler, ids, max_tokens=1)


def test_seeds_repeat_and_stops_end(service):
    sampler = service.create_sampling_client(base_model=NAME).result()
    first = sample(sampler, n=2, max_tokens=12)
    assert [one.tokens for one in sample(sampler, n=2, max_tokens=12).sequences] == [
        one.tokens for one in first.sequences
    ]
    assert first.sequences[0].tokens != first.sequences[1].tokens
    whole = first.sequences[0].tokens
    cut = sample(sampler, max_tokens=12, stop=[whole[3]]).sequences[0]
    assert cut.stop_reason == "stop"
    assert cut.tokens == whole[: whole.index(whole[3]) + 1]
    assert sample(sampler, max_tokens=12, stop=[]).sequences[0].stop_reason == "length"


def test_a_custom_loss_has_the_gradient_of_its_function(service):
    custom, plain = create_model(service), create_model(service)

    def loss(data, logprobs):
        return -sum(each.sum() for each in logprobs), {"mine": 1.0}

    found = custom.forward_backward_custom([datum(IDS)], loss).result()
    plain.forward_backward([datum(IDS)], "cross_entropy").result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (custom, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert found.metrics["mine"] == 1.0


def test_a_model_loaded_with_its_optimizer_goes_on_as_the_one_saved(service):
    trained = create_model(service)
    step(trained)
    path = trained.save_state("here").result().path
    loaded = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    losses = [[step(each).metrics["loss:sum"] for _ in range(3)] for each in (trained, loaded, fresh)]
    assert losses[0] == losses[1]
    assert losses[0][:1] == losses[2][:1]
    assert losses[0] != losses[2]


def test_a_state_that_cannot_be_used_is_refused_by_name(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"--state .*/file: File exists"), served(model, tmp_path / "file"):
        pass
    below = tmp_path / "file" / "in"
    with pytest.raises(ConfigError, match=r"--state .*/file/in: Not a directory"), served(model, below):
        pass
    state = tmp_path / "state"
    state.mkdir()
    (state / "journal.sqlite").write_text("this is no database at all" * 99)
    words = "its journal.sqlite cannot be used: file is not a database"
    with pytest.raises(ConfigError, match=words), served(model, state):
        pass
    for name, words in {
        "key": "as the server's key",
        "server.lock": "is a directory",
        "journal.sqlite": "Is a directory",
    }.items():
        state = tmp_path / name
        (state / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=f"{name}.*{words}"), served(model, state):
            pass
    state = tmp_path / "other"
    state.mkdir()
    (state / "key").write_bytes(b"tml-\xff")
    with pytest.raises(ConfigError, match="key cannot be used as the server's key"), served(model, state):
        pass


@pytest.mark.parametrize(
    ("how", "loss", "words"),
    [
        ({"target_tokens": np.array([1, 2])}, "cross_entropy", "target_tokens of int64 has shape"),
        ({"target_tokens": np.array([99] * 11)}, "cross_entropy", "outside the vocabulary"),
        ({"weights": np.full(11, np.nan, np.float32)}, "cross_entropy", "not finite"),
        ({"advantages": np.ones(11, np.float32)}, "ppo", "lacks logprobs"),
        ({"weights": np.ones(11, np.float32)}, "stable_reinforce", "loss_fn=importance_sampling"),
        ({"logprobs": ONES, "advantages": np.full(11, np.nan, np.float32)}, "ppo", "advantages is not finite"),
        ({"logprobs": ONES[:4], "advantages": ONES}, "ppo", "logprobs has shape"),
        ({"logprobs": ONES, "advantages": ONES}, "dro", "needs beta"),
    ],
)
def test_what_cannot_be_trained_fails_by_name_and_the_model_goes_on(service, how, loss, words):
    trained = create_model(service)
    with pytest.raises(RequestFailedError, match=words) as failed:
        trained.forward_backward([datum(IDS, **how)], loss).result()
    assert failed.value.category is RequestErrorCategory.User
    assert step(trained).metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold=1.3, clip_high_threshold=1.2"),
        ("cispo", {"clip_low_threshold": -0.1}, "clip_low_threshold=-0.1"),
        ("gspo", {"clip_high_threshold": 0.5}, "clip_high_threshold=0.5"),
        ("dro", {"beta": -1.0}, "beta=-1"),
    ],
)
def test_options_of_a_loss_that_mean_nothing_are_refused(service, loss, options, words):
    data = [datum(IDS, logprobs=ONES, advantages=ONES)]
    with pytest.raises(RequestFailedError, match=words):
        create_model(service).forward_backward(data, loss, options).result()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"base_model": "other/model"}, "there is no model"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 9999}, "rank=9999"),
        ({"seed": 2**64}, "seed=1844"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(service, how, words):
    with pytest.raises(APIStatusError, match=words) as refused:
        service.create_lora_training_client(**{"base_model": NAME, "rank": 4, **how}).result()
    assert refused.value.body["category"] == "user"


def test_a_datum_that_does_not_fit_fails_by_name_and_the_model_goes_on(service):
    trained = create_model(service)
    with pytest.raises(RequestFailedError, match="300 tokens; give 1 to 256") as failed:
        trained.forward_backward([datum([5] * 301)], "cross_entropy").result()
    assert failed.value.category is RequestErrorCategory.User
    assert step(trained).metrics["loss:sum"] > 0


FOREIGN = ["tinker://nobody:train:0/weights/x", "tinker://../../key/weights/x"]


@pytest.mark.parametrize("path", FOREIGN)
def test_a_foreign_path_is_refused(service, path):
    for ask in (service.create_training_client_from_state, service.create_sampling_client):
        with pytest.raises(APIStatusError, match="there is no checkpoint"):
            ask(path).result()
    assert step(create_model(service)).metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("endpoint", "body", "words"),
    [
        ("create_session", {"tags": [], "sdk_version": "9.9", "quota": 1}, "unknown field `quota`"),
        ("optim_step", {"model_id": "m"}, "missing required field `seq_id`"),
        ("asample", [1], "Expected `object`"),
        ("forward_backward", {}, "no forward_backward request"),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": NAME}, "there is no session"),
        (
            "create_model",
            {"session_id": "s", "model_seq_id": -1, "base_model": NAME},
            ">= 0 - at `$.model_seq_id`",
        ),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": -1}, "`int` >= 0"),
        ("create_custom_loss", {}, "forward_backward_custom"),
        ("no/such/thing", {}, "is not served"),
    ],
)
def test_a_request_of_another_protocol_is_refused_by_name(server, endpoint, body, words):
    url, key = server
    found = httpx.post(f"{url}/api/v1/{endpoint}", json=body, headers={"x-api-key": key})
    assert 400 <= found.status_code < 500
    assert words in found.json()["error"]
    assert found.json()["category"] == "user"


def test_an_adapter_that_trains_nothing_is_refused(server):
    url, key = server
    ask = {"headers": {"x-api-key": key}}
    session = httpx.post(f"{url}/api/v1/create_session", json={}, **ask).json()["session_id"]
    lora = {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": lora}
    found = httpx.post(f"{url}/api/v1/create_model", json=body, **ask)
    assert (found.status_code, found.json()["category"]) == (400, "user")
    assert "trains nothing" in found.json()["error"]


def test_a_prompt_that_does_not_fit_fails_by_name(service):
    sampler = service.create_sampling_client(base_model=NAME).result()
    with pytest.raises(RequestFailedError, match="exceed the context of 256") as failed:
        sample(sampler, max_tokens=300)
    assert failed.value.category is RequestErrorCategory.User
    assert sample(sampler).sequences


def test_answers_are_kept_up_to_a_size_and_the_newest_always(model, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.wings.tinker.jobs.KEPT_BYTES", 600)
    with served(model, tmp_path / "state") as (url, key), client(url, key) as service:
        sampler = service.create_sampling_client(base_model=NAME).result()
        answers = [sample(sampler, n=4) for _ in range(8)]  # of some 200 bytes each
        assert len({len(each.sequences) for each in answers}) == 1
        session = httpx.get(f"{url}/api/v1/sessions", headers={"x-api-key": key}).json()["sessions"][0]
        names = [f"{session}:sample:0:{seq}" for seq in range(9)]
        asked = {"headers": {"x-api-key": key}}
        status = [
            httpx.post(f"{url}/api/v1/retrieve_future", json={"request_id": name}, **asked).status_code
            for name in names
        ]
        assert 1 <= status.count(200) <= 4
        assert 410 in status


def test_more_targets_than_a_request_may_have_are_refused(service, monkeypatch):
    monkeypatch.setattr("headrace.wings.tinker.wire.MOST_NUMBERS", 20)
    sampler = service.create_sampling_client(base_model=NAME).result()
    targets = types.TensorData.from_numpy(np.zeros((11, 2), np.int64))
    params = types.SamplingParams(max_tokens=2)
    given = {"include_prompt_logprobs": True, "target_prompt_logprobs": targets}
    with pytest.raises(RequestFailedError, match="has 22 ids, and 20 are possible"):
        sampler.sample(types.ModelInput.from_ints(IDS), 1, params, **given).result()


def test_a_body_that_is_too_long_or_cut_fails_in_its_place(model, tmp_path):
    with served(model, tmp_path / "state", max_body_bytes=2000) as (url, key), client(url, key) as service:
        trained = create_model(service)
        futures = [trained.forward_backward([datum(ids)], "cross_entropy") for ids in (IDS * 20, IDS)]
        with pytest.raises(APIStatusError, match="more than 2000 bytes"):
            futures[0].result()
        assert futures[1].result(timeout=30).metrics["loss:sum"] > 0  # and not after the wait for what is missing
        with pytest.raises(APIStatusError, match="more than 2000 bytes"):
            trained.save_state("long", user_metadata={"note": "x" * 2000}).result()
        assert trained.forward_backward([datum(IDS)], "cross_entropy").result(timeout=30).metrics["loss:sum"] > 0
        whole = messages.ForwardBackwardRequest(model_id=trained.model_id, seq_id=5, loss_fn="cross_entropy")
        cut = whole.SerializeToString()[:-3]
        found = httpx.post(f"{url}/api/v1/forward_backward", content=cut, headers={"x-api-key": key}).json()
        result = {"json": {"request_id": found["request_id"]}, "headers": {"x-api-key": key}}
        assert "no forward_backward request" in httpx.post(f"{url}/api/v1/retrieve_future", **result).json()["error"]


def test_a_client_that_leaves_within_its_body_leaves_no_trace(server, caplog):
    url, key = server
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: {host}\r\nx-api-key: {key}\r\ncontent-length: 9000\r\n\r\n"
    for _ in range(3):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b"x" * 100)
    assert httpx.get(f"{url}/healthz", headers={"x-api-key": key}).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_one_request_cannot_end_or_block_the_server(service, server):
    url, ask = f"{server[0]}/api/v1", {"headers": {"x-api-key": server[1]}}
    sampler, trained = service.create_sampling_client(base_model=NAME).result(), create_model(service)
    prompt = types.ModelInput.from_ints(IDS)
    for how in ({"topk_prompt_logprobs": 90}, {"topk_sample_logprobs": 90}):
        asked = {"prompt": prompt, "num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=2), **how}
        with pytest.raises(RequestFailedError, match=r"logprobs=90; set 0 to 4"):
            sampler.sample(**asked).result()
    large = types.ModelInput.from_ints([5, 2**63])
    with pytest.raises(RequestFailedError, match=r"holds token 9223372036854775808, outside") as failed:
        sampler.sample(large, 1, types.SamplingParams(max_tokens=2)).result()
    assert failed.value.category is RequestErrorCategory.User
    far = {"model_id": trained.model_id, "seq_id": 10**6, "adam_params": {}}
    assert "is next" in httpx.post(f"{url}/optim_step", json=far, **ask).json()["error"]
    assert httpx.post(f"{url}/optim_step", json={**far, "seq_id": 2**63}, **ask).status_code == 400
    number = b"\x08" + b"\xff\xff\xff\xff\x07"  # the model's name as a number of two thousand millions
    assert httpx.post(f"{url}/forward_backward", content=number, **ask).status_code == 400
    for name in ("x:\u00b2", f"x:{10**30}"):
        assert httpx.post(f"{url}/retrieve_future", json={"request_id": name}, **ask).status_code == 404
    assert step(trained).metrics["loss:sum"] > 0


def test_a_cancelled_request_for_samples_can_be_sent_again(service, server):
    url, ask = f"{server[0]}/api/v1", {"headers": {"x-api-key": server[1]}}
    sampler = service.create_sampling_client(base_model=NAME).result()
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]},
        "sampling_params": {"max_tokens": 200, "stop": []},
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 77,
        "num_samples": 16,
    }
    promise = {"request_id": httpx.post(f"{url}/asample", json=body, **ask).json()["request_id"]}
    assert httpx.post(f"{url}/cancel_future", json=promise, **ask).status_code == 200
    assert httpx.post(f"{url}/retrieve_future", json=promise, **ask).status_code == 410
    httpx.post(f"{url}/asample", json=body, **ask)
    assert httpx.post(f"{url}/retrieve_future", json=promise, timeout=60, **ask).status_code == 200


def test_a_journal_that_cannot_be_written_is_told_and_asked_again(model, tmp_path, monkeypatch, caplog):
    with served(model, tmp_path / "state") as (url, key):
        ask = {"headers": {"x-api-key": key}}
        full = sqlite3.OperationalError("database or disk is full")
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "run", lambda *_: (_ for _ in ()).throw(full))
            found = httpx.post(f"{url}/api/v1/create_session", json={}, **ask)
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert "cannot write its state: database or disk is full; make room" in found.json()["error"]
        assert not [record for record in caplog.records if record.exc_info]
        session = httpx.post(f"{url}/api/v1/create_session", json={}, **ask).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 2**63, "base_model": NAME, "lora_config": {"rank": 2}}
        assert httpx.post(f"{url}/api/v1/create_model", json=body, **ask).status_code == 400


def test_clients_that_wait_are_told_to_ask_again_when_the_server_ends(model, tmp_path, caplog, monkeypatch):
    arrived, retrieve = threading.Semaphore(0), TinkerService.retrieve

    async def noted(service: TinkerService, body: bytes) -> ResultResponse:
        arrived.release()
        return await retrieve(service, body)

    monkeypatch.setattr(TinkerService, "retrieve", noted)
    with ThreadPoolExecutor() as pool, served(model, tmp_path) as (url, key):
        service = client(url, key)
        trained, sampler = create_model(service), service.create_sampling_client(base_model=NAME).result()
        step = {"model_id": trained.model_id, "seq_id": 7, "adam_params": {}}  # others have to come before
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]}, "num_samples": 128, "seq_id": 9,
            "sampling_params": {"max_tokens": 240}, "sampling_session_id": sampler._sampling_session_id,
        }  # fmt: skip
        ask = partial(httpx.post, headers={"x-api-key": key}, timeout=60)
        asked = {"optim_step": step, "asample": body}
        promises = [ask(f"{url}/api/v1/{kind}", json=each).json() for kind, each in asked.items()]
        fetch = partial(ask, f"{url}/api/v1/retrieve_future")
        waiting = [pool.submit(fetch, json={"request_id": each["request_id"]}) for each in promises]
        assert all(arrived.acquire(timeout=60) for _ in waiting)
        assert not wait(waiting, timeout=0.2).done
    assert [each.result().status_code for each in waiting] == [408, 408]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_wrong_key_is_refused(server):
    with pytest.raises(APIStatusError, match="TINKER_API_KEY"):
        create_model(client(server[0], "tml-wrong"))


def test_a_client_goes_on_where_it_was_after_its_server_was_started_again(model, tmp_path):
    with served(model, tmp_path / "plain") as (url, key), client(url, key) as service:
        trained = create_model(service)
        expected = [step(trained).metrics["loss:sum"] for _ in range(4)]
    with served(model, tmp_path / "state") as (url, key):
        service = client(url, key)
        trained = create_model(service)
        losses = [step(trained).metrics["loss:sum"]]
        trained.forward_backward([datum(IDS)], "cross_entropy").result()
        sampler = trained.save_weights_and_get_sampling_client().result()
        before = sample(sampler).sequences[0].tokens
    with served(model, tmp_path / "state", port=int(url.rpartition(":")[2])):
        assert sample(sampler).sequences[0].tokens == before
        trained.optim_step(ADAM).result()
        losses += [step(trained).metrics["loss:sum"] for _ in range(2)]
        service.close("success").result()
    assert losses == [expected[0], *expected[2:]]


def test_a_client_that_ends_makes_room_for_the_models_of_others(model, tmp_path):
    with served(model, tmp_path / "state", max_models=1) as (url, key), client(url, key) as other:
        service = client(url, key)
        trained = create_model(service)
        losses = [step(trained).metrics["loss:sum"]]
        with pytest.raises(APIStatusError, match="there are 1 models"):
            create_model(other)
        service.close("success").result()
        assert create_model(other).model_id
    assert losses[0] > 0


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda model: model.optim_step(types.AdamParams(learning_rate=float("nan"))), id="rate"),
        pytest.param(lambda model: model.load_state("tinker://nobody:train:0/weights/x"), id="path"),
        pytest.param(lambda model: model.load_state(model.save_weights_for_sampler("s").result().path), id="kind"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_model_goes_on_after_a_request_that_means_nothing(service, call):
    trained = create_model(service)
    with pytest.raises(RequestFailedError):
        call(trained).result()
    assert step(trained).metrics["loss:sum"] > 0


def test_a_request_that_its_client_never_sent_is_given_up(service, monkeypatch):
    monkeypatch.setattr(tenants, "MISSING_S", 0.5)
    trained = create_model(service)
    image = types.ImageAssetPointerChunk(location="tinker://x", format="png", expected_tokens=4)
    unsent = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs=datum(IDS).loss_fn_inputs)
    with pytest.raises(ValueError, match="Unsupported"):
        trained.forward_backward([unsent], "cross_entropy").result()
    assert trained.forward_backward([datum(IDS)], "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0
