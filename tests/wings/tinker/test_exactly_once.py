"""The unmodified client against bad networks, kills and vanished clients: every gradient counts once, bit for bit."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tinker import types
from tinker._exceptions import APIStatusError

from headrace.wings.tinker import run as server_run
from tests.wings.tinker.lives import living
from tests.wings.tinker.network import FAULTS, bad_network
from tests.wings.tinker.serving import KEY, NAME, client, datum, served, tiny

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state:FutureWarning")  # clients of today still load so
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("small") / "model")


def data(number):
    """Return the data of a gradient, two sequences."""
    rng = np.random.default_rng(number)
    return [datum(rng.integers(4, 30, 12).tolist()) for _ in range(2)]


def new(service, count=1):
    asked = [service.create_lora_training_client(base_model=NAME, rank=4, seed=1) for _ in range(count)]
    return [each.result() for each in asked]


def weights_of(state: Path, model: str, name: str) -> bytes:
    """Return the bytes of a downloadable checkpoint."""
    (file,) = (state / "runs" / model.replace(":", "_")).glob(f"external_weights/{name}@*/adapter_model.safetensors")
    return file.read_bytes()


def send_all(trained):
    """Send two gradients and a step, three times, and a save, without waiting; return what was promised."""
    promised = []
    for step in range(3):
        promised += [trained.forward_backward(data(2 * step + place), "cross_entropy") for place in range(2)]
        promised.append(trained.optim_step(ADAM))
    return [*promised, trained.save_weights_external("end")]


def kept(promised, losses):
    """Return whether what was promised comes, with these losses."""
    *found, saved = [each.result() for each in promised]
    return [each.metrics for each in found] == losses and saved.path.endswith("end")


def through_a_bad_network(small, state, batches, of):
    with served(small, state, max_models=10_000) as (url, key):
        (plain,) = new(client(url, key))
        losses = [each.metrics for each in [promise.result() for promise in send_all(plain)][:-1]]
        expected, faults = weights_of(state, plain.model_id, "end"), Counter()
        for seed in batches:
            with bad_network(url, seed) as (bad, counts):
                service = client(bad, key)
                promises = [(each, send_all(each)) for each in new(service, of)]
                assert all(kept(promised, losses) for _, promised in promises)
                assert all(weights_of(state, each.model_id, "end") == expected for each, _ in promises)
                service.close("success").result()
            faults += counts
        assert set(faults) == set(FAULTS)


def test_a_bad_network_changes_no_weight(small, tmp_path):
    through_a_bad_network(small, tmp_path, [0], 8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [0, 5, 10, 15])
def test_a_thousand_schedules_of_a_bad_network_change_no_weight(first, small, tmp_path):
    through_a_bad_network(small, tmp_path, range(first, first + 5), 50)


class Trainer:
    """A client that trains, saves and loads until it is asked to end; what it does depends on nothing else."""

    def __init__(self, trained):
        self._trained = trained
        self._changed = threading.Condition()
        self._answered, self._ending = 0, False
        self.losses = []

    def train(self, most=10**9):
        """Train at most so many steps; return how many."""
        saved, step = None, 0
        while step < most and not self._ending:
            promised = [self._trained.forward_backward(data(2 * step + place), "cross_entropy") for place in range(2)]
            promised.append(self._trained.optim_step(ADAM))
            self.losses += [self._wait(each).metrics for each in promised]
            step += 1
            if step % 5 == 0:
                saved = self._wait(self._trained.save_state(f"at-{step}")).path
            if step % 7 == 0 and saved:
                self._wait(self._trained.load_state_with_optimizer(saved))
        self._wait(self._trained.save_weights_external("end"))
        return step

    def end(self):
        """Ask :meth:`train` to end."""
        self._ending = True

    def wait_for(self, answers, at_most_s=120):
        """Wait until so many more requests have been answered; return whether they have."""
        with self._changed:
            wanted = self._answered + answers
            return self._changed.wait_for(lambda: self._answered >= wanted, at_most_s)

    def _wait(self, promise):
        found = promise.result()
        with self._changed:
            self._answered += 1
            self._changed.notify()
        return found


def survive_kills(small, directory, kills):
    rng, state = random.Random(0), directory / "killed"
    with living(small, state) as server, ThreadPoolExecutor(1) as pool:
        (trained,) = new(client(server.url, KEY))
        trainer = Trainer(trained)
        training = pool.submit(trainer.train)
        for _ in range(kills):
            assert trainer.wait_for(rng.randrange(1, 12)) or training.result(0)
            trainer.wait_for(99, rng.uniform(0, 0.03))  # a moment of a request
            server.kill()
            server.begin()
        trainer.end()
        steps = training.result()
    with served(small, directory / "plain") as (url, key):
        (plain,) = new(client(url, key))
        expected = Trainer(plain)
        expected.train(steps)
    assert trainer.losses == expected.losses
    assert weights_of(state, trained.model_id, "end") == weights_of(directory / "plain", plain.model_id, "end")


def test_kill_9_loses_and_doubles_no_gradient(small, tmp_path):
    survive_kills(small, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_lose_and_double_no_gradient(small, tmp_path):
    survive_kills(small, tmp_path, 50)


def attempts(service):
    """Ask for a model again and again; yield it, or ``None`` when there is no room for one."""
    for _ in range(1000):
        try:
            yield new(service)[0]
        except APIStatusError as error:
            yield None if "there are 1 models" in str(error) else pytest.fail(str(error))


def test_a_client_that_vanishes_frees_its_room_and_may_come_back(small, tmp_path, monkeypatch):
    monkeypatch.setattr(server_run, "SWEEP_S", 0.05)
    with served(small, tmp_path, max_models=1, session_s=0.5) as (url, key):
        (silent,) = new(client(url, key))  # its heartbeats are ten seconds apart
        losses = [silent.forward_backward(data(0), "cross_entropy").result().metrics]
        copies = tmp_path / "runs" / silent.model_id.replace(":", "_")
        made = next(made for made in attempts(client(url, key)) if made is not None)
        assert list(copies.glob("copy-*")), "the silent model is on the disk alone"
        silent.optim_step(ADAM).result()
        losses.append(silent.forward_backward(data(1), "cross_entropy").result().metrics)
        for step in range(2):
            assert made.forward_backward(data(step), "cross_entropy").result().metrics == losses[step]
            made.optim_step(ADAM).result()
