"""Losses, gradients and steps against plain transformers, peft and torch."""

import json
import warnings

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.base.errors import DataError
from headrace.flow.ledger.opening import open_ledger
from headrace.models.multilora import to_peft
from headrace.wings.supervised.session import sft
from headrace.wings.tinker import compute as tinker_compute
from headrace.wings.tinker import wire
from headrace.wings.tinker.losses import LOSSES
from headrace.wings.tinker.wire import read_train_request, write_train_result
from tests.models.wrapped import tiny_wrapper, whole
from tests.wings.supervised.material import settings
from tests.wings.tinker.offline import MODEL, Offline, make_compute, step_body, train_body

PARTS = ("attention", "mlp", "head")
ALL = {"train_attn": True, "train_mlp": True, "train_unembed": True}


@pytest.fixture(scope="module")
def compute(model):
    return make_compute(model)


def as_peft(model, lora):
    """Return the same adapter on the same base, computed by transformers and peft alone."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    settings, tensors = to_peft(lora, str(model))
    config = peft.LoraConfig(
        r=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=settings["target_modules"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what this peft reads
        wrapped = peft.get_peft_model(base, config)
    own = {name.replace(".default", ""): each for name, each in wrapped.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, each in own.items():
            each.copy_(tensors[name])
    return wrapped, {name.removeprefix("base_model.model.").removesuffix(".weight"): own[name] for name in own}


def log_pi(model, ids, targets):
    logits = model(input_ids=torch.tensor(ids)[None]).logits[0]
    every = logits.log_softmax(-1)
    wide = targets if targets.ndim == 2 else targets[:, None]
    found = every.gather(1, torch.tensor(wide))
    return found if targets.ndim == 2 else found[:, 0]


def plain_loss(name, lp, config, *, q, adv, weights, mask):
    """Return the loss as the protocol's documents write it, without a function of Headrace."""
    ratio = (lp - q).exp()
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "cross_entropy":
        return -(lp * weights).sum()
    if name == "importance_sampling":
        return -(ratio * adv).sum()
    if name == "ppo":
        return -torch.min(ratio * adv, ratio.clamp(low, high) * adv).sum()
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * lp * adv).sum()
    if name == "dro":
        return -(lp * adv - 0.5 * config["beta"] * (lp - q) ** 2).sum()
    sequence = (((lp - q) * mask).sum() / mask.sum()).exp()
    return -(torch.min(sequence * adv, sequence.clamp(low, high) * adv) * mask).sum()


@pytest.mark.parametrize("name", [*LOSSES, "cross_entropy [N, K]"])
def test_a_loss_and_its_gradient_equal_plain_torch(compute, model, name):
    rng = np.random.default_rng(3)
    lora = compute.kind.create({"rank": 4, "parts": PARTS, "seed": 5})
    with torch.no_grad():
        for each in lora.tensors.values():
            each.add_(torch.from_numpy(rng.normal(0, 0.05, each.shape)).float())
    wide, name = name.endswith("]"), name.partition(" ")[0]
    reference, own = as_peft(model, lora)
    config = {"beta": 0.3} if name == "dro" else {"clip_high_threshold": 1.1} if name == "ppo" else {}
    data, expected, shown = [], torch.zeros(()), []
    for length in (5, 17, 30):
        ids = rng.integers(3, 40, length)
        targets = rng.integers(3, 40, (length, 3) if wide else length)
        lp = log_pi(reference, ids, targets)
        q = (lp.detach() + torch.from_numpy(rng.normal(0, 0.2, lp.shape)).float()).numpy()
        adv, weights = (rng.normal(0, 1, lp.shape).astype(np.float32) for _ in range(2))
        mask = (np.arange(length) > 2).astype(np.float32)
        given = {"target_tokens": targets}
        if name == "cross_entropy":
            given["weights"] = weights
        else:
            given |= {"logprobs": q, "advantages": adv}
            given |= {"sequence_ratio_mask": mask} if name == "gspo" else {}
        data.append((ids, given))
        each = {"q": q, "adv": adv, "weights": weights, "mask": mask}
        each = {key: torch.from_numpy(value) for key, value in each.items()}
        expected = expected + plain_loss(name, lp, config, **each)
        shown.append(lp.detach().numpy())
    expected.backward()
    result = computed(compute, lora, data, name, config)
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-5)
    for found, wanted in zip(result.logprobs, shown, strict=True):
        assert np.allclose(found, wanted, atol=1e-5)
    for key, tensor in lora.tensors.items():
        scale = max(1.0, float(own[key].grad.abs().max()))
        assert torch.allclose(tensor.grad, own[key].grad, atol=1e-5 * scale), key


