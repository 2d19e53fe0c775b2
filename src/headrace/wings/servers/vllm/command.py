"""The command that starts vLLM. An engine runs it, or shows it to a user who starts the server."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.models.devices import CPU
from headrace.models.gpus import VisibleGpus
from headrace.wings.servers.client.kind import get_server_settings
from headrace.wings.servers.client.launching import ServeRequirements, interpreter
from headrace.wings.servers.client.server import Command
from headrace.wings.servers.client.wire import Address

INSIDE = Path(__file__).parent / "inside"
"""Folder with the modules that run inside vLLM; it is put on the path of vLLM's Python."""
CPU_CACHE_MB = 1024
"""Size of the key-value cache on processors in MiB, unless ``engine.server.cache_mb`` is set."""
NO_RECORDS = (
    ". On processors vLLM tells neither kept-sets nor experts without Triton's backend for them: set "
    "learner.keep_sampling_mask = false and learner.keep_routing = false, or set engine.kind to 'native'"
)
"""Advice for a server on processors that must report kept-sets or experts and exits before it serves."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for ``--max-lora-rank``."""


def own_address(directory: Path) -> Address:
    """Return the address for a server that an engine starts: a Unix socket in ``directory`` that only this user can
    open, since vLLM's routes for weights need no key."""
    return Address(url="http://vllm", socket=str(directory / "api.sock"))


def command(config: EngineConfig, required: ServeRequirements, address: Address) -> Command:
    """Return the command that starts a vLLM server at ``address``, with the settings ``config`` of the engine, for the
    model, the adapters and the records in ``required``."""
    on_cpu = config.device == CPU
    where = ["--uds", address.socket] if address.socket else ["--host", address.host, "--port", str(address.port)]
    cache = get_server_settings(config).cache_mb or (CPU_CACHE_MB if on_cpu else None)
    share = ["--gpu-memory-utilization", f"{config.cache_share}"] if config.cache_share else []
    settings = {
        "--dtype": required.dtype,
        "--max-model-len": required.max_context,
        "--max-num-seqs": config.max_sequences,
        "--max-num-batched-tokens": config.max_step_tokens,
        "--logprobs-mode": "processed_logprobs",  # logprobs of the distribution that tokens are drawn from
        "--generation-config": "vllm",  # no defaults from the model's directory
        "--weight-transfer-config": json.dumps({"backend": "headrace"}),
        "--worker-extension-cls": "headrace_in_vllm.Extension",
        "--seed": secrets.randbelow(2**31),  # engines of one fleet must not draw the same
    }
    if required.lora is not None:
        settings |= {
            "--max-lora-rank": next(rank for rank in LORA_RANKS if rank >= required.lora.rank),
            "--max-loras": 1 + len(required.lora.agents),
        }
    argv = [
        *(interpreter(get_server_settings(config)), "-m", "vllm.entrypoints.cli.main", "serve", required.path, *where),
        *(str(part) for pair in settings.items() for part in pair),
        *("--enable-scale-out", "--enable-prefix-caching", "--uvicorn-log-level", "warning"),
        *(["--enable-lora"] if required.lora is not None else []),
        *(["--return-sampling-mask"] if required.record_kept else []),
        *(["--enable-return-routed-experts"] if required.record_routing else []),
        *(["--kv-cache-memory-bytes", str(cache << 20)] if cache else share),
        *(["--enforce-eager"] if on_cpu else []),
        *(["--tensor-parallel-size", str(config.tensor)] if config.tensor > 1 else []),
        *(["--pipeline-parallel-size", str(config.pipeline)] if config.pipeline > 1 else []),
        *(["--enable-sleep-mode"] if required.sleeps else []),
        *get_server_settings(config).args,
    ]
    variables = {
        "PYTHONPATH": str(INSIDE),
        "VLLM_SERVER_DEV_MODE": "1",
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if required.lora is not None else {}),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if on_cpu:
        variables |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        variables |= VisibleGpus.detect().variable(config.device)
    records = required.record_kept or required.record_routing
    return Command(argv=argv, variables=variables, hint=NO_RECORDS if on_cpu and records else "")
