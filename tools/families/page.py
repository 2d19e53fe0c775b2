"""The rows of docs/models.md and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LONGEST = 64
"""Longest sequence of the comparisons, in tokens: beyond the windows of the tiny models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result for one architecture."""

    verdict: str
    """``works``, ``refused``, ``fails``, or ``not tried`` if no tiny model could be made."""
    reason: str = ""
    """Why it does not work; for one that works, its limits."""
    gap: str = ""
    """Largest |Δ logprob| of engine or learner and transformers, in nats."""


def list_kinds() -> list[str]:
    """Return the model types of the installed transformers that generate text: causal language models, and multimodal
    models with one."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def make_row(kind: str, directory: Path) -> dict[str, str]:
    """Make a tiny model of ``kind`` in ``directory``, check it, and return its row."""
    import torch
    from transformers.utils import logging

    from headrace.policy.model_check import check_model
    from tools.families.tiny import write_model

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        write_model(directory, kind)
    except Exception as error:  # noqa: BLE001 - a foreign architecture may raise anything
        return {"verdict": "not tried", "reason": _short(f"no tiny model: {type(error).__name__}: {error}")}
    try:
        report = check_model(str(directory), longest=LONGEST, whole=False)
    except Exception as error:  # noqa: BLE001 - as above
        return {"verdict": "fails", "reason": _short(f"{type(error).__name__}: {error}")}
    gaps = [finding.gap for finding in report.findings if finding.gap is not None and finding.part != "pack"]
    reason = _short(report.reason.replace(str(directory), "DIR")) or limits(str(directory), report.facts)
    return {"verdict": report.verdict, "reason": reason, "gap": f"{max(gaps):.0e}" if gaps else ""}


def settings_refusal(kind: str, directory: Path) -> str:
    """Return why the default settings of ``kind`` are refused; empty if they are not. Files are written into
    ``directory``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from headrace.base.errors import ModelError
    from headrace.models.load import _refuse_unsupported
    from headrace.models.settings import read_config

    try:
        CONFIG_MAPPING[kind]().save_pretrained(directory)
        _refuse_unsupported(str(directory), read_config(str(directory)))
    except ModelError as error:
        return _short(error.problem.removeprefix(f"model.path={str(directory)!r} "))
    except Exception:  # noqa: BLE001 - a config without defaults
        return ""
    return ""


def limits(path: str, facts: Mapping[str, str]) -> str:
    """Return the limits of the model in ``path``, which works, in words. ``facts`` are the results of its check."""
    from headrace.base.errors import ModelError
    from headrace.models.mixtures import is_mixture, routes
    from headrace.models.rope import BY_LENGTH, rope_types
    from headrace.models.settings import read_config, read_whole_config

    config, limitations = read_config(path), []
    if type(read_whole_config(path)) is not type(config):
        limitations.append(f"text only ({config.model_type}); one learner rank")
    try:
        if routes(config):
            limitations.append("routing is replayed")
    except ModelError:
        if is_mixture(config):
            limitations.append("routing is not replayed")
    if any(kind in BY_LENGTH for kind, _ in rope_types(config)):
        limitations.append("up to the original context")
    if not hasattr(type(config)(), "max_position_embeddings"):
        limitations.append("config.json must say max_position_embeddings")
    if "deterministic" in facts.get("kernels", ""):
        limitations.append(facts["kernels"])
    return "; ".join(limitations)


MIXTURES = """
## Prediction heads

