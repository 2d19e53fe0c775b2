"""A dry run: the resolved settings, and what they mean in words."""

from __future__ import annotations

import json

from headrace.environ import num_cores
from headrace.launch.config import threads
from headrace.session.prepare import Prepared


def explain(prepared: Prepared) -> str:
    """The settings as TOML-like lines, then a paragraph about what will happen."""
    config = prepared.config
    lines: list[str] = []
    for section, settings in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in settings.items()]
        lines.append("")
    flow, cores = config.flow, num_cores()
    episodes = flow.groups_per_step * flow.group_size
    epochs = config.run.steps * flow.groups_per_step / len(prepared.tasks)
    pace = "generation and training take turns" if flow.max_age == 0 else (
        f"generation runs up to {flow.effective_lead} batches ahead; no token is trained at an age over {flow.max_age}"
    )  # fmt: skip
    lines += [
        f"{len(prepared.tasks)} tasks, {len(prepared.eval_tasks)} held out; {config.run.steps} steps of "
        f"{flow.groups_per_step} groups × {flow.group_size} = {episodes} episodes a step, {epochs:.3g} epochs.",
        f"Up to {config.engine.max_new_tokens} new tokens, {prepared.max_context} with the prompt; {pace}.",
        f"Engine: {threads(config.launch.engine_threads, cores)} threads; learner: "
        f"{threads(config.launch.learner_threads, cores)} threads; this machine has {cores} cores.",
    ]
    return "\n".join(lines)


def _value(value: object) -> str:
    return "(unset)" if value is None else json.dumps(value, ensure_ascii=False)
