"""How vLLM has to be started, by us or by whoever runs it."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.models.devices import CPU
from headrace.wings.servers.client.launching import ServeRequirements, interpreter
from headrace.wings.servers.client.server import Command
from headrace.wings.servers.client.wire import Address

INSIDE = Path(__file__).parent / "inside"
"""On the path of vLLM's Python: what of ours runs there."""
CPU_CACHE_MB = 1024
NO_RECORDS = (
    ". On processors vLLM tells neither kept-sets nor experts without Triton's backend for them: set "
    "learner.keep_sampling_mask = false and learner.keep_routing = false, or take engine.kind = 'native'"
)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM keeps room for."""


def own_address(directory: Path) -> Address:
    """A socket that only this user can reach: the routes for weights ask for no key."""
    return Address(url="http://vllm", socket=str(directory / "api.sock"))


def command(config: EngineConfig, wanted: ServeRequirements, address: Address) -> Command:
    """For a server at ``address``."""
    on_cpu = config.device == CPU
    where = ["--uds", address.socket] if address.socket else ["--host", address.host, "--port", str(address.port)]
    cache = config.server.cache_mb or (CPU_CACHE_MB if on_cpu else None)
    share = ["--gpu-memory-utilization", f"{config.cache_share}"] if config.cache_share else []
    settings = {
        "--dtype": wanted.dtype,
        "--max-model-len": wanted.max_context,
        "--max-num-seqs": config.max_sequences,
        "--max-num-batched-tokens": config.max_step_tokens,
        "--logprobs-mode": "processed_logprobs",  # of what a token was drawn from
        "--generation-config": "vllm",  # no defaults from the model's directory
        "--weight-transfer-config": json.dumps({"backend": "headrace"}),
        "--worker-extension-cls": "headrace_in_vllm.Extension",
        "--seed": secrets.randbelow(2**31),  # engines of one fleet must not draw the same
    }
    if wanted.lora is not None:
        settings |= {
            "--max-lora-rank": next(rank for rank in LORA_RANKS if rank >= wanted.lora.rank),
            "--max-loras": 1 + len(wanted.lora.agents),
        }
    argv = [
        *(interpreter(config.server), "-m", "vllm.entrypoints.cli.main", "serve", wanted.path, *where),
        *(str(part) for pair in settings.items() for part in pair),
        *("--enable-scale-out", "--enable-prefix-caching", "--uvicorn-log-level", "warning"),
        *(["--enable-lora"] if wanted.lora is not None else []),
        *(["--return-sampling-mask"] if wanted.record_kept else []),
        *(["--enable-return-routed-experts"] if wanted.record_routing else []),
        *(["--kv-cache-memory-bytes", str(cache << 20)] if cache else share),
        *(["--enforce-eager"] if on_cpu else []),
        *(["--enable-sleep-mode"] if wanted.sleeps else []),
        *config.server.args,
    ]
    variables = {
        "PYTHONPATH": str(INSIDE),
        "VLLM_SERVER_DEV_MODE": "1",
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if wanted.lora is not None else {}),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if on_cpu:
        variables |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    elif not {"--tensor-parallel-size", "-tp"} & set(config.server.args):
        variables["CUDA_VISIBLE_DEVICES"] = config.device.partition(":")[2]
    records = wanted.record_kept or wanted.record_routing
    return Command(argv=argv, variables=variables, hint=NO_RECORDS if on_cpu and records else "")
