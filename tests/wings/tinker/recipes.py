"""What the cookbook's recipes need on a machine without a network: a small model and small data, under their names."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.models.tiny import TinySpec, make_tiny

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def chat_model(directory: Path, **more) -> Path:
    """Make a model with the special tokens of Qwen3's chats, one token for each character beside them."""
    spec = TinySpec(vocab=string.printable, max_positions=4096, chat_template=TEMPLATE, **more)
    make_tiny(directory, spec)
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(each, special=True) for each in SPECIAL]})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def data_set(directory: Path, configs: dict[str, dict[str, list[dict]]]) -> None:
    """Write rows as jsonl, with the README that ``datasets`` reads for the names of configurations and splits."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            file = directory / config / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (directory / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def prepare(directory: Path) -> None:
    """Fill a directory in which the recipes run."""
    chat_model(directory / "Qwen" / "Qwen3-8B")
    sums = [{"question": f"What is {a} + 2?", "answer": f"We add.\n#### {a + 2}"} for a in range(32)]
    data_set(directory / "openai" / "gsm8k", {"main": {"train": sums, "test": sums[:4]}})
    rows = [
        {
            "prompt": "Say hi",
            "prompt_id": str(place),
            "category": "Chat",
            "messages": [{"role": "user", "content": f"Say hi {place}"}, {"role": "assistant", "content": "hi there"}],
        }
        for place in range(40)
    ]
    data_set(directory / "HuggingFaceH4" / "no_robots", {"default": {"train": rows, "test": rows[:4]}})
