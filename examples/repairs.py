"""Small repair tasks for an agent in a shell, with a model that can learn them on two cores.

    python examples/repairs.py runs/repairs
    headrace train examples/repairs.toml

Each task is a directory in the form of Harbor: a shell program of three lines that compute nothing yet, each with a
comment that says what is wanted. The agent repairs them one after the other with the command ``fix KIND``; a line that
was repaired in the wrong way stays so. The tests run the program. Only a program that is right in all lines earns
something, so that most first episodes fail: branches from within them (``flow.pivots``) continue in the world, and
behind the tokens, of a moment before the failure, and are compared with each other.
"""

import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.models.tiny import EOS, PAD, UNK, TinySpec, make_tiny

KINDS = {"adds": ("a", "n + 3"), "doubles": ("d", "n * 2"), "negates": ("n", "-n")}
"""What a line may be meant to do: the letter of its repair, and the expression that does it."""
LINES = 3
TOML = """version = "1.0"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 30.0
"""
DOCKERFILE = """FROM scratch
WORKDIR /app
COPY . /app/
ENV PATH=/app/bin:/usr/local/bin:/usr/bin:/bin
RUN rm -f Dockerfile
"""
FIX = """#!/bin/bash
# fix KIND: repair the first line that does nothing yet, and print what the next one wants.
case $1 in
a) with='n + 3' ;;
d) with='n * 2' ;;
n) with='-n' ;;
*) echo '?'; exit 2 ;;
esac
sed -i "0,/((n))/s//((${with}))/" /app/program.sh
wants=$(grep -m 1 '((n))' /app/program.sh)
echo "${wants:+${wants##*# }}"
"""
TEST = """#!/bin/bash
for n in 0 1 5 11; do
    [ "$(bash /app/program.sh $n)" = "$(bash /tests/expected.sh $n)" ] || exit 0
done
echo 1 > /logs/verifier/reward.txt
"""
TEMPLATE = (
    "{%- for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %}\n{% endif %}{% endfor %}"
)


def make_program(wanted, repaired):
    """Return a shell program of one line for each kind in ``wanted``: it does what is wanted if it is ``repaired``, and
    nothing otherwise."""
    lines = [f"n=$(({KINDS[kind][1] if repaired else 'n'})) # {kind}" for kind in wanted]
    return "\n".join(["#!/bin/bash", "n=$1", *lines, "echo $n", ""])


def write_task(directory, wanted):
    """Write the task to repair a program with the kinds of lines ``wanted`` into ``directory``."""
    files = {
        "task.toml": TOML,
        "instruction.md": f"{wanted[0]}\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/program.sh": make_program(wanted, repaired=False),
        "environment/bin/fix": FIX,
        "tests/test.sh": TEST,
        "tests/expected.sh": make_program(wanted, repaired=True),
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)  # COPY keeps modes, as in docker


def write_model(directory):
    """Write a model with random weights into ``directory``. Its tokenizer is one of bytes, as the form of answers
    needs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spec = TinySpec(vocab="".join(alphabet), hidden_size=64, num_layers=2, max_positions=128)
    make_tiny(directory, spec)
    ids = {token: number for number, token in enumerate([PAD, EOS, UNK, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNK, chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)


def main(directory):
    """Write a model with random weights, tasks to train on, and held-out tasks into ``directory``."""
    rng = random.Random(0)
    programs = [[a, b, c] for a in KINDS for b in KINDS for c in KINDS]
    rng.shuffle(programs)
    for number, wanted in enumerate(programs):
        folder = "train" if number < 20 else "held_out"
        write_task(directory / folder / f"{number:02d}", wanted)
    write_model(directory / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
