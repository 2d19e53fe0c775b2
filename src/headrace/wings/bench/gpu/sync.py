"""The stage ``sync``: versions from real training steps are sent from a learner on the device to an engine that decodes
on the same device, as whole weights and as differences. The stage measures for how long both are blocked, and checks
that damaged bytes are refused.

Learner and engine are in one process here, and exchange weights through shared memory, like the two processes of a run
(which the stage ``demo`` measures).
"""

from __future__ import annotations

import mmap
import statistics
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from headrace.base.environ import shared_memory_root
from headrace.base.errors import WeightsError
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import WeightUpdate
from headrace.engine.native import NativeEngine
from headrace.learner.core import LearnerCore
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.publisher import Publisher
from headrace.sync.transports import make_publisher, make_receiver
from headrace.wings.bench.base import Row, at_least, at_most
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.bench.gpu.engines import Load, open_engine
from headrace.wings.bench.gpu.learners import open_learner, random_batch
from headrace.wings.bench.gpu.shapes import MEASURED, SMALL, find_model, write_model

VERSIONS = 6
"""The number of measured versions of each codec; two versions before these allocate memory."""
GAP_MS = 5.0
"""The target for the median commit gap, in milliseconds."""


def run(stage: StageContext) -> None:
    """Measure both codecs, and record in rows which transports are left out. ``stage`` records the results."""
    stage.add_row(what="CUDA IPC", left_out="there is no transport within one GPU's memory: versions pass host memory")
    stage.add_row(what="group", left_out="sends through host memory: headrace bench sync measures it")
    for name in (SMALL,) if stage.pretend else MEASURED:
        for codec in ("full", "delta"):
            stage.attempt(f"versions of {name}, {codec}", partial(_measure, stage, name, codec), needs_s=12)


def _measure(stage: StageContext, name: str, codec: str) -> None:
    """Send versions from real steps of the model ``name`` to an engine that decodes, with ``codec``, and record the
    medians of the durations. ``stage`` records them."""
    folder = write_model(stage, name, "bfloat16")
    load = Load(sequences=4, prompt=8, new=200) if stage.pretend else Load(sequences=64, prompt=256, new=512)
    core = open_learner(stage, folder, "bfloat16", {"tokens_per_microbatch": 4096, "lr": 1e-5})
    path = shared_memory_root() / f"headrace-gpu-{stage.directory.parent.name}-{codec}"
    route = Route(address=str(path), codec=codec)
    with closing(make_publisher(route, weight_tensors(core.model))) as publisher:
        engine = _engine(stage, folder, load, codec, core)
        transfer = _VersionTransfer(
            stage, core, publisher, engine, find_model(name, pretend=stage.pretend).settings["vocab_size"]
        )
        versions = [transfer.send_version() for _ in range(VERSIONS + 2)][2:]
        row: Row = {key: statistics.median(version[key] for version in versions) for key in versions[0]}
        seconds = row["exposed_s"] + row["announce_s"] + row["stage_s"]
        stage.add_row(what=f"versions of {name}, {codec}", **row, gb_s=transfer.whole_bytes / seconds / 1e9)
        stage.add_target(
            at_most(f"sync, {name}, {codec}: median commit gap", row["gap_s"] * 1e3, GAP_MS, "ms"), measured=True
        )
        if codec == "full":
            transfer.check_damage(path, name)
            stage.add_figures(sync_gb_s=transfer.whole_bytes / seconds / 1e9, gap_s=row["gap_s"])


def _engine(stage: StageContext, folder: Path, load: Load, codec: str, core: LearnerCore) -> NativeEngine:
    """Return an engine without weights, which will receive the weights of the learner ``core``."""
    receiver = make_receiver(Route(codec=codec), weight_tensors(core.model))
    return open_engine(stage, folder, "bfloat16", load, receiver=receiver)


class _VersionTransfer:
    """The transfer of weights, version by version, from a learner to an engine in this process."""

    def __init__(
        self, stage: StageContext, core: LearnerCore, publisher: Publisher, engine: NativeEngine, vocab: int
    ) -> None:
        """Prepare the transfer of the weights of ``core`` by ``publisher`` to ``engine``; no version is sent yet.
        ``vocab`` is the size of the model's vocabulary. ``stage`` measures the time."""
        self._stage, self._core, self._publisher, self._engine, self._vocab = stage, core, publisher, engine, vocab
        self._version = -1
        """The number of the version that was published last; -1 before the first."""
        self._requests = 0
        """The number of requests that the engine has had."""
        self.whole_bytes = publisher.manifest.total_bytes
        """The size of all weights of one version, in bytes."""

    def send_version(self) -> dict[str, float]:
        """Train a step, send its weights to the engine while the engine decodes, and commit them. Return the seconds of
        each part, and the number of sent bytes."""
        if self._version >= 0:
            self._core.train(
                random_batch(self._core.version, prompt=4, answers=(9, 12, 7, 5), vocab=self._vocab, seed=self._version)
            )
        update, exposed_s, announce_s = self._publish()
        stage_s = self._stage.measure_s(lambda: self._engine.stage(update))
        self._decode(3)
        self._engine.commit(self._version)
        self._decode(1)
        (swap,) = self._engine.take_swaps()
        return {
            "exposed_s": exposed_s, "announce_s": announce_s, "stage_s": stage_s, "gap_s": swap.gap_s,
            "bytes": float(update.num_bytes),
        }  # fmt: skip

    def check_damage(self, path: Path, name: str) -> None:
        """Change one bit of the next version in shared memory, and check that the engine refuses this version and
        accepts the version after it. ``path`` is the file of the shared memory, and ``name`` the name of the model in
        the report."""
        update, _, _ = self._publish()
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[update.slot * self.whole_bytes + self.whole_bytes // 2] ^= 1
        refused = ""
        try:
            self._engine.stage(update)
        except WeightsError as error:
            refused = error.problem
        self._stage.add_row(what=f"one bit of {name} changed on the way", refused=refused[:200])
        self._stage.add_target(at_least(f"sync, {name}: damaged versions refused", float(bool(refused)), 1, "versions"))
        self.send_version()

    def _publish(self) -> tuple[WeightUpdate, float, float]:
        """Copy the learner's weights into shared memory and announce them as the next version. Return the announcement,
        the seconds of the copy, and the seconds of the announcement."""
        self._version += 1
        slot = self._version % 2
        exposed_s = self._stage.measure_s(lambda: self._publisher.copy(slot))
        start_s = self._stage.clock.now()
        update = self._publisher.announce(self._version, slot)
        return update, exposed_s, self._stage.clock.now() - start_s

    def _decode(self, steps: int) -> None:
        """Run ``steps`` steps of the engine, and add a new request if it has none, after its first version."""
        for _ in range(steps):
            if self._version > 0 and not self._engine.has_work():
                self._requests += 1
                ids_T = np.arange(3, 11, dtype=np.int32)
                sampling = Sampling(max_new_tokens=40, seed=self._requests)
                self._engine.add(GenerateRequest(request_id=self._requests, prompt_ids_T=ids_T, sampling=sampling))
            self._engine.step()
