"""``headrace tinker`` measured by its client: the start, round trips, and the throughput of several adapters compared
with one. ``headrace tinker`` is a server of the Tinker protocol, on which each *tenant* trains an adapter of its own.

The server is a process of its own; the unmodified client of the protocol sends requests to it over HTTP. The rates of
one and of several adapters are measured alternately, with the same total number of sequences, and a ratio is the median
over the rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.bench.base import Report, Row, Target, at_least, at_most, make_report
from headrace.wings.bench.engine import LARGE, SMALL

NAME = "bench/model"
RANK = 16
ADAPTERS = {4: 0.8, 16: 0.6}
"""The measured numbers of adapters that compute at once, each with the target fraction of the throughput of one
adapter."""
TENANTS = 32
CLOCK = RealClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSizes:
    """The sizes of the measurements."""

    models: tuple[tuple[str, TinySpec], ...]
    """The name and the shape of each model that is served."""
    samples: int = 64
    """The number of sequences that are sampled at once, of all adapters together."""
    new_tokens: int = 64
    """The number of tokens of each sampled sequence."""
    requests: int = 16
    """The number of forward_backward requests in flight, of all adapters together."""
    rounds: int = 7
    """The number of measurements of a rate, of which the median is reported."""
    trips: int = 30
    """The number of round trips in the measurement of a latency."""
    tenants: int = TENANTS
    """The number of adapters that train at once in the measurement of many tenants."""
    turns: int = 16
    """The number of requests of each of these adapters, n. A server that serves one request of each adapter in turn
    ends the first adapter at the start of the last of n rounds, so up to 1/n of the whole time before the last."""


FULL_SIZES = TinkerSizes(models=(("1M", SMALL), ("28M", LARGE)))
QUICK_SIZES = TinkerSizes(
    models=(("1M", SMALL),), samples=16, new_tokens=4, requests=16, rounds=1, trips=2, tenants=4, turns=4
)  # fmt: skip


def measure(on_progress: Callable[[str], None], *, quick: bool = False) -> Report:
    """Run all measurements and return their report; with ``quick`` everything is small and the figures mean nothing.
    ``on_progress`` is called with lines of progress. Raises :class:`~headrace.base.errors.ConfigError` if the client is
    not installed."""
    sizes, rows, targets = QUICK_SIZES if quick else FULL_SIZES, list[Row](), list[Target]()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        for name, spec in sizes.models:
            on_progress(f"{name}: start")
            model = make_tiny(Path(scratch) / name, spec)
            with _server(model, Path(scratch) / f"state-{name}") as server:
                bench = _TinkerBench(server, sizes, name, on_progress)
                bench.run(whole=spec is SMALL)
            rows += bench.rows
            targets += bench.targets
    return make_report(rows, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """A server of the Tinker protocol that has answered its first request, and a client of this server."""

    client: Any
    """The ``ServiceClient`` of the package ``tinker``."""
    process: psutil.Process
    """The server's process, whose memory is measured."""
    started_s: float
    """The time from the start of the command to the first answer, in seconds."""


