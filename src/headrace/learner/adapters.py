"""Several learners that train separate adapters of one frozen base model.

    base ──┬── adapter a ── LearnerCore a: gradient, optimizer, version
           └── adapter b ── LearnerCore b

One adapter at a time is active, in forward passes and in training. The base model is in memory once, so each further
learner needs only the memory of its adapter and of its optimizer's moments.
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
    """A collection of learners by name, each with its own adapter of ``model``. It is not thread-safe.

    Training one adapter changes no bit of another adapter, and its result does not depend on steps of other adapters in
    between.
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
        ``base`` is the directory of ``model``. ``build`` creates the learner for a name; it is called while that
        adapter is active. ``ranks`` are the processes over which ``model`` is sharded, which must make the same calls;
        ``build`` must pass the same ranks to each learner. ``None``: a single process."""
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
        """The learner of each adapter, by name."""
        for name in configs:
            with active(model, name):
                self._cores[name] = build(name, model)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the learners, in the order of ``configs``."""
        return tuple(self._cores)

    @contextmanager
    def on(self, name: str) -> Iterator[LearnerCore]:
        """Return a context that yields the learner ``name`` while its adapter is active. The learner may be used only
        inside the context (train, logprobs, save, restore).

        Inside the context, :func:`~headrace.models.weights.weight_tensors` of the model returns the tensors of that
        adapter, for publishing.
        """
        with active(self._model, name):
            yield self._cores[name]
