"""From settings to a model that can be served."""

from __future__ import annotations

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError
from headrace.base.types.versions import INITIAL
from headrace.engine.native import NativeEngine
from headrace.engine.native.fixed import LoadedWeights
from headrace.models.devices import use
from headrace.models.endings import stop_ids
from headrace.models.hub import called
from headrace.models.load import context_length, load_model, load_tokenizer
from headrace.models.paged.base import BLOCK
from headrace.models.weights import model_bytes
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.config import ServeConfig
from headrace.wings.serve.run import Loaded


def load(config: ServeConfig, *, clock: Clock) -> Loaded:
    """Read tokenizer and model, and make an engine whose version is 0. Raises :class:`~headrace.base.errors.ModelError`
    and
    :class:`~headrace.base.errors.ConfigError`."""
    path, engine = config.model.path, config.engine
    engine.refuse_server("headrace serve")
    device = str(use("engine.device", engine.device, only_cpu=config.model.deterministic))
    tokenizer = load_tokenizer(path)
    words = ServedTokenizer(tokenizer, stop_ids(path, tokenizer.eos_token_id))
    max_context = engine.max_context or context_length(path)
    name, agents = model_name(config), config.model.adapter_agents
    if name in agents:
        raise ConfigError(
            f"the model and an agent of model.lora.agents are both called {name!r}",
            remedy="give the model another name: serve.name",
        )
    model = load_model(config.model, device)
    core = NativeEngine(
        model,
        engine.on(device, shared=False),
        max_context=max_context,
        receiver=LoadedWeights(),
        clock=clock,
        decode=words.decode_all,
    )
    core.commit(INITIAL)
    fits = min(max_context, core.stats().cache_blocks * BLOCK)
    facts = {"device": device, "weights_bytes": model_bytes(model), **core.facts()}
    return Loaded(core=core, words=words, name=name, agents=agents, max_context=fits, facts=facts)


def model_name(config: ServeConfig) -> str:
    """What clients call the model."""
    return config.serve.name or called(config.model.path) or "model"
