"""What the cookbook's recipes need on a machine without a network: a small model and small data, under their names; and
a process that runs them.

A recipe runs as ``python -m`` runs it. What all of them import takes longer than a short recipe itself, so that one
process imports it, and forks for each.
"""

import importlib
import json
import os
import runpy
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
            "prompt_id": str(index),
            "category": "Chat",
            "messages": [{"role": "user", "content": f"Say hi {index}"}, {"role": "assistant", "content": "hi there"}],
        }
        for index in range(40)
    ]
    data_set(directory / "HuggingFaceH4" / "no_robots", {"default": {"train": rows, "test": rows[:4]}})


ROOT = Path(__file__).parents[3]
COMMON = ("datasets", "tinker_cookbook.rl.train", "tinker_cookbook.supervised.train", "tinker_cookbook.renderers")
"""The modules that are imported before the first fork."""


class Recipes:
    """A process that runs recipes in ``directory``, one after the other."""

    def __init__(self, forking: subprocess.Popen[str], directory: Path) -> None:
        self._forking, self._directory = forking, directory

    def run(self, module: str, options: Sequence[str]) -> tuple[int, str]:
        """Run ``python -m module *options``; return its exit status, and what it printed."""
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        output = self._directory / "output.txt"
        self._forking.stdin.write(json.dumps([module, list(options), str(output)]) + "\n")
        self._forking.stdin.flush()
        return int(self._forking.stdout.readline()), output.read_text(encoding="utf-8")


@contextmanager
def recipes(directory: Path, environment: Mapping[str, str]) -> Iterator[Recipes]:
    """Yield the process that runs recipes; it ends with the context."""
    command = [sys.executable, "-m", "tests.wings.tinker.recipes"]
    own = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=directory, env=own, **pipes) as forking:
        try:
            yield Recipes(forking, directory)
        finally:
            forking.kill()


def main() -> None:
    """Fork for each line of the standard input, which names a module, its options, and the file of its output; print
    its exit status."""
    for name in COMMON:
        importlib.import_module(name)
    for line in sys.stdin:
        module, options, output = json.loads(line)
        pid = os.fork()
        if pid == 0:
            with Path(output).open("w", encoding="utf-8") as written:
                os.dup2(written.fileno(), 1)
                os.dup2(written.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = [module, *options]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