def computed(compute, lora, data, name, config):
    """Return what the server computes of the bytes that the client would send."""
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    from headrace.wings.tinker.compute import TrainResult
    from headrace.wings.tinker.losses import choose_loss

    inputs = types.ForwardBackwardInput(
        data=[
            types.Datum(model_input=types.ModelInput.from_ints(ids.tolist()), loss_fn_inputs=given)
            for ids, given in data
        ],
        loss_fn=name,
        loss_fn_config=config,
    )
    request = types.ForwardBackwardRequest(forward_backward_input=inputs, model_id=MODEL, seq_id=1)
    read = read_train_request(forward_backward_request_to_proto(request).SerializeToString())
    result = TrainResult()
    for _ in compute.train(lora, read.data, choose_loss(read.loss_fn, read.loss_fn_config), result, backward=True):
        pass
    return result


def test_sparse_targets_and_weights_mean_the_dense_ones():
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    dense = torch.zeros(6, 40, dtype=torch.int64)
    dense[torch.arange(6), torch.arange(6)] = 7
    sparse = types.TensorData.from_torch_sparse(dense)
    assert sparse.sparse_crow_indices is not None
    datum = types.Datum(model_input=types.ModelInput.from_ints([4] * 6), loss_fn_inputs={"target_tokens": sparse})
    given = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=9)
    read = read_train_request(forward_backward_request_to_proto(request).SerializeToString())
    assert (read.seq_id, read.model_id) == (9, "m")
    assert np.array_equal(read.data[0].targets, dense.numpy())


def sparse_body(rows, columns, shape, count=1):
    """Return a request with ``count`` data whose targets are a sparse tensor with these indices."""
    from tinker.proto import tinker_public_pb2 as messages

    request = messages.ForwardBackwardRequest(model_id="m", seq_id=1)
    for _ in range(count):
        tensor = request.data.add().loss_fn_inputs["target_tokens"]
        tensor.dtype = messages.DTYPE_INT64
        tensor.shape.extend(shape)
        for name, values in (("crow_indices", rows), ("col_indices", columns), ("values", [7] * len(columns))):
            setattr(tensor.sparse_csr, name, np.array(values, np.int64).tobytes())
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        pytest.param([0, 1], [0], [3, 4], id="rows"),
        pytest.param([0, 10**12, 1, 1], [0], [3, 4], id="order"),
        pytest.param([0, 1, 1, 1], [-1], [3, 4], id="below"),
        pytest.param([0, 1, 1, 1], [4], [3, 4], id="above"),
        pytest.param([0, 1, 1, 2], [0], [3, 4], id="count"),
        pytest.param([0, 1, 1, 1], [0], [3, 10**9], id="size"),
        pytest.param([0, 1], [0], [1], id="dimensions"),
    ],
)
def test_a_sparse_tensor_whose_indices_do_not_fit_is_refused_before_memory_is_taken(rows, columns, shape):
    with pytest.raises(DataError, match="a sparse tensor of shape"):
        read_train_request(sparse_body(rows, columns, shape))


def test_many_sparse_tensors_that_stand_for_too_much_are_refused(monkeypatch):
    body = sparse_body([0, 1], [0], [1, 100], count=12)
    assert len(read_train_request(body).data) == 12
    monkeypatch.setattr(wire, "MOST_NUMBERS", 1000)
    with pytest.raises(DataError, match="a sparse tensor of shape"):  # the eleventh
        read_train_request(body)


