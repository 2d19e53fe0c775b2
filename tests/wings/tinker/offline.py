"""The compute and the journal of a server without HTTP, for tests of numbers and order."""

import json
import sys
from pathlib import Path

import numpy as np

from headrace.base.clock import RealClock
from headrace.models import ModelConfig, load_model
from headrace.wings.tinker.compute import BaseCompute, FrozenBase
from headrace.wings.tinker.fair_thread import FairThread
from headrace.wings.tinker.journal import WAITING, Journal, JournalEntry
from headrace.wings.tinker.performing import Performer, make_spec
from headrace.wings.tinker.schema import CreateModelBody, parse
from headrace.wings.tinker.tenants import Tenants

MODEL = "s:train:0"


def make_compute(model: Path, **more) -> BaseCompute:
    return BaseCompute(load_model(ModelConfig(path=str(model))), **{"tokens_per_microbatch": 32, **more})


def make_base(compute: BaseCompute, max_rank: int = 64) -> FrozenBase:
    return FrozenBase(path=Path(compute.model.config.name_or_path), compute=compute, max_rank=max_rank, max_context=256)


class AnyName(dict[str, FrozenBase]):
    """One base, whatever it is called."""

    def __init__(self, base: FrozenBase) -> None:
        super().__init__()
        self._base = base

    def get(self, name: str) -> FrozenBase:
        return self._base

    def __missing__(self, name: str) -> FrozenBase:
        return self._base


class Offline:
    """The models of a server in ``state``, from its start to :meth:`close`, or to :meth:`kill`."""

    def __init__(self, compute: BaseCompute, state: Path, max_rank: int = 64, **more) -> None:
        self.journal, self.failures = Journal(state), []
        self.turns = FairThread("test-turns", self.failures.append)
        clock = RealClock()
        self._bases = AnyName(make_base(compute, max_rank))
        self.tenants = Tenants(self.journal, state, self._bases, self.turns, clock=clock, **{"max_resident": 8, **more})
        self.tenants.perform = Performer(
            self.journal, state, self._bases, clock=clock, get_seed=lambda model: 0, ephemeral_s=1e9
        )
        self.tenants.resume()

    def create(self, model: str = MODEL, rank: int = 4, base: str = "b", **lora) -> None:
        config = {"rank": rank, "seed": 1, **lora}
        given = {"session_id": "s", "model_seq_id": 0, "base_model": base, "lora_config": config}
        body = json.dumps(given).encode()
        spec = make_spec(parse(body, CreateModelBody), self._bases[base])
        self.journal.run(
            "INSERT OR IGNORE INTO models (id, session, number, created_s, used_s, spec) VALUES (?, 's', 0, 0, 0, ?)",
            model, json.dumps(spec),
        )  # fmt: skip
        self.send("create_model", 0, body, model)

    def send(self, kind: str, seq: int, body: bytes, model: str = MODEL) -> None:
        self.tenants.accept(JournalEntry(model=model, seq=seq, kind=kind, body=body, status=WAITING))

    def wait(self) -> None:
        """Wait until every request that can be computed has been."""
        assert not self.turns.waiting or self.turns.idle.wait(100), self.failures
        assert not self.failures, self.failures

    def weights(self, model: str = MODEL) -> dict[str, np.ndarray]:
        self.wait()
        self.turns.submit(model, lambda: self.tenants._restore(model, sys.maxsize))
        self.wait()
        return {name: each.detach().numpy().copy() for name, each in self.tenants._live[model].weights.tensors.items()}

    def close(self) -> None:
        self.turns.close()
        self.tenants.copy_all()
        self.journal.close()

    def kill(self) -> None:
        """End as a killed process does: nothing in memory is written."""
        self.turns.close()
        self.journal.close()


def train_body(ids, seq, loss="cross_entropy", model=MODEL, config=None, *, forward_only=False, **inputs) -> bytes:
    """Return the bytes that the client sends for a forward_backward of one datum."""
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    from tests.wings.tinker.serving import datum

    given = types.ForwardBackwardInput(
        data=[datum(list(each), **inputs) for each in ids], loss_fn=loss, loss_fn_config=config
    )
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=seq)
    encoded = forward_backward_request_to_proto(request)
    encoded.forward_only = forward_only
    return encoded.SerializeToString()


def step_body(seq, model=MODEL, **adam) -> bytes:
    given = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01, **adam}, "type": "optim_step"}
    return json.dumps(given).encode()


def script(num_steps: int, model=MODEL) -> list[tuple[str, int, bytes]]:
    """Return requests: two gradients and a step, again and again."""
    rng, requests = np.random.default_rng(0), list[tuple[str, int, bytes]]()
    for _ in range(num_steps):
        for _ in range(2):
            seq = len(requests) + 1
            ids = rng.integers(4, 30, size=(3, 12))
            requests.append(("forward_backward", seq, train_body(ids, seq, model=model)))
        seq = len(requests) + 1
        requests.append(("optim_step", seq, step_body(seq, model)))
    return requests
