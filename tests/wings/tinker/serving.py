"""A server in a thread of the test's process, and the real client beside it."""

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.clock import RealClock
from headrace.engine.config import EngineConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.tinker.config import BaseConfig, TinkerConfig
from headrace.wings.tinker.run import TinkerServer, bind, read_or_create_key

NAME, WHOLE = "Qwen/Qwen3-8B", "whole/model"
VOCAB = "abcdefghijklmnopqrstuvwxyz0123456789 +-=?"
KEY = "tml-test"


def tiny(directory: Path, **more: Any) -> Path:
    return make_tiny(directory, TinySpec(vocab=VOCAB, hidden_size=32, num_layers=2, max_positions=256, **more))


def settings(
    model: Path,
    state: Path,
    *,
    name: str = NAME,
    alias: str = "",
    others: Mapping[str, Path] | None = None,
    **more: Any,
) -> TinkerConfig:
    """Return the settings of a server of ``model``, which has the name ``alias`` too if one is given, and of ``others``
    under their names; that named :data:`WHOLE` trains all its weights."""
    engine = EngineConfig(max_sequences=16)
    named = {name: model, **(others or {})}
    names = {each: (each, alias) if alias and path == model else (each,) for each, path in named.items()}
    bases = tuple(BaseConfig(path=path, names=names[each], whole=each == WHOLE) for each, path in named.items())
    return replace(TinkerConfig(bases=bases, state=state, port=0, engine=engine), **more)


@contextmanager
def served(model: Path, state: Path, **more: Any) -> Iterator[tuple[str, str]]:
    """Yield the URL and the key of a server."""
    ready, urls, failures = threading.Event(), list[str](), list[BaseException]()
    config = settings(model, state, **more)
    key = read_or_create_key(config.state)

    def serving(url: str) -> None:
        urls.append(url)
        ready.set()

    server = TinkerServer(config, key, RealClock(), serving)

    def run() -> None:
        try:
            with bind(config.host, config.port) as listening:
                asyncio.run(server.run(listening))
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the test raises it
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        if failures:
            raise failures[0]
        yield urls[0], key
    finally:
        server.stop()
        thread.join(60)
    if failures:
        raise failures[0]


def client(url: str, key: str) -> Any:
    import tinker

    os.environ["TINKER_TELEMETRY"] = "0"
    return tinker.ServiceClient(base_url=url, api_key=key)


def datum(ids: list[int], **inputs: Any) -> Any:
    """Return a datum whose targets are the next tokens, with weight 1 unless ``inputs`` say otherwise."""
    from tinker import types

    given = {"target_tokens": np.array(ids[1:]), **inputs}
    if len(given) == 1:
        given["weights"] = np.ones(len(ids) - 1, np.float32)
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def free_connections() -> None:
    """Free what clients that are not used any more left open: a client never closes the connection of its first
    request, and the warning of it would be taken for another test's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
