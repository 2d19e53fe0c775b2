"""Several adapters in training on one frozen base.

    base ──┬── adapter a ── LearnerCore a: gradient, optimizer, version
           └── adapter b ── LearnerCore b

One of them at a time computes and is trained. Beyond its adapter and its optimizer's moments a learner costs no memory:
the base is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from transformers import PreTrainedModel

from headrace.learner.core import LearnerCore
from headrace.models import LoraConfig
from headrace.models.lora import active, add_adapter


class Adapters:
    """Named learners, each over its own adapter of ``model``. Not thread-safe.

    Training one changes no bit of another, and what becomes of one does not depend on which others train in between.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: str,
        configs: Mapping[str, LoraConfig],
        build: Callable[[str, PreTrainedModel], LearnerCore],
    ) -> None:
        """``base``: the directory of ``model``, which has no adapter yet; ``build`` makes the learner of a name, while
        its adapter is the active one."""
        for name, config in configs.items():
            add_adapter(model, config, base, name)
        self._model = model
        self._cores: dict[str, LearnerCore] = {}
        for name in configs:
            with active(model, name):
                self._cores[name] = build(name, model)

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were given."""
        return tuple(self._cores)

    @contextmanager
    def on(self, name: str) -> Iterator[LearnerCore]:
        """The learner of ``name``, to be used inside the ``with`` block only: train, logprobs, save, restore.

        Inside, :func:`~headrace.models.weights.weight_tensors` of the model are that adapter's, to be published.
        """
        with active(self._model, name):
            yield self._cores[name]