def _read_variables(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the two environment variables, address and key, that the server prints for its clients; fewer if the
    server ends before it has printed them."""
    assert process.stdout is not None
    found: dict[str, str] = {}
    for line in process.stdout:
        key, _, value = line.strip().removeprefix("export ").partition("=")
        if key.startswith("TINKER_"):
            found[key] = value
        if len(found) == 2:
            break
    return found


@contextmanager
def _server(model: Path, state: Path) -> Iterator[_Server]:
    """Start ``headrace tinker`` with the model, and yield the server after it has answered its first request; the
    server is stopped at the end of the context. ``state`` is the directory for the adapters of the server. Raises
    :class:`~headrace.base.errors.ConfigError` if the client is not installed."""
    try:
        import tinker
    except ImportError:
        raise ConfigError("the benchmark tinker needs the client", remedy="pip install tinker") from None
    program = [sys.executable, "-c", "from headrace.run.cli import main; main()"]
    command = [*program, "tinker", str(model), "--name", NAME, "--port", "0"]
    began_s = CLOCK.now()
    with subprocess.Popen([*command, "--state", str(state)], stdout=subprocess.PIPE, text=True) as process:
        try:
            found = _read_variables(process)
            client = tinker.ServiceClient(base_url=found["TINKER_BASE_URL"], api_key=found["TINKER_API_KEY"])
            sampler = client.create_sampling_client(base_model=NAME).result()
            _sample([sampler], 1, 1)
            took_s = CLOCK.now() - began_s
            yield _Server(client=client, process=psutil.Process(process.pid), started_s=took_s)
        finally:
            process.terminate()


def _prompt(length: int, seed: int = 0) -> list[int]:
    """Return ``length`` random token ids; the same ``seed`` gives the same ids."""
    return np.random.default_rng(seed).integers(3, 60, length).tolist()  # type: ignore[no-any-return]


def _datum(length: int, seed: int) -> Any:
    """Return a datum of the protocol, one sequence to train on: ``length`` random tokens, all of which carry loss."""
    from tinker import types

    ids = _prompt(length + 1, seed)
    inputs: Any = {"target_tokens": np.array(ids[1:]), "weights": np.ones(length, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def _sample(samplers: Sequence[Any], num_each: int, new_tokens: int) -> float:
    """Sample ``num_each`` sequences of ``new_tokens`` tokens from every sampling client at once; return the tokens per
    second of all clients together."""
    from tinker import types

    params = types.SamplingParams(max_tokens=new_tokens, stop=[], seed=1)
    prompt, began_s = types.ModelInput.from_ints(_prompt(8)), CLOCK.now()
    futures = [one.sample(prompt=prompt, num_samples=num_each, sampling_params=params) for one in samplers]
    count = sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
    return count / (CLOCK.now() - began_s)


def _train(models: Sequence[Any], num_each: int, length: int = 128) -> tuple[float, list[float]]:
    """Send ``num_each`` requests ``forward_backward``, of four sequences of ``length`` tokens, for every model at once,
    and then make an optimizer step with each model. Return the trained tokens per second, and the seconds until each
    model had all its results."""
    data = [_datum(length, place) for place in range(4)]
    began_s = CLOCK.now()

    def wait(futures: Sequence[Any]) -> float:
        """Wait for ``futures``, all results of one model; return the seconds since the first request was sent."""
        for future in futures:
            future.result()
        return CLOCK.now() - began_s

    with ThreadPoolExecutor(len(models)) as pool:
        futures = [[model.forward_backward(data, "cross_entropy") for _ in range(num_each)] for model in models]
        ended_s = list(pool.map(wait, futures))
    rate = len(models) * num_each * 4 * length / max(ended_s)
    for model in models:
        model.optim_step(_adam()).result()
    return rate, ended_s


def _adam() -> Any:
    """Return the settings of an optimizer step, an object of the protocol."""
    from tinker import types

    return types.AdamParams(learning_rate=1e-3)


class _TinkerBench:
    """The measurements of one server, which are added to :attr:`rows` and :attr:`targets`."""

    def __init__(self, server: _Server, sizes: TinkerSizes, name: str, on_progress: Callable[[str], None]) -> None:
        """Prepare the measurements of ``server``. ``name`` is the size of the served model in the report;
        ``on_progress`` is called with lines of progress."""
        self._server, self._sizes, self._name, self._tell = server, sizes, name, on_progress
        self.rows: list[Row] = []
        self.targets: list[Target] = []

    def run(self, *, whole: bool) -> None:
        """Measure the rates of several adapters compared with one; with ``whole`` also the start, the round trips and
        many tenants."""
        models = self._create_models(max(ADAPTERS))
        if whole:
            self.targets.append(at_most("command to first answer", self._server.started_s, 10.0, "s"))
            self._measure_trips(models[0])
        samplers = [model.save_weights_and_get_sampling_client().result() for model in models]
        for count, goal in ADAPTERS.items():
            self._measure_several(models[:count], samplers[:count], goal)
        if whole:
            self._measure_tenants()

    def _create_models(self, count: int) -> list[Any]:
        """Return ``count`` new training clients, each with an adapter of its own, after one step with each client."""
        create = self._server.client.create_lora_training_client
        futures = [create(base_model=NAME, rank=RANK, seed=seed) for seed in range(count)]
        models = [future.result() for future in futures]
        _train(models, 1)
        return models

    def _measure_trips(self, model: Any) -> None:
        """Measure the time between a small request and its result, for training ``model`` and for sampling; add rows in
        milliseconds, and targets."""
        self._tell(f"{self._name}: round trips")
        data, sampler = [_datum(64, 0)], model.save_weights_and_get_sampling_client().result()
        found: dict[str, list[float]] = {"forward_backward of 64 tokens": [], "sample of 16 tokens": []}
        for _ in range(self._sizes.trips):
            began_s = CLOCK.now()
            model.forward_backward(data, "cross_entropy").result()
            found["forward_backward of 64 tokens"].append(CLOCK.now() - began_s)
            model.optim_step(_adam()).result()
            began_s = CLOCK.now()
            _sample([sampler], 1, 16)
            found["sample of 16 tokens"].append(CLOCK.now() - began_s)
        for (what, times_s), limit_ms in zip(found.items(), (100.0, 150.0), strict=True):
            times_ms = sorted(1000 * each for each in times_s)
            middle = statistics.median(times_ms)
            self.rows.append({"what": f"{self._name}, {what}", "median_ms": middle, "slowest_ms": times_ms[-1]})
            self.targets.append(at_most(f"{self._name}, {what}", middle, limit_ms, "ms"))

    def _measure_several(self, models: Sequence[Any], samplers: Sequence[Any], goal: float) -> None:
        """Measure the throughput, in tokens per second, of the same work spread over all ``models`` (for sampling, over
        their ``samplers``), divided by the throughput with one of them. Add a row and a target, at least ``goal``, for
        sampling and for training."""
        sizes, count = self._sizes, len(models)
        decode, train = list[tuple[float, float]](), list[tuple[float, float]]()
        for turn in range(-1, sizes.rounds):  # the first round is not counted
            self._tell(f"{self._name}: {count} adapters, round {turn + 1}")
            one = _sample(samplers[:1], sizes.samples, sizes.new_tokens)
            decode.append((one, _sample(samplers, sizes.samples // count, sizes.new_tokens)))
            one = _train(models[:1], sizes.requests)[0]
            train.append((one, _train(models, sizes.requests // count)[0]))
        for what, pairs in (("decode", decode[1:]), ("training", train[1:])):
            ones, several = ([pair[place] for pair in pairs] for place in range(2))
            ratio = statistics.median(b / a for a, b in pairs)
            row = {"one_tok_s": statistics.median(ones), "several_tok_s": statistics.median(several), "ratio": ratio}
            self.rows.append({"what": f"{self._name}, {what}, {count} adapters", **row})
            self.targets.append(at_least(f"{self._name}, {what}, {count} adapters by one", ratio, goal, "ratio"))

    def _measure_tenants(self) -> None:
        """Measure many tenants that train at once: their throughput, how evenly they are served, and the memory of the
        server. Then measure the memory for the same number of further tenants, for which the server moves the first
        tenants to the disk, so that it should need at most half as much. Add a row and targets."""
        count = self._sizes.tenants
        self._tell(f"{self._name}: {count} tenants")
        before = self._server.process.memory_info().rss
        models = self._create_models(count)
        rate, ended_s = _train(models, self._sizes.turns)
        samplers = [model.save_weights_and_get_sampling_client().result() for model in models]
        sampled = _sample(samplers, 1, self._sizes.new_tokens)
        grown = self._server.process.memory_info().rss - before
        self._tell(f"{self._name}: {count} tenants more")
        others = self._create_models(count)
        _train(others, 4)
        _sample([model.save_weights_and_get_sampling_client().result() for model in others], 1, 1)
        again = self._server.process.memory_info().rss - before - grown
        spread = 1.0 - min(ended_s) / max(ended_s)
        times = {"first_done_s": min(ended_s), "last_done_s": max(ended_s)}
        row = {"train_tok_s": rate, "decode_tok_s": sampled, **times, "more_mb": grown / 2**20}
        self.rows.append({"what": f"{self._name}, {count} tenants", **row, "others_more_mb": again / 2**20})
        self.targets.append(at_most(f"{self._name}, {count} tenants, first before last", spread, 0.2, "fraction"))
        share = again / max(grown, 1)
        self.targets.append(at_most(f"{self._name}, memory of {count} others by the first", share, 0.5, "ratio"))
