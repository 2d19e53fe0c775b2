"""The embedded engine (``engine.kind = "native"``) as a kind of engine, and its construction from settings and a model
directory.

This module is imported whenever a run file is read, so its functions import torch and the engine only when an engine is
opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, ModelError
from headrace.base.types.weights import Interrupt
from headrace.engine.capabilities import Capabilities
from headrace.engine.config import EngineKind, EngineSetup, OpenedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headrace.engine.native.masks import MaskMaker


@contextmanager
def _open_native(setup: EngineSetup) -> Iterator[OpenedEngine]:
    """Load the model that ``setup`` describes and construct its engine, which stays open within the context. This is
    the ``open`` function of the kind ``native``.

    Raises :class:`~headrace.base.errors.ConfigError` if the batch or its cache does not fit the memory.
    """
    from headrace.engine.native.engine import NativeEngine
    from headrace.models.devices import use_device
    from headrace.models.heads import wanted_head
    from headrace.models.load import load_model
    from headrace.models.weights import weight_tensors

    config = setup.config
    device = use_device("engine.device", config.device)
    model = load_model(setup.model, str(device))
    tensors = weight_tensors(model)
    receiver = setup.receive(tensors)
    try:
        core = NativeEngine(
            model,
            config,
            max_context=setup.max_context,
            receiver=receiver,
            clock=RealClock(),
            history=setup.history,
            head=wanted_head(config.speculation, setup.model, model),
            **_tokenizer_arguments(setup.model.path, model),
        )
    except MemoryError as error:
        raise ConfigError(
            f"engine.max_sequences={config.max_sequences} with a context of {setup.max_context} tokens does not fit "
            f"the memory: {error}",
            remedy="lower engine.max_sequences or engine.max_context",
        ) from None
    if setup.own_weights:
        setup.adopt(core, tensors)
    yield OpenedEngine(core=core, device=str(device), address=receiver.address, facts=core.facts())


class _TokenizerArguments(TypedDict, total=False):
    """The optional arguments of the engine that need the model's tokenizer; both are absent if the model has none."""

    decode: Callable[[list[int]], str]
    """Return the text of token ids, special tokens included; the engine finds stop strings in it."""
    masks: MaskMaker
    """Return the mask of a new answer from the description of its structure."""


def _tokenizer_arguments(path: str, model: PreTrainedModel) -> _TokenizerArguments:
    """Load the tokenizer of the model directory ``path``, and return the arguments of the engine that need it: a
    function from ids to text that keeps special tokens, for stop strings, and the maker of masks for structured
    answers. Return an empty dict for a model directory without a tokenizer."""
    from headrace.engine.structure import Grammars
    from headrace.models.endings import stop_ids
    from headrace.models.load import load_tokenizer
    from headrace.models.weights import count_vocabulary

    try:
        tokenizer = load_tokenizer(path)
    except ModelError:
        return {}
    return {
        "decode": lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        "masks": Grammars(tokenizer, count_vocabulary(model), stop_ids(path, tokenizer.eos_token_id)),
    }


NATIVE = EngineKind(
    capabilities=Capabilities(
        interrupts=frozenset(Interrupt),
        truncates=True,
        kept_sets=True,
        routing=True,
        adapters=True,
        max_rank=None,
        any_adapters=True,
        entropies=True,
        scores=True,
        exact_scores=True,
        forks=True,
        reuses_stale=True,
        pins=True,
        seeds=True,
        deterministic=True,
        releases=True,
        embedded=True,
        other_models=True,
        structures=True,
    ),
    open=_open_native,
)
"""The description of the embedded engine."""