Layers behind a model's own that predict later tokens (multi-token prediction) are not trained. Snapshots and exports of
text models contain them as they are in the checkpoint. The embedded engine drafts from those of `deepseek_v3`,
`glm4_moe` and `qwen2` (MiMo) with `engine.speculation = "heads"`; see [engines.md](engines.md#prediction-heads). Every
other family runs without them.

## Mixtures of experts

The experts that computed a token in the engine are recorded and replayed where the table does not say otherwise
(`learner.keep_routing`). Which formula a router weighs them by is found when a model is loaded: another router of its
class, of random weights, must give what the formula gives, bit for bit, in three precisions. So a family that is not in
this table is replayed too if its formula is one of those that are known (softmax or sigmoid, of all experts or of the
chosen ones, divided by their sum or not, and scaled); otherwise it is refused by name.

A mixture can be kept evenly used while it is trained:

```toml
[learner.mixture]
balance_coef = 0.001       # the load-balancing loss, as transformers defines it
z_coef = 0.001             # the router's z-loss, which keeps its logits small
bias_rate = 0.001          # for routers that choose by a bias (DeepSeek-V3): how far each update moves it
```

The losses are of the whole step, however it is packed and cut into micro-batches, and of data-parallel ranks together;
the choices that count are the replayed ones. `balance_coef` is for families for which transformers defines the loss
(Mixtral, Qwen 2 to 3.5, OLMoE, gpt-oss, Granite, Ernie 4.5, Laguna, MiniMax-M2, ...); where a router chooses by a bias
as well, the loss counts the experts of its largest logits, as transformers does. `bias_rate` is for families with a
correction bias of their own (DeepSeek-V3, GLM-4.5, Ernie 4.5, Laguna, ...): after each update, the bias of an expert
that was chosen less than the mean of its layer rises by `bias_rate`, and falls if it was chosen more. Biases are part
of a version: they are published, kept in snapshots and copied with the weights. What a family lacks is refused by name,
and so are all three with `learner.parallel.context` or `tensor` above 1, and `bias_rate` with an adapter. The metrics
`expert_load_max`, `expert_load_min` and `experts_idle` say how evenly experts are used, with the losses or without (not
with `learner.parallel.context` or `tensor` above 1), `balance_loss` and `router_z_loss` what the losses are before
their coefficients, and `expert_bias_spread` how far the biases have moved apart.
"""
"""What the page says behind the table."""


def page(rows: Mapping[str, Row]) -> str:
    """Return the text of docs/models.md, with ``rows`` by architecture."""
    from importlib.metadata import version

    works = [kind for kind, row in rows.items() if row.verdict == "works"]
    lines = [
        "# Models",
        "",
        "<!-- written by python -m tools.families: do not edit -->",
        "",
        f"Every architecture of transformers {version('transformers')} that generates text, made as a tiny random "
        "model and compared with transformers' own plain pass: alone, packed, scored by the engine, and as the engine "
        f"samples it. {len(works)} of {len(rows)} work. Training, publication and export of one model of yours are "
        "tried by `headrace check model DIR`.",
        "",
        "*refused* means by name and with the reason, before anything is computed: at load, or when an engine starts. "
        "No model is computed differently in silence: where the comparison fails, the model is refused. *Not tried* "
        "means that the script could make no tiny model of it; `headrace check model DIR` tries one of yours.",
        "",
        "The gap is the largest |Δ logprob| in nats, in float32. *Text only* is the text part of a multimodal "
        "checkpoint: it is trained by itself, and `headrace export` writes it back into the checkpoint, with all "
        "other weights bit for bit.",
        "",
        "Sequences of the comparison have at most 64 tokens. Layers with the delta rule (`qwen3_5_text`, `qwen3_next`, "
        "`olmo_hybrid`) carry rounding on from token to token: over 1,500 tokens the compiled kernels of random models "
        "differ from transformers' float32 by up to 5e-4 at single tokens, and transformers' float32 from float64 by "
        'as much; `engine.kernels = "off"` stays within 1e-5. On several learner ranks, models whose layers '
        "transformers cannot shard (as `gpt2`), whose trunk is not called as a whole (as `opt`), or whose tensors lie "
        "in parts in their files (as `olmo_hybrid`), are refused at load.",
        "",
        "| model type | | gap | limits, or the reason |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{kind}` | {row.verdict} | {row.gap} | {row.reason} |" for kind, row in sorted(rows.items())]
    return "\n".join(lines) + "\n" + MIXTURES


def _short(text: str) -> str:
    """Return the first line of ``text`` without what differs between two runs or breaks a table."""
    line = " ".join(text.strip().split("\n", 1)[0].replace("|", "/").split())
    return line if len(line) <= 240 else f"{line[:237]}..."