def test_a_flood_of_empty_fields_is_refused():
    with pytest.raises(DataError, match="more than 131,072 fields"):
        read_train_request(b"\x1a\x00" * 10**6)
    with pytest.raises(DataError, match="more than 131,072 fields"):
        wire.read_model_and_seq(b"\x1a\x00" * 10**6)


def test_results_of_mixed_shapes_are_what_the_client_reads():
    from tinker.proto.response_conv import deserialize_forward_backward_output

    arrays = [np.ones(3, np.float32), np.ones((2, 4), np.float32), np.ones((5, 4), np.float32)]
    found = deserialize_forward_backward_output(write_train_result(arrays, {"loss:sum": 1.5}))
    assert [each["logprobs"].shape for each in found.loss_fn_outputs] == [[3], [2, 4], [5, 4]]
    assert found.metrics == {"loss:sum": 1.5}


def test_a_curve_of_fifty_steps_is_that_of_transformers_and_peft(compute, model, tmp_path):
    server = Offline(compute, tmp_path)
    server.create(rank=8, **ALL)
    server.wait()
    reference, own = as_peft(model, compute.kind.create({"rank": 8, "parts": PARTS, "seed": 1}))
    optimizer = torch.optim.AdamW(own.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    rng, seq, expected = np.random.default_rng(0), 0, []
    for _ in range(50):
        ids = rng.integers(4, 30, size=(2, 16))
        server.send("forward_backward", seq := seq + 1, train_body(ids, seq))
        server.send("optim_step", seq := seq + 1, step_body(seq, weight_decay=0.1, grad_clip_norm=1.0))
        loss = -sum(log_pi(reference, each[:-1], each[1:]).sum() for each in ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        optimizer.step()
        expected.append(float(loss.detach()))
    server.wait()
    from tinker.proto.response_conv import deserialize_forward_backward_output

    found = [
        deserialize_forward_backward_output(server.journal.outcome(MODEL, place).result).metrics["loss:sum"]
        for place in range(1, seq, 2)
    ]
    server.close()
    assert np.allclose(found, expected, rtol=1e-4), np.abs(np.array(found) / expected - 1).max()
    assert found[-1] < found[0]


def test_two_tenants_get_bit_for_bit_what_each_gets_alone(compute, tmp_path):
    from tests.wings.tinker.offline import script

    ranks = {"s:train:0": 8, "s:train:1": 32}
    alone = {}
    for model, rank in ranks.items():
        server = Offline(compute, tmp_path / f"alone-{rank}")
        server.create(model, rank, seed=rank)
        for kind, seq, body in script(4, model):
            server.send(kind, seq, body, model)
        alone[model] = server.weights(model)
        server.close()
    server = Offline(compute, tmp_path / "both")
    for model, rank in ranks.items():
        server.create(model, rank, seed=rank)
    for pair in zip(*(script(4, model) for model in ranks), strict=True):
        for (kind, seq, body), model in zip(pair, ranks, strict=True):
            server.send(kind, seq, body, model)
    for model, expected in alone.items():
        found = server.weights(model)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    server.close()


def test_a_step_with_a_broken_gradient_changes_nothing_and_says_so(compute, tmp_path):
    server = Offline(compute, tmp_path)
    server.create()
    before = server.weights()
    ids, huge = [[5, 6, 7]], np.full(2, 3e38, np.float32)
    server.send("forward_backward", 1, train_body(ids, 1, weights=huge))
    server.send("optim_step", 2, step_body(2))
    after = server.weights()
    assert json.loads(server.journal.outcome(MODEL, 2).result)["category"] == "user"
    assert all(np.array_equal(before[name], after[name]) for name in before)
    server.close()


def test_the_same_rows_through_headrace_sft_give_the_same_weights(compute, model, tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 30, length).tolist() for length in (5, 9, 12, 7, 16, 11)]
    server = Offline(compute, tmp_path / "state")
    server.create(rank=4, base=str(model), train_unembed=False)
    server.send("save_weights_external", 1, external_body(1, "begin"))
    server.wait()
    (begin,) = (tmp_path / "state").glob("runs/*/external_weights/begin@1")
    lora = {"rank": 4, "alpha": 32.0, "adapter": str(begin)}
    tree = settings(
        model,
        tmp_path / "run",
        model={"lora": lora},
        learner={"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "max_grad_norm": 0.5, "weight_decay": 0.1},
        run={"rows_per_step": 2},
    )
    sft(tree, data=[{"input_ids": each} for each in rows])
    ledger = open_ledger(tmp_path / "run")
    of_step = [[ledger.attempts(0)[number].row for number in numbers] for _, numbers in sorted(ledger.steps().items())]
    ledger.close()
    seq = 1
    for places in of_step:
        share = np.float32(1.0 / sum(len(rows[place]) - 1 for place in places))
        for place in places:
            weights = np.full(len(rows[place]) - 1, share)
            server.send("forward_backward", seq := seq + 1, train_body([rows[place]], seq, weights=weights))
        adam = {"eps": 1e-8, "grad_clip_norm": 0.5, "weight_decay": 0.1}
        server.send("optim_step", seq := seq + 1, step_body(seq, **adam))
    found = server.weights()
    server.close()
    (end,) = sorted((tmp_path / "run" / "checkpoints").glob("step-000003/adapter_model.safetensors"))
    expected = {
        name.removeprefix("base_model.model.").removesuffix(".weight"): each.numpy()
        for name, each in load_file(end).items()
    }
    assert found.keys() == expected.keys()
    assert max(np.abs(found[name] - expected[name]).max() for name in found) < 1e-5
    before = load_file(begin / "adapter_model.safetensors")
    assert max(float((before[name] - each).abs().max()) for name, each in load_file(end).items()) > 1e-2


def external_body(seq, path):
    given = {"model_id": MODEL, "seq_id": seq, "path": path, "type": "save_weights_external"}
    return json.dumps(given).encode()


def test_a_head_that_is_computed_in_pieces_gets_its_adapters_gradient(model, monkeypatch):
    ids = np.random.default_rng(1).integers(4, 30, 20)
    data, found = [(ids[:-1], {"target_tokens": ids[1:]})], []
    for logits in (2**24, 5 * 43):
        monkeypatch.setattr(tinker_compute, "LOGITS_PER_CHUNK", logits)
        compute = make_compute(model)
        lora = compute.kind.create({"rank": 4, "parts": PARTS, "seed": 5})
        with torch.no_grad():
            for each in lora.tensors.values():
                each.add_(0.05)
        computed(compute, lora, data, "cross_entropy", {})
        found.append({name: each.grad for name, each in lora.tensors.items()})
    for name, grad in found[0].items():
        assert torch.allclose(grad, found[1][name], rtol=1e-4, atol=1e-5), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_an_external_adapter_of_a_multimodal_base_is_what_peft_loads_onto_it(tmp_path):
    base = tiny_wrapper(tmp_path / "base", "gemma3")
    server = Offline(make_compute(base), tmp_path / "state")
    server.create(base=str(base), train_unembed=False)
    server.send("forward_backward", 1, train_body([[5, 6, 7, 8]], 1))
    server.send("optim_step", 2, step_body(2))
    server.send("save_weights_external", 3, external_body(3, "end"))
    trained = server.weights()
    server.close()
    (end,) = (tmp_path / "state").glob("runs/*/external_weights/end@3")
    model = peft.PeftModel.from_pretrained(whole(base), end)
    held = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    assert len(held) == len(trained)
    for name, tensor in held.items():
        inner = name.removeprefix("base_model.model.").replace("model.language_model.", "model.")
        assert np.array_equal(tensor.detach().numpy(), trained[inner.removesuffix(".default.weight")])
