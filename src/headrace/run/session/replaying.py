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
from headrace.base.store import COLUMNS, COLUMNS_LOST, StoreReader, read_batch, remove_groups
from headrace.base.types.batch import Batch
from headrace.base.types.outline import BatchOutline, groups_in_words
from headrace.base.types.scored import ScoredGroup
from headrace.control.credit import credit
from headrace.control.loops.syncing import version_checksum
from headrace.flow.layout import inline, lay_out, make_outline
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
        """The first version whose weights differ; ``None`` if all versions agree."""
        return min(self.differ, default=None)


def replay(run_dir: Path, ledger: Ledger, on_progress: Callable[[str], None] = lambda _: None) -> Replay:
    """Train a fresh learner on every batch in ``ledger``, from the first step on, and compare the hash of its weights
    after each step with the hash of the committed version.

    ``on_progress`` is called with a line about each version. Raises :class:`~headrace.base.errors.ConfigError` if the
    learner of the run in ``run_dir`` has several ranks, and the errors of :class:`RecordedBatches`.
    """
    config = with_local_models(_load_settings(run_dir))
    batches, recorded = RecordedBatches(config, ledger, run_dir / COLUMNS), ledger.checksums()
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
        closing(make_publisher(_make_route(config, Path(scratch)), weight_tensors(model))) as publisher,
    ):
        for version in range(batches.num_steps + 1):
            if version:
                learner.train(batches.assemble(version - 1, on_progress))
            publisher.copy(version % 2)
            checksum = version_checksum(publisher.announce(version, version % 2))
            if version in recorded:
                same = checksum == recorded[version]
                (agree if same else differ).append(version)
                on_progress(f"version {version}: {'agrees' if same else 'DIFFERS'}")
    return Replay(steps=batches.num_steps, agree=agree, differ=differ)


def _make_route(config: RunConfig, scratch: Path) -> Route:
    """Return the settings with which the fresh learner publishes its weights: into files in the directory ``scratch``,
    with the codec in ``config``, since the recorded hashes are computed from encoded weights."""
    return Route(codec=config.sync.codec, address=str(scratch / "weights"))


def _load_settings(run_dir: Path) -> RunConfig:
    """Return the settings of the run in ``run_dir``. Raises :class:`~headrace.base.errors.ConfigError` if its learner
    has several ranks."""
    config = load_config(read_settings(run_dir))
    if config.learner.parallel.world > 1:
        raise ConfigError(
            f"the learner of {run_dir} has {config.learner.parallel.world} ranks, and a replay has one",
            remedy="replay runs of a learner of one rank",
        )
    return config


class RecordedBatches:
    """The batches that a run has trained, assembled again from its ledger and from the columns in its store.

    Raises :class:`~headrace.base.errors.LedgerError` if steps are missing, and if groups carried no loss because their
    columns could not be read, but are not recorded, as by older versions of Headrace.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, directory: Path) -> None:
        """Use the settings ``config`` of the run, its ``ledger``, and the ``directory`` of its store."""
        self._config = config
        self._ledger = ledger
        self._directory = directory
        self._steps, self._lost = ledger.steps(), ledger.lost()
        """The numbers of the groups in the batch of each step; and by step, the groups that carried no loss because
        their columns could not be read."""
        if sorted(self._steps) != list(range(len(self._steps))):
            raise LedgerError("its steps have gaps", remedy="restore the ledger from a copy")
        unrecorded = [step for step, groups in self._lost.items() if not groups]
        if unrecorded:
            raise LedgerError(
                f"columns of groups could not be read in its step {unrecorded[0]} ({COLUMNS_LOST}), and an older "
                "version of Headrace has not recorded which groups carried no loss",
                remedy="replay a run that has lost no columns",
            )

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the run."""
        return len(self._steps)

    def assemble(self, step: int, on_progress: Callable[[str], None]) -> Batch:
        """Return the batch that the run trained in ``step``, with its kept-sets and experts. Groups that carried no
        loss in the run because their columns could not be read carry none here, and ``on_progress`` is called with a
        line about them. Raises :class:`~headrace.base.errors.StoreError` if columns of other groups cannot be read."""
        lost = self._lost.get(step, ())
        if lost:
            names = groups_in_words([each.number for each in lost])
            on_progress(f"step {step}: {names} carried no loss in the run, nor here: {lost[0].why}")
        omitted = {each.number for each in lost if each.left_out}
        laid_out = lay_out(self._make_outline(step), lambda group: None if group.number in omitted else inline(group))
        complete, unreadable = read_batch(laid_out.batch, StoreReader(self._directory))
        lost_numbers = {each.number for each in lost}
        masked = [index for index, number in enumerate(laid_out.groups) if number in lost_numbers]
        missing = sorted(unreadable.keys() - set(masked))
        if missing:
            names = groups_in_words([laid_out.groups[index] for index in missing])
            raise StoreError(
                f"step {step} cannot be trained again, because columns of {names} cannot be read: "
                f"{unreadable[missing[0]].problem}",
                remedy="a replay needs the folder 'columns' of the run's directory whole: flow.columns.keep = 'always'",
            )
        return remove_groups(complete, masked)[0] if masked else complete

    def _make_outline(self, step: int) -> BatchOutline:
        """Return the outline of the batch of ``step``. The credit is computed again, from all groups of the step;
        tokens that were too old carry no loss, as in the run."""
        config, flow = self._config, self._config.flow
        groups = [
            ScoredGroup(number=number, episodes=tuple(self._ledger.episodes(number))) for number in self._steps[step]
        ]
        return make_outline(
            step,
            groups,
            credit(config.algo, groups, branch_weight=1.0 if flow.pivots is None else flow.pivots.weight),
            agents=config.model.adapter_agents,
            oldest_version=step - flow.largest_age if flow.policy.masks_stale else None,
        )
