"""The weights of sampling sessions in memory: who is unloaded, and who is not."""

import asyncio
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tinker import types

from headrace.wings.tinker.catalog import Catalog
from headrace.wings.tinker.fair_thread import FairThread
from headrace.wings.tinker.jobs import ResultResponse, SampleJob, SampleJobs
from headrace.wings.tinker.samplers import AdapterPasses, SamplerWeights
from headrace.wings.tinker.service import TinkerService
from headrace.wings.tinker.weights import WholeTensors
from tests.wings.tinker.serving import NAME, client, served


def weights_of(value):
    return WholeTensors(tensors={"w": torch.tensor([float(value)])})


class NoPasses(AdapterPasses):
    def __init__(self):
        pass


def test_a_sampler_that_begins_while_all_others_sample_keeps_its_weights():
    held = SamplerWeights(NoPasses(), max_loaded=2)
    found = {name: weights_of(version) for version, name in enumerate("abc")}
    for version, name in enumerate(found):
        held.use(name, partial(lambda *each: each, found[name], version))
    assert {name: held.find_weights(name) for name in "abc"} == found
    held.release("b")
    assert (held.find_weights("b"), held.find_weights("c")) == (None, found["c"]), "one too many, and it is idle"


def test_weights_that_were_published_while_older_ones_were_read_stay():
    held, newer = SamplerWeights(NoPasses(), max_loaded=2), weights_of(2)

    def load():
        held.put("a", newer, 2)
        return weights_of(1), 1

    held.use("a", load)
    assert held.find_weights("a") is newer


async def cancel_while_reading(held):
    """Cancel a request while its weights are read, and wait until they are released."""
    begun, released, read = asyncio.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def load(record):
        loop.call_soon_threadsafe(begun.set)
        assert read.wait(10)
        return weights_of(1), 1

    def release(name):
        held.release(name)
        released.set()

    base = SimpleNamespace(weights=SimpleNamespace(use=held.use, release=release))
    service = SimpleNamespace(_base=lambda name: base, _loop=loop, _read_sampler=load)
    task = asyncio.create_task(TinkerService._use(service, SimpleNamespace(id="a", base="b")))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    read.set()
    async with asyncio.timeout(10):
        await released.wait()


def test_a_request_that_is_cancelled_while_its_weights_are_read_does_not_keep_them():
    held = SamplerWeights(NoPasses(), max_loaded=0)
    asyncio.run(cancel_while_reading(held))
    assert held.find_weights("a") is None, "it is idle, and too many"


def test_weights_that_no_sampler_can_use_any_more_are_deleted(model, tmp_path, monkeypatch):
    removed, remove = threading.Semaphore(0), Catalog.remove_checkpoint

    def count(catalog, path):
        remove(catalog, path)
        removed.release()

    def left_after(number):
        """Return how many weights are left after that many more have been deleted."""
        assert all(removed.acquire(timeout=10) for _ in range(number))
        return len(list(tmp_path.glob("runs/*/ephemeral-*")))

    monkeypatch.setattr("headrace.wings.tinker.run.SWEEP_S", 0.05)
    monkeypatch.setattr(Catalog, "remove_checkpoint", count)
    prompt, params = types.ModelInput.from_ints([5, 9, 11]), types.SamplingParams(max_tokens=2)
    with served(model, tmp_path, ephemeral_s=0.0) as server:  # those that are used do not grow old
        with client(*server) as service:
            trained = service.create_lora_training_client(base_model=NAME, rank=2).result()
            samplers = [trained.save_weights_and_get_sampling_client().result() for _ in range(2)]
            for _ in range(3):
                inflight = trained.save_weights_and_get_sampling_client(kind="inflight").result()
            assert left_after(2) == 3, "those of two snapshots, and the newest in-flight ones"
            for sampler in (*samplers, inflight):
                assert sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
        assert left_after(3) == 0


def test_all_samplers_of_a_client_have_one_turn_together(model, tmp_path, monkeypatch):
    turns, submit = [], FairThread.submit
    monkeypatch.setattr(FairThread, "submit", lambda self, name, job: (turns.append(name), submit(self, name, job)))
    with served(model, tmp_path) as server, client(*server) as one, client(*server) as other:
        for service in (one, one, other):
            sampler = service.create_sampling_client(base_model=NAME).result()
            assert sampler.compute_logprobs(types.ModelInput.from_ints([5, 9, 11])).result()
    first, second, third = turns
    assert first == second != third


def test_answers_that_their_clients_have_had_are_forgotten_first(monkeypatch):
    monkeypatch.setattr("headrace.wings.tinker.jobs.KEPT_BYTES", 25)

    async def left() -> list[str]:
        jobs, found = SampleJobs(), ResultResponse(body=b"0123456789")
        async with asyncio.TaskGroup() as group:
            for place, name in enumerate(("asked", "had", "newest")):
                task = group.create_task(asyncio.sleep(0, found))
                jobs[name] = SampleJob(task=task, ids=[], record=None, num_samples=1)
                jobs[name].fetched = name == "had"
                jobs.end(name, float(place))
                jobs.keep(name, found)
        return list(jobs)

    assert asyncio.run(left()) == ["asked", "newest"]
