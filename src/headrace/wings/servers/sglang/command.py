"""The command that starts SGLang. An engine runs it, or shows it to a user who starts the server."""

from __future__ import annotations

import json
import secrets
import socket
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.models.devices import CPU
from headrace.models.gpus import VisibleGpus
from headrace.wings.servers.client.kind import get_server_settings
from headrace.wings.servers.client.launching import ServeRequirements, interpreter
from headrace.wings.servers.client.server import Command
from headrace.wings.servers.client.wire import Address


def own_address(directory: Path) -> Address:
    """Return the address for a server that an engine starts: a free port of this machine, and a new key. The server
    reads the key from a file in ``directory``, since its arguments can be read by every user of the machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, file = secrets.token_hex(32), directory / "keys.yaml"
    file.touch(0o600)
    file.write_text(json.dumps({"api-key": token, "admin-api-key": token}), encoding="utf-8")
    return Address(url=f"http://127.0.0.1:{port}", token=token, key_file=str(file))


def command(config: EngineConfig, required: ServeRequirements, address: Address) -> Command:
    """Return the command that starts an SGLang server at ``address``, with the settings ``config`` of the engine, for
    the model and the records in ``required``."""
    settings = {
        "--model-path": required.path,
        "--host": address.host,
        "--port": address.port,
        "--dtype": required.dtype,
        "--context-length": required.max_context,
        "--max-running-requests": config.max_sequences,
        "--chunked-prefill-size": config.max_step_tokens,
        "--random-seed": secrets.randbelow(2**31),  # engines of one fleet must not draw the same
    }
    if config.device == CPU:
        settings["--device"] = CPU
    if config.width > 1:
        settings |= {"--tp-size": config.tensor, "--pp-size": config.pipeline}
    if config.cache_share:
        settings["--mem-fraction-static"] = f"{config.cache_share}"
    shown = (
        ["--api-key", "KEY", "--admin-api-key", "KEY"] if address.token else []
    )  # for display: a server that was found has its key
    key = ["--config", address.key_file] if address.key_file else shown
    argv = [
        *(interpreter(get_server_settings(config)), "-m", "sglang.launch_server"),
        *(str(part) for pair in settings.items() for part in pair),
        *key,
        *("--incremental-streaming-output", "--enable-cache-report"),
        *(["--enable-return-routed-experts"] if required.record_routing else []),
        *(["--enable-memory-saver", "--enable-weights-cpu-backup"] if required.sleeps else []),
        *get_server_settings(config).args,
    ]
    variables = {"SGLANG_USE_MODELSCOPE": "0"}
    if config.device != CPU:
        variables |= VisibleGpus.detect().variable(config.device)
    return Command(argv=argv, variables=variables)
