"""``headrace ledger RUN --replay``: train a fresh learner on the recorded batches of a run, and compare its weights
with the recorded hashes.

The *ledger* is the durable record of a run: its groups of episodes with all tokens, and the hash of the weights of
every committed version. Step k trains weights of version k and makes version k + 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import torch

from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.environ import num_cores
from headrace.base.errors import ConfigError, LedgerError, StoreError
from headrace.base.store import COLUMNS, StoreReader, read_batch
from headrace.base.types.batch import Batch
from headrace.base.types.scored import ScoredGroup
from headrace.control.credit import credit
from headrace.control.loops.syncing import version_checksum
from headrace.flow.layout import inline, lay_out, outline_of
from headrace.flow.ledger import Ledger
from headrace.launch.config import threads
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.models import load_model
from headrace.models.devices import use_device
from headrace.models.weights import weight_tensors
from headrace.run.session.config import RunConfig, load_config, with_local_models
from headrace.run.session.directory import read_settings
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The result of :func:`replay`: the versions of the weights at which a fresh learner, trained on the recorded
    batches, has the same weights as the run."""

    steps: int
    """The number of steps that were trained again."""
    agree: list[int]
    """The versions whose weights are equal, bit for bit, to the weights that the run committed."""
    differ: list[int]
    """The versions whose weights differ. All versions after the first such version differ too."""

    @property
    def first_difference(self) -> int | None:
        """The first version whose weights differ; ``None`` where all versions agree."""
        return min(self.differ, default=None)


def replay(run_dir: Path, ledger: Ledger, on_progress: Callable[[str], None] = lambda _: None) -> Replay:
    """Train a fresh learner on every batch in ``ledger``, from the first step on, and compare the hash of its weights
    after each step with the hash of the committed version.

    ``on_progress`` is called with a line about each version. Raises :class:`~headrace.base.errors.ConfigError` where
    the learner of the run in ``run_dir`` has several ranks, and :class:`~headrace.base.errors.LedgerError` where steps
    are missing.
    """
    config = with_local_models(_load_settings(run_dir))
    steps, recorded = ledger.steps(), ledger.checksums()
    if sorted(steps) != list(range(len(steps))):
        raise LedgerError("its steps have gaps", remedy="restore the ledger from a copy")
    torch.set_num_threads(threads(config.launch.learner_threads, num_cores()))
    device = use_device("learner.device", config.learner.device, only_cpu=config.model.deterministic)
    model = load_model(config.model, str(device))
    context = LearnerContext(
        temperature=config.engine.temperature,
        total_steps=config.run.steps,
        model_dir=Path(config.model.path),
        clock=RealClock(),
    )
    learner = LearnerCore(model, config.learner, Objective.build(config.algo), context)
    agree: list[int] = []
    differ: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="headrace-replay-") as scratch,
        closing(make_publisher(_route(config, Path(scratch)), weight_tensors(model))) as publisher,
    ):
        for version in range(len(steps) + 1):
            if version:
                learner.train(
                    _load_columns(_assemble_batch(config, ledger, version - 1, steps[version - 1]), run_dir / COLUMNS)
                )
            publisher.copy(version % 2)
            checksum = version_checksum(publisher.announce(version, version % 2))
            if version in recorded:
                same = checksum == recorded[version]
                (agree if same else differ).append(version)
                on_progress(f"version {version}: {'agrees' if same else 'DIFFERS'}")
    return Replay(steps=len(steps), agree=agree, differ=differ)


def _load_columns(batch: Batch, directory: Path) -> Batch:
    """Return a copy of ``batch`` that contains the kept-sets and experts from the store in ``directory``, to which it
    has references. Raises :class:`~headrace.base.errors.StoreError` if they cannot be read."""
    complete, lost = read_batch(batch, StoreReader(directory))
    if lost:
        raise StoreError(
            f"step {batch.step} cannot be trained again: {next(iter(lost.values())).problem}",
            remedy="a replay needs the folder 'columns' of the run's directory whole: flow.columns.keep = 'always'",
        )
    return complete


def _route(config: RunConfig, scratch: Path) -> Route:
    """Return the settings with which the fresh learner publishes its weights: into files in the directory ``scratch``,
    with the run's codec, since the recorded hashes are computed from encoded weights."""
    return Route(codec=config.sync.codec, address=str(scratch / "weights"))


def _load_settings(run_dir: Path) -> RunConfig:
    """Return the settings of the run in ``run_dir``. Raises :class:`~headrace.base.errors.ConfigError` where its
    learner has several ranks."""
    config = load_config(read_settings(run_dir))
    if config.learner.parallel.world > 1:
        raise ConfigError(
            f"the learner of {run_dir} has {config.learner.parallel.world} ranks, and a replay has one",
            remedy="replay runs of a learner of one rank",
        )
    return config


def _assemble_batch(config: RunConfig, ledger: Ledger, step: int, numbers: tuple[int, ...]) -> Batch:
    """Return the batch that the run trained in ``step``, assembled again from the groups ``numbers`` in the ledger. The
    credit is computed again; tokens that were too old, or had no scores of a teacher, carry no loss, as in the run."""
    groups = [ScoredGroup(number=number, episodes=tuple(ledger.episodes(number))) for number in numbers]
    flow = config.flow
    weight = 1.0 if flow.pivots is None else flow.pivots.weight
    agents = config.model.adapter_agents
    oldest = step - flow.greatest_age if flow.policy.masks_stale else None
    credits = credit(config.algo, groups, branch_weight=weight)
    return lay_out(outline_of(step, groups, credits, agents=agents, oldest_version=oldest), inline).batch
