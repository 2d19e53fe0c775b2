"""Whole-weight training: one tenant at a time trains all weights of a base, and the base stays what it is."""

import asyncio
import json
import re

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinker import RequestFailedError, RestClient, types
from tinker._exceptions import APIStatusError
from transformers import AutoModelForCausalLM

from headrace.learner.disk import CHECKSUMS_FILE
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.lora import WEIGHTS_FILE
from headrace.policy import Policy
from headrace.wings.tinker import wire
from headrace.wings.tinker.compute import TrainResult
from headrace.wings.tinker.losses import choose_loss
from tests.wings.tinker.offline import MODEL, Offline, make_compute, script, step_body, train_body
from tests.wings.tinker.serving import NAME, VOCAB, WHOLE, client, datum, served, tiny

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state:FutureWarning")  # clients of today still load so
IDS = [5, 9, 11, 7, 30, 22, 8, 14, 6, 19, 33, 12]
PROMPT = types.ModelInput.from_ints(IDS[:4])
ADAM = types.AdamParams(learning_rate=1e-3)
OTHER = "s:train:1"


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def plain(request, tmp_path_factory):
    """Return a model, whose head is a weight of its own or that of its embedding."""
    extra = {"tie_word_embeddings": request.param}
    return tiny(tmp_path_factory.mktemp("whole") / "model", init_std=0.2, extra=extra)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def both(model, state):
    with served(model, state, others={WHOLE: model}) as found:
        yield found


def create(service, name=WHOLE, **how):
    return service.create_lora_training_client(base_model=name, **how).result()


def step(trained):
    promised = trained.forward_backward([datum(IDS)], "cross_entropy")
    trained.optim_step(ADAM).result()
    return promised.result().metrics["loss:sum"]


def asked(sampler, temperature):
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=temperature)
    return sampler.sample(prompt=PROMPT, num_samples=1, sampling_params=params)


def tokens(promised):
    return promised.result().sequences[0].tokens


def score(sampler):
    return sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()[1:]


