"""Several adapters that are trained on one frozen base model.

    base ──┬── adapter a ── LearnerCore a: gradient, optimizer, version
           └── adapter b ── LearnerCore b

One adapter at a time is active, for computing and for training. The base model exists once: each further learner costs
only the memory of its adapter and of its optimizer's moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from transformers import PreTrainedModel

from headrace.learner.core import LearnerCore
from headrace.learner.parallel.adapt import adding, measure_norms
from headrace.learner.parallel.mesh import AnyRanks, Ranks, SingleRank
from headrace.models import LoraConfig, ModelConfig
from headrace.models.lora import active, add_adapter


class Adapters:
    """A collection of named learners, each with its own adapter of ``model``. It is not thread-safe.

    Training one changes no bit of another, and its result does not depend on which others train in between.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: str,
        configs: Mapping[str, LoraConfig],
        build: Callable[[str, PreTrainedModel], LearnerCore],
        *,
        ranks: AnyRanks | None = None,
    ) -> None:
        """Add one adapter for each of ``configs`` to ``model``, which must have none yet, and build its learner.
        ``base`` is the directory of ``model``. ``build`` makes the learner of a name, while its adapter is the active
        one. ``ranks`` are the processes over which ``model`` is sharded, which must all do the same, and to which
        ``build`` gives each learner; ``None`` for a single process."""
        ranks = ranks or SingleRank(model.device)
        for config in configs.values():
            ranks.config.refuse_settings(ModelConfig(path=base, lora=config))
        with adding(model, base, ranks):
            for name, config in configs.items():
                add_adapter(model, config, base, name)
        if isinstance(ranks, Ranks):
            measure_norms(model, [name for name, each in configs.items() if each.use_dora and each.adapter is None])
        self._model = model
        self._cores: dict[str, LearnerCore] = {}
        for name in configs:
            with active(model, name):
                self._cores[name] = build(name, model)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the learners, in the order of ``configs``."""
        return tuple(self._cores)

    @contextmanager
    def on(self, name: str) -> Iterator[LearnerCore]:
        """Yield the learner of ``name``, which may be used inside the ``with`` block only: train, logprobs, save,
        restore.

        Inside the block, :func:`~headrace.models.weights.weight_tensors` of the model returns the tensors of that
        adapter, which are to be published.
        """
        with active(self._model, name):
            yield self._cores[name]
