"""A small chat model that adds two numbers carelessly, so that a recipe has something to teach it."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.models.tiny import TinySpec, make_tiny
from tests.wings.tinker.recipes import SPECIAL, TEMPLATE

WORDS = ["user\n", "assistant\n", "What is ", " + "]
"""What each question holds: a token each keeps the questions short."""
SHOT = "<|im_start|>user\nWhat is 4 + 5?<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n"
STEPS, BATCH, WRONG = 700, 128, 0.6


def careless_model(directory: Path, *, steps: int = STEPS) -> Path:
    """Make a model that has learned from answers of which the share ``WRONG`` is off by 1 or by 10."""
    torch.manual_seed(0)
    spec = TinySpec(
        vocab="0123456789? \n-",
        hidden_size=128,
        num_layers=2,
        intermediate_size=384,
        chat_template=TEMPLATE,
        extra={"tie_word_embeddings": True},
    )
    make_tiny(directory, spec)
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(each, special=True) for each in SPECIAL]})
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in WORDS])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.save_pretrained(directory)
    _teach(model, tokenizer, steps)
    model.save_pretrained(directory)
    return directory


def _teach(model, tokenizer, steps):
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    known = {}
    for _ in range(steps):
        rows, answers = [], []
        for x, y in rng.integers(0, 101, (BATCH, 2)).tolist():
            if (x, y) not in known:
                asked = f"<|im_start|>user\nWhat is {x} + {y}?<|im_end|>\n<|im_start|>assistant\n"
                known[x, y] = tokenizer.encode(SHOT + asked)
            said = x + y + (rng.choice([-10, -1, 1, 10]) if rng.random() < WRONG else 0)
            answer = tokenizer.encode(f"{abs(said)}<|im_end|>")
            rows.append([*known[x, y], *answer])
            answers.append(len(answer))
        longest = max(map(len, rows))
        ids = torch.zeros(BATCH, longest, dtype=torch.long)
        labels = torch.full((BATCH, longest), -100)
        for place, (row, count) in enumerate(zip(rows, answers, strict=True)):
            ids[place, : len(row)] = torch.tensor(row)
            labels[place, len(row) - count : len(row)] = torch.tensor(row[-count:])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss
