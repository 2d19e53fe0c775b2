"""Order, repetition, restarts, eviction and fairness of the models of a server."""

import json
import random
import shutil
import threading

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as messages

from headrace.base.errors import ConfigError
from headrace.learner.disk import CHECKSUMS_FILE
from headrace.wings.tinker.data import Datum
from headrace.wings.tinker.fair_thread import FairThread
from headrace.wings.tinker.tenant import Tenant
from tests.wings.tinker.offline import MODEL, Offline, make_compute, script, step_body, train_body
from tests.wings.tinker.serving import tiny

STEPS = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def compute(small):
    return make_compute(small)


@pytest.fixture(scope="module")
def expected(compute, tmp_path_factory):
    """Return the weights after the script, sent once and in order."""
    server = Offline(compute, tmp_path_factory.mktemp("plain"))
    server.create()
    for request in script(STEPS):
        server.send(*request)
    found = server.weights()
    server.close()
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def schedules(count):
    return [pytest.param(range(start, start + 25), id=f"from {start}") for start in range(0, count, 25)]


def run_schedules(seeds, compute, expected, directory):
    """Send the script as a bad network does: in any order, some requests twice, with a restart in between."""
    requests = script(STEPS)
    for seed in seeds:
        rng = random.Random(seed)
        server = Offline(compute, directory / str(seed), max_resident=rng.choice([1, 8]))
        server.create()
        sent = [*requests, *rng.sample(requests, 4)]
        rng.shuffle(sent)
        for place, request in enumerate(sent):
            server.send(*request)
            if rng.random() < 0.15 and place < len(sent) - 1:
                server.kill() if rng.random() < 0.5 else server.close()
                server = Offline(compute, directory / str(seed))
        assert_equal(server.weights(), expected)
        server.close()


@pytest.mark.parametrize("seeds", schedules(50))
def test_repeats_reordering_and_restarts_change_no_weight(seeds, compute, expected, tmp_path):
    run_schedules(seeds, compute, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", schedules(1000))
def test_a_thousand_schedules_change_no_weight(seeds, compute, expected, tmp_path):
    run_schedules(seeds, compute, expected, tmp_path)


def test_an_idle_model_moves_to_the_disk_with_its_gradient_and_comes_back(compute, expected, tmp_path):
    server = Offline(compute, tmp_path, max_resident=1)
    server.create()
    requests = script(STEPS)
    for request in requests[:4]:
        server.send(*request)
    server.wait()
    server.create("s:train:1", rank=2)
    server.wait()
    assert MODEL not in server.tenants._live
    for request in requests[4:]:
        server.send(*request)
    assert_equal(server.weights(), expected)
    server.close()


def test_a_request_that_fails_leaves_the_gradient_before_it(compute, expected, tmp_path):
    server = Offline(compute, tmp_path)
    server.create()
    requests = script(STEPS)
    shifted = 0
    for kind, seq, body in requests:
        if seq == 2:
            server.send("forward_backward", 2, b"\x0a\x01m")  # names no loss
            shifted = 1
        server.send(kind, seq + shifted, body)
    assert_equal(server.weights(), expected)
    assert server.journal.outcome(MODEL, 2).status == "failed"
    server.close()


def test_passes_without_gradient_are_not_computed_again_after_a_kill(compute, tmp_path, monkeypatch):
    server = Offline(compute, tmp_path)
    server.create()
    for seq in (1, 2, 3):
        body = train_body([[5, 6, 7, 8]], seq, forward_only=seq > 1)
        server.send("forward_backward", seq, body)
    server.wait()
    held = [len(server.journal.entry(MODEL, seq).body) > 0 for seq in (1, 2, 3)]
    assert held == [True, False, False], "what is not computed again is not kept"
    server.kill()
    computed, train = [], compute.train
    monkeypatch.setattr(
        type(compute), "train", lambda _, *given, **how: (computed.append(how), train(*given, **how))[1]
    )
    server = Offline(compute, tmp_path)
    server.send("optim_step", 4, step_body(4))
    server.wait()
    assert computed == [{"backward": True}]
    server.close()


def test_a_state_that_cannot_be_read_ends_no_other_tenant(compute, expected, tmp_path):
    server, requests = Offline(compute, tmp_path), script(STEPS)
    server.create()
    server.create("s:train:1")
    for request in requests[:4]:
        server.send(*request)
    server.wait()
    server.close()
    (weights,) = (tmp_path / "runs").glob("s_train_0/copy-*/adapter_model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:50])
    server = Offline(compute, tmp_path)
    for kind, seq, body in requests[4:]:
        server.send(kind, seq, body)
    for kind, seq, body in script(STEPS, "s:train:1"):
        server.send(kind, seq, body, "s:train:1")
    assert_equal(server.weights("s:train:1"), expected)
    failed = [json.loads(server.journal.outcome(MODEL, seq).result) for _, seq, _ in requests[4:]]
    assert {each["category"] for each in failed} == {"server"}
    assert all("cannot be restored" in each["error"] for each in failed)
    server.close()
    weights.write_bytes(whole)  # what has failed is not done after all: the client was told so, and sends it again
    server, kinds = Offline(compute, tmp_path), [kind for kind, _, _ in requests[4:]]
    bodies = {"forward_backward": train_again, "optim_step": lambda body, seq: step_body(seq)}
    for place, (kind, (_, _, body)) in enumerate(zip(kinds, requests[4:], strict=True)):
        seq = len(requests) + 1 + place
        server.send(kind, seq, bodies[kind](body, seq))
    assert_equal(server.weights(), expected)
    server.close()


@pytest.mark.parametrize("damage", ["flip", "remove", "swap"])
def test_no_model_goes_on_with_a_copy_that_has_changed(damage, compute, tmp_path):
    server = Offline(compute, tmp_path)
    for number, model in enumerate((MODEL, "s:train:1")):
        server.create(model, rank=2 + 2 * number)
        for kind, seq, body in script(1, model):
            server.send(kind, seq, body, model)
    server.wait()
    server.close()
    copies = [next((tmp_path / "runs" / name).glob("copy-*")) for name in ("s_train_0", "s_train_1")]
    files = sorted(file.name for file in copies[0].iterdir())
    assert len(files) == 5
    for name in files if damage != "swap" else [""]:
        file, whole = copies[0] / name, b""
        if name:
            whole = file.read_bytes()
        if damage == "flip":
            file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
        elif damage == "swap":
            file.rename(tmp_path / "own")
            shutil.copytree(copies[1], file)
        elif name == CHECKSUMS_FILE:
            continue  # as a state of an older version
        else:
            file.unlink()
        server = Offline(compute, tmp_path)
        seq = server.tenants.next_seq(MODEL)
        server.send("optim_step", seq, step_body(seq))
        server.wait()
        found = json.loads(server.journal.outcome(MODEL, seq).result)
        assert found["category"] == "server", (name, found)
        assert (name or "is of another model") in found["error"] or name == CHECKSUMS_FILE  # which may name another
        server.close()
        if name:
            file.write_bytes(whole)


def train_again(body, seq):
    """Return a forward_backward with the place ``seq``."""
    request = messages.ForwardBackwardRequest.FromString(body)
    request.seq_id = seq
    return request.SerializeToString()


def test_a_model_comes_back_after_a_kill_to_a_server_with_a_lower_limit_of_ranks(compute, expected, tmp_path):
    server, requests = Offline(compute, tmp_path), script(STEPS)
    server.create()
    for request in requests[:4]:
        server.send(*request)
    server.wait()
    server.kill()
    server = Offline(compute, tmp_path, max_rank=2)
    for request in requests[4:]:
        server.send(*request)
    assert_equal(server.weights(), expected)
    with pytest.raises(ConfigError, match="rank=4"):
        server.create("s:train:1")
    server.close()


def test_requests_wait_while_the_disk_is_full_and_change_the_weights_once(compute, expected, tmp_path, caplog):
    server, requests = Offline(compute, tmp_path), script(STEPS)
    server.create()
    for request in requests:
        server.send(*request)
        if request[1] == 4:
            server.wait()
            pages, limit = (server.journal.one(f"PRAGMA {of}")[0] for of in ("page_count", "max_page_count"))
            server.journal.run(f"PRAGMA max_page_count = {pages + 50}")  # room for requests, and for no result
            full = server.journal.end
            server.journal.end = lambda *_: server.journal.run("UPDATE meta SET value = zeroblob(9999999)")
    server.wait()
    assert server.journal.outcome(MODEL, 5).status == "waiting"
    assert "request 5 of s:train:0 waits until the disk can be written: database or disk is full" in caplog.text
    server.tenants.retry_held()
    server.wait()
    assert server.journal.outcome(MODEL, 5).status == "waiting"
    server.journal.end = full
    server.journal.run(f"PRAGMA max_page_count = {limit}")
    server.tenants.retry_held()
    server.wait()
    assert all(server.journal.outcome(MODEL, seq).status == "done" for _, seq, _ in requests)
    assert_equal(server.weights(), expected)
    server.close()


def test_a_step_in_which_the_server_failed_is_not_made_later(compute, expected, tmp_path, monkeypatch):
    server, requests = Offline(compute, tmp_path), script(STEPS)
    server.create()
    for request in requests[:2]:
        server.send(*request)
    before = server.weights()

    def step(tenant, settings):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Tenant, "step", step)
        server.send("optim_step", 3, step_body(3))
        server.wait()
    assert json.loads(server.journal.outcome(MODEL, 3).result)["category"] == "server"
    assert_equal(server.weights(), before)  # which come back from the journal
    server.send("optim_step", 4, step_body(4))
    for kind, seq, body in requests[3:]:
        server.send(kind, seq + 1, train_again(body, seq + 1) if kind == "forward_backward" else step_body(seq + 1))
    assert_equal(server.weights(), expected)
    server.close()


def test_thirty_two_tenants_share_the_computer_fairly(compute, tmp_path):
    server, ended, begin = Offline(compute, tmp_path, max_resident=32), [], threading.Event()
    server.tenants.on_ended = lambda entry: ended.append(entry.model)
    server.turns.submit("nobody", lambda: iter([begin.wait(60)]))  # nothing runs before all are there
    models = [f"s:train:{number}" for number in range(32)]
    for model in models:
        server.create(model, rank=2)
        for seq in range(1, 6):
            server.send("forward_backward", seq, train_body([[5, 6, 7, 8]], seq, model=model), model)
    begin.set()
    server.wait()
    first = next(place for place in range(len(ended)) if ended[: place + 1].count(ended[place]) == 6)
    assert min(ended[: first + 1].count(model) for model in models) >= 0.8 * 6
    assert len(ended) == 32 * 6
    server.close()


def test_a_short_queue_does_not_wait_for_a_long_one():
    order, failures = [], []
    turns = FairThread("turns", failures.append)

    def job(name, pieces):
        def run():
            for _ in range(pieces):
                order.append(name)
                yield None

        return run

    with turns._changed:  # nothing runs before all are there
        for _ in range(4):
            turns._jobs.setdefault("long", __import__("collections").deque()).append(job("long", 50))
        turns._jobs.setdefault("short", __import__("collections").deque()).append(job("short", 3))
        turns._changed.notify()
    assert turns.idle.wait(10)
    assert max(place for place, name in enumerate(order) if name == "short") <= 7
    assert len(order) == 203
    turns.close()


def test_one_that_comes_while_another_computes_is_next():
    order, begun, goes_on, failures = list[str](), threading.Event(), threading.Event(), list[BaseException]()
    turns = FairThread("turns", failures.append)

    def long():
        for place in range(3):
            order.append(f"long {place}")
            begun.set()
            goes_on.wait(10)
            yield

    def short():
        order.append("short")
        yield from ()

    turns.submit("a", long)
    assert begun.wait(10)
    turns.submit("b", short)
    goes_on.set()
    assert turns.idle.wait(10)
    turns.close()
    assert (order, failures) == (["long 0", "short", "long 1", "long 2"], [])


def test_data_with_many_targets_share_no_pass_with_long_ones(compute, monkeypatch):
    monkeypatch.setattr("headrace.wings.tinker.compute.MOST_CELLS", 64)
    wide, narrow = np.ones((2, 30), np.int64), np.ones(4, np.int64)
    data = [
        Datum(ids_N=np.ones(len(targets), np.int64), inputs={"target_tokens": targets})
        for targets in (wide, narrow, narrow)
    ]
    assert [len(part) for part in compute._cut(data)] == [1, 2]
