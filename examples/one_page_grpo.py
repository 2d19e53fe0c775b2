"""Train your own model on your own data with your own reward, on one page.

    python examples/one_page_grpo.py MODEL_DIR

MODEL_DIR is any Hugging Face causal language model (a directory with config.json, tokenizer and safetensors). Without
it, a small random model is made, which learns to answer in capital letters within a minute on two cores.
"""

import sys
import tempfile
from pathlib import Path

import headrace
from headrace.models.tiny import TinySpec, make_tiny

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "
WORDS = ["river", "water", "wheel", "mill", "stone", "flow", "gate", "dam", "pond", "spring"]


def reward(completion: str, word: str) -> float:
    """Return the share of ``completion`` that is in capital letters; columns of the row, such as ``word``, are passed
    by name."""
    return sum(letter.isupper() for letter in completion) / max(1, len(completion))


def main() -> None:
    scratch = Path(tempfile.mkdtemp(prefix="one-page-"))
    model = sys.argv[1] if len(sys.argv) > 1 else make_tiny(scratch / "model", TinySpec(vocab=LETTERS, init_std=0.1))

    rows = [{"prompt": f"say {word} ", "word": word} for word in WORDS]

    config = {
        "model": {"path": str(model)},
        "engine": {"max_new_tokens": 8},
        "flow": {
            "groups_per_step": 8,  # prompts per optimizer step
            "group_size": 8,  # answers to each, which share a baseline
            "max_age": 1,  # generation may run one version ahead of the weights that are trained
        },
        "algo": {
            "loss": "dapo",
            "correction": "tis",  # weighs what slightly older weights sampled
        },
        "learner": {"lr": 1e-3},
        "run": {"steps": 40, "dir": str(scratch / "run")},
    }
    summary = headrace.train(config, data=rows, eval_data=rows, reward=reward)

    print(f"mean reward {summary.eval_before:.2f} -> {summary.eval_after:.2f}")
    print(f"engine idle {summary.engine_idle_frac:.0%}, learner idle {summary.learner_idle_frac:.0%}")
    print(f"the model is in {summary.run_dir}/checkpoints, the report in {summary.run_dir}/report")


if __name__ == "__main__":  # the reward runs in a process of its own, which imports this file
    main()