def test_the_curve_and_the_weights_are_those_of_plain_transformers(plain, tmp_path):
    from tinker.proto.response_conv import deserialize_forward_backward_output

    server = Offline(make_compute(plain, whole=True), tmp_path)
    server.create()
    reference = AutoModelForCausalLM.from_pretrained(plain)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    rng, seq, expected = np.random.default_rng(0), 0, []
    adam = {"learning_rate": 1e-3, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
    for _ in range(20):
        ids = rng.integers(4, 30, size=(2, 16))
        server.send("forward_backward", seq := seq + 1, train_body(ids, seq))
        server.send("optim_step", seq := seq + 1, step_body(seq, **adam))
        log_p = reference(input_ids=torch.from_numpy(ids)).logits[:, :-1].log_softmax(-1)
        loss = -log_p.gather(2, torch.from_numpy(ids[:, 1:, None])).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        expected.append(float(loss.detach()))
    found = server.weights()
    results = [server.journal.outcome(MODEL, place).result for place in range(1, seq, 2)]
    server.close()
    losses = [deserialize_forward_backward_output(each).metrics["loss:sum"] for each in results]
    assert np.allclose(losses, expected, rtol=1e-4)
    parameters = dict(reference.named_parameters())
    assert found.keys() == parameters.keys()
    assert max(np.abs(found[name] - each.detach().numpy()).max() for name, each in parameters.items()) < 1e-4


def test_the_same_rows_through_a_policy_give_the_same_weights(plain, tmp_path):
    # a smaller eps makes steps of lr of the rounding where a gradient is all but 0
    learner = {
        "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-5, "max_grad_norm": 0.5, "weight_decay": 0.0,
        "share_prefixes": False,
    }  # fmt: skip
    server, seq = Offline(make_compute(plain, whole=True), tmp_path / "state"), 0
    server.create()
    loss = {"kind": "reinforce", "ratio_cap": 1e9}  # Tinker has no cap

    async def both_ways():
        nonlocal seq
        async with Policy.load(str(plain), learner=learner, loss=loss, seed=1) as policy:
            for _ in range(4):
                (answers,) = await policy.sample([IDS[:4]], n=4, max_new_tokens=12)
                advantages = [0.5, -1.5, 2.0, -0.5]
                policy.forward_backward(answers, advantages)
                policy.optim_step()
                num_tokens = sum(len(each.tokens) for each in answers)
                for sample, advantage in zip(answers, advantages, strict=True):
                    ids, given = sample.full.ids_T, len(sample.prompt) - 1
                    mu = np.concatenate([np.zeros(given, np.float32), sample.tokens.logprobs_T])
                    share = np.where(np.arange(len(ids) - 1) < given, 0, advantage / num_tokens).astype(np.float32)
                    body = train_body([ids], seq := seq + 1, "importance_sampling", logprobs=mu, advantages=share)
                    server.send("forward_backward", seq, body)
                adam = {"learning_rate": 1e-3, "eps": 1e-5, "grad_clip_norm": 0.5, "weight_decay": 0.0}
                server.send("optim_step", seq := seq + 1, step_body(seq, **adam))
            policy.save(tmp_path / "saved")

    asyncio.run(both_ways())
    found = {name: torch.from_numpy(each) for name, each in server.weights().items()}
    server.close()
    before, expected = (
        {name: each.detach() for name, each in AutoModelForCausalLM.from_pretrained(where).named_parameters()}
        for where in (plain, tmp_path / "saved")
    )
    assert found.keys() == expected.keys()
    assert max(float((found[name] - each).abs().max()) for name, each in expected.items()) < 1e-6
    assert max(float((before[name] - each).abs().max()) for name, each in expected.items()) > 3e-3


def test_a_head_in_pieces_gives_the_gradients_of_a_whole_one(plain, monkeypatch):
    found, noise = [], torch.Generator().manual_seed(0)
    for positions in (64, 4):  # of a piece, which is computed again in the backward pass
        monkeypatch.setattr("headrace.wings.tinker.compute.LOGITS_PER_CHUNK", positions * (len(VOCAB) + 4))
        compute = make_compute(plain, whole=True)
        compute.kind.runs_head = lambda weights: True  # as for a head that is more than a matrix
        weights = compute.kind.create({})
        noise.manual_seed(0)
        for each in weights.tensors.values():
            each.data += 0.1 * torch.randn(each.shape, generator=noise)
        request = wire.read_train_request(train_body([IDS, IDS[::-1]], 1))
        result = TrainResult()
        list(compute.train(weights, request.data, choose_loss("cross_entropy", {}), result, backward=True))
        found.append({name: each.grad for name, each in weights.tensors.items()})
    assert all(torch.allclose(found[0][name], each, rtol=1e-4, atol=1e-5) for name, each in found[1].items())


def test_a_kill_and_a_restart_change_no_bit_and_the_base_never_moves(plain, tmp_path):
    compute = make_compute(plain, whole=True)
    before = {name: each.clone() for name, each in compute.model.named_parameters()}
    found = []
    for directory, ends in (("once", {}), ("killed", {2: Offline.close, 5: Offline.kill, 7: Offline.close})):
        server = Offline(compute, tmp_path / directory)
        server.create()
        for place, request in enumerate(script(3)):
            server.send(*request)
            if place in ends:
                server.wait()
                ends[place](server)
                server = Offline(compute, tmp_path / directory)
        found.append(server.weights())
        server.close()
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert all(torch.equal(before[name], each) for name, each in compute.model.named_parameters())
    assert not any(np.array_equal(found[0][name], before[name].numpy()) for name in before)


def test_one_of_two_models_is_in_memory_and_each_gets_what_it_gets_alone(plain, tmp_path):
    compute, expected = make_compute(plain, whole=True), {}
    for model in (MODEL, OTHER):
        server = Offline(compute, tmp_path / model.replace(":", "-"))
        server.create(model)
        for kind, seq, body in script(2, model):
            server.send(kind, seq, body, model)
        expected[model] = server.weights(model)
        server.close()
    server = Offline(compute, tmp_path / "both")
    server.create(MODEL)
    server.create(OTHER)
    for pair in zip(script(2), script(2, OTHER), strict=True):
        for (kind, seq, body), model in zip(pair, expected, strict=True):
            server.send(kind, seq, body, model)
            server.wait()
            assert list(server.tenants._live) == [model]
    for model, weights in expected.items():
        found = server.weights(model)
        assert all(np.array_equal(found[name], weights[name]) for name in weights)
    server.close()


def test_samplers_have_the_weights_of_their_time_and_share_the_engine_with_the_base(both):
    with client(*both) as service:
        trained = create(service)
        assert (trained.get_info().is_lora, trained.get_info().lora_rank) == (False, None)
        base = service.create_sampling_client(base_model=WHOLE).result()
        of_base = tokens(asked(base, 1.0))
        losses = [step(trained) for _ in range(20)]
        early = trained.save_weights_and_get_sampling_client().result()
        inflight = trained.save_weights_and_get_sampling_client(kind="inflight").result()
        scores = [score(early), score(inflight)]
        losses += [step(trained) for _ in range(60)]
        trained.save_weights_and_get_sampling_client(kind="inflight").result()
        assert losses[-1] < 0.2 * losses[0]
        assert scores[0] == scores[1] == score(early)
        assert sum(score(inflight)) > sum(scores[0]) + 1
        together = [asked(base, 1.0), asked(early, 1.0), asked(inflight, 0.0)]
        found = [tokens(each) for each in together]
        assert found == [of_base, tokens(asked(early, 1.0)), IDS[4:10]]


def test_whole_weights_are_downloaded_as_a_model_that_transformers_loads(both, state):
    with client(*both) as service:
        trained = create(service)
        step(trained)
        path = trained.save_weights_external("out").result().path
        files = RestClient(base_url=both[0], api_key=both[1]).get_external_weights_urls(path).result().urls
        assert set(files) == {"config.json", "model.safetensors"}
        expected = trained.forward([datum(IDS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        place = state / "runs" / trained.model_id.replace(":", "_") / "external_weights"
    (directory,) = place.iterdir()
    with torch.no_grad():
        logits = forward(load_model(ModelConfig(path=str(directory))), torch.tensor(IDS), PackedPlan([len(IDS)]))
    found = logits.log_softmax(-1)[np.arange(len(IDS) - 1), IDS[1:]]
    assert np.allclose(found, expected, atol=1e-5)


def test_a_third_sampler_waits_while_two_sample(both):
    url, key = both
    with client(*both) as service:
        trained = create(service)
        samplers = [trained.save_weights_and_get_sampling_client().result() for _ in range(3)]
        ask = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]}, "num_samples": 8}
        statuses = []
        for sampler in samplers:
            name = sampler._sampling_session_id
            body = {**ask, "sampling_params": {"max_tokens": 200, "stop": []}, "sampling_session_id": name, "seq_id": 9}
            statuses.append(httpx.post(f"{url}/api/v1/asample", json=body, headers={"x-api-key": key}).status_code)
        assert statuses == [200, 200, 429]
        assert tokens(asked(samplers[2], 1.0)), "the client asks again, until it is served"


def test_a_second_tenant_is_refused_until_the_first_has_gone(both):
    with client(*both) as second:
        with client(*both) as first:
            trained = create(first)
            loss = step(trained)
            path = trained.save_state("here").result().path
            with pytest.raises(APIStatusError, match=f"{WHOLE} trains all its weights for one model") as refused:
                create(second)
            assert refused.value.body["category"] == "user"
            adapter = create(second, NAME, rank=4)
            with pytest.raises(RequestFailedError, match=r"trains all weights, .*; the model has rank 4"):
                adapter.load_state(path).result()
        again = second.create_training_client_from_state_with_optimizer(path).result()
        assert step(again) < loss


def test_a_late_request_of_a_session_that_has_ended_does_not_hold_the_base(both):
    url, key = both
    with client(*both) as gone:
        trained = create(gone)
    body = {"model_id": trained.model_id, "seq_id": 1, "adam_params": {}}
    late = httpx.post(f"{url}/api/v1/optim_step", json=body, headers={"x-api-key": key})
    assert (late.status_code, "has ended" in late.text) == (404, True)
    with client(*both) as service:
        assert step(create(service)) > 0


def test_a_model_that_could_not_be_made_does_not_hold_the_base(both, state):
    with client(*both) as service:
        trained = create(service)
        path = trained.save_state("cut").result().path
    (directory,) = (state / "runs" / trained.model_id.replace(":", "_") / "weights").iterdir()
    (directory / "model.safetensors").unlink()
    with client(*both) as failing, client(*both) as service:
        with pytest.raises(RequestFailedError, match="cannot be read"):
            failing.create_training_client_from_state_with_optimizer(path).result()
        assert step(create(service)) > 0


@pytest.mark.parametrize(
    ("base", "file"), [(NAME, "adapter_model.safetensors"), (WHOLE, "model.safetensors")], ids=["adapter", "whole"]
)
def test_weights_that_are_not_a_number_are_refused_by_file_tensor_and_number(both, state, base, file):
    more = {"rank": 4} if base == NAME else {}
    with client(*both) as service:
        trained = create(service, base, **more)
        path = trained.save_state("spoilt").result().path
        (directory,) = (state / "runs" / trained.model_id.replace(":", "_") / "weights").iterdir()
        tensors = load_file(directory / file)
        name = sorted(tensors)[0]
        tensors[name].view(-1)[:2] = torch.tensor([torch.nan, torch.inf])
        save_file(tensors, directory / file)
        (directory / CHECKSUMS_FILE).unlink()  # it was changed on purpose
        number = re.escape(f"{name} (2 of {tensors[name].numel()} values)")
        with pytest.raises(RequestFailedError, match=f"{file} of .* infinite or not a number: {number}"):
            trained.load_state(path).result()
        assert step(trained) > 0


def test_weights_that_do_not_fit_their_settings_end_no_pass(both, state):
    with client(*both) as service:
        trained = create(service, NAME, rank=4)
        path = trained.save_weights_for_sampler("odd").result().path
        (directory,) = (state / "runs" / trained.model_id.replace(":", "_") / "sampler_weights").iterdir()
        (directory / CHECKSUMS_FILE).unlink()  # it was changed on purpose
        facts, whole = json.loads((directory / "tinker.json").read_text()), load_file(directory / WEIGHTS_FILE)
        lacking, wide = {**whole}, {**facts, "spec": {**facts["spec"], "rank": 8}}
        del lacking[min(lacking)]
        unset = {key: value for key, value in facts.items() if key != "scale"}
        for settings, tensors, words in (
            (wide, whole, r"has shape \[4, 32\], and its settings say \[8, 32\]"),
            (facts, lacking, "lora_A in one of them only"),
            (unset, whole, r"lacks a setting \('scale'\)"),
        ):
            (directory / "tinker.json").write_text(json.dumps(settings))
            save_file(tensors, directory / WEIGHTS_FILE)
            with pytest.raises(RequestFailedError, match=words):
                asked(service.create_sampling_client(path).result(), 1.0).result()
            assert step(trained) > 0


@pytest.mark.parametrize("flag", ["train_attn", "train_mlp", "train_unembed"])
def test_weights_cannot_be_left_out_of_whole_training(both, flag):
    with client(*both) as service, pytest.raises(APIStatusError, match=f"{flag}=False: {WHOLE} trains all weights"):
        create(service, **{flag: False})


def test_training_without_an_adapter_is_refused_under_a_name_of_adapters(both):
    url, key = both
    ask = {"headers": {"x-api-key": key}}
    session = httpx.post(f"{url}/api/v1/create_session", json={}, **ask).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME}
    found = httpx.post(f"{url}/api/v1/create_model", json=body, **ask)
    assert (found.status_code, found.json()["category"]) == (400, "user")
    assert f"{NAME} trains adapters; give one, or ask for a name that the server has from --whole" in found.text
