"""A small chat model, rows for it, and runs on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from headrace.models.tiny import TinySpec, make_tiny

VOCAB = "abcdefghijklmnopqrstuvwxyz0123456789+=? <>"
PLAIN = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that does not mark the assistant's turns."""
MARKED = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The same conversations, with marks."""
FORGETFUL = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content[-1:] }}{% else %}{{ m.content }}{% endif %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that shortens the turns of the assistant before the last, as those of reasoning models do."""


def chat_model(directory: Path, template: str = PLAIN, **spec: Any) -> Path:
    settings = {"hidden_size": 32, "intermediate_size": 48, "init_std": 0.2, "chat_template": template, **spec}
    return make_tiny(directory, TinySpec(vocab=VOCAB, **settings))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sums, some of them in two turns."""
    rng = Random(seed)
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.choice([1, 1, 2])):
            a, b = rng.randrange(100), rng.randrange(100)
            messages += [turn("user", f"{a}+{b}="), turn("assistant", str(a + b))]
        rows.append({"messages": messages})
    return rows


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randrange(100), rng.randrange(100)
        wrong = str(a + b + 1 + rng.randrange(200)) + "?" * rng.randrange(3)
        rows.append({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": wrong})
    return rows


def ratings(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = pairs(count, seed)
    return [
        {"prompt": row["prompt"], "completion": row["rejected" if place % 3 else "chosen"], "label": place % 3 == 0}
        for place, row in enumerate(rows)
    ]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(model_dir: Path, run_dir: Path, /, **sections: Any) -> dict[str, Any]:
    """A run file as a tree: no output, no report, one thread."""
    tree: dict[str, Any] = {
        "model": {"path": str(model_dir)},
        "learner": {"lr": 1e-3},
        "run": {"dir": str(run_dir), "rows_per_step": 4, "threads": 1},
        "observe": {"view": "none", "report": False},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return tree
