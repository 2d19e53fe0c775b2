"""The construction of an embedded engine from its settings and a model directory."""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, ModelError
from headrace.engine.config import EngineSetup, OpenedEngine
from headrace.engine.native.engine import NativeEngine
from headrace.models.devices import use
from headrace.models.load import load_model, load_tokenizer
from headrace.models.weights import weight_tensors


def opened(setup: EngineSetup) -> OpenedEngine:
    """Load the model and construct its engine.

    Raises :class:`~headrace.base.errors.ConfigError` if the batch or its cache does not fit the memory.
    """
    config = setup.config
    device = use("engine.device", config.device)
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
            decode=_decoder(setup.model.path),
        )
    except MemoryError as error:
        raise ConfigError(
            f"engine.max_sequences={config.max_sequences} with a context of {setup.max_context} tokens does not fit "
            f"the memory: {error}",
            remedy="lower engine.max_sequences or engine.max_context",
        ) from None
    if setup.own_weights:
        setup.adopt(core, tensors)
    return OpenedEngine(core=core, device=str(device), address=receiver.address, facts=core.facts())


def _decoder(path: str) -> Callable[[list[int]], str] | None:
    """Return a function from ids to text that keeps special tokens, for stop strings; ``None`` for a model directory
    without a tokenizer."""
    try:
        tokenizer = load_tokenizer(path)
    except ModelError:
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
