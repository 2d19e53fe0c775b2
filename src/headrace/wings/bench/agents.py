"""Two agents with heavy-tailed answer lengths: the cost of a synchronous barrier, and the gain of pacing.

Every episode is an answer of a writer followed by an answer of a critic, with lognormal lengths whose 90th percentile
is five times the median. In the run with the barrier (``flow.max_age = 0``), a batch is sampled to its last token and
trained, and the new weights are committed, before the next batch begins. In the *paced* run, generation runs ahead as
far as the staleness bound allows. Both runs of a pair attempt the same groups with the same lengths, and train all of
them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from headrace.control.metrics.summary import Summary
from headrace.flow.ledger.opening import open_ledger
from headrace.models.tiny import TinySpec, make_tiny
from headrace.run.session import train
from headrace.wings.bench.base import Report, Row, at_least, at_most, get_columns, make_report

PAIRS = 3
STEPS = 40
MAX_AGE = 8
"""The staleness bound of the paced run, in versions."""
GROUPS, GROUP_SIZE = 4, 4
"""The number of groups in a batch, and the number of episodes in a group."""
SETTINGS = {
    "engine": {"max_new_tokens": 1024, "max_sequences": GROUPS * GROUP_SIZE * (MAX_AGE + 1)},
    "learner": {"lr": 0.0, "tokens_per_microbatch": 4096},
    "launch": {"engine_threads": 1, "learner_threads": 1},
    "observe": {"view": "none", "report": False},
}
"""The settings of both runs. The learning rate is 0, so that both runs of a pair sample from the same weights."""
COLUMNS = (
    *("steps", "tokens_trained", "wall_s", "trained_tok_s"),
    *("engine_idle_frac", "learner_idle_frac", "max_token_age"),
)
"""The figures of a run's summary that are columns of its row."""
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
"""The vocabulary, so large that an answer rarely samples the end-of-sequence token before its length limit."""
TEMPLATE = "{%- for message in messages %}{{ message.content }}{% endfor %}"


def measure(on_progress: Callable[[str], None], *, quick: bool = False) -> Report:
    """Measure pairs of runs, each a run with the barrier followed by a paced run; with ``quick`` one pair of three
    steps. Return a report with a row for each run, and the targets, of which the main one is that the paced runs train
    at least twice as many tokens per second. ``on_progress`` is called with a line of text before each run."""
    pairs, steps = (1, 3) if quick else (PAIRS, STEPS)
    rows: list[Row] = []
    ratios: list[float] = []
    ages: list[int] = []
    tails: list[float] = []
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch, _entry() as entry:
        directory = Path(scratch)
        tree = {
            **SETTINGS,
            "model": {"path": _model(directory)},
            "data": {"path": _rows(directory)},
            "env": {"kind": "rollout", "entry": entry},
        }
        for pair in range(pairs):
            runs: dict[str, Summary] = {}
            for what, max_age in (("barrier", 0), ("paced", MAX_AGE)):
                on_progress(f"pair {pair}: {what}")
                run_dir = directory / f"{pair}-{what}"
                flow = {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_age": max_age}
                run = {"dir": str(run_dir), "steps": steps, "checkpoint_every": steps, "seed": pair}
                runs[what] = train({**tree, "flow": flow, "run": run})
                tails.append(_tail(run_dir, steps * GROUPS))
                figures = get_columns(runs[what], *COLUMNS)
                rows.append({"what": what, "pair": pair, **figures, "p90_by_median": tails[-1]})
            barrier, paced = runs["barrier"], runs["paced"]
            ratios.append(paced.trained_tok_s / barrier.trained_tok_s)
            shares.append(paced.tokens_trained / barrier.tokens_trained)
            ages.append(paced.max_token_age)
    targets = [
        at_least("trained tokens/s, paced / barrier", statistics.median(ratios), 2.0, "ratio"),
        at_least("lengths of answers, 90th percentile / median", statistics.median(tails), 5.0, "ratio"),
        at_least("tokens trained, paced / barrier: nothing long is left out", min(shares), 0.99, "ratio"),
        at_most(f"age of the oldest token at max_age={MAX_AGE}", max(ages), MAX_AGE, "versions"),
    ]
    return make_report(rows, targets)


@contextmanager
def _entry() -> Iterator[str]:
    """Yield the reference ``file.py:name`` of the rollout function of this benchmark, a value for ``env.entry`` of a
    run file. The file exists while the context is open."""
    with as_file(files("headrace.wings.bench") / "agents_play.py") as path:
        yield f"{path}:play_episode"


def _model(directory: Path) -> str:
    """Write a small model with random weights, and return its directory."""
    spec = TinySpec(
        vocab=ALPHABET,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=384,
        max_positions=2100,
        chat_template=TEMPLATE,
    )
    return str(make_tiny(directory / "model", spec))


def _rows(directory: Path) -> str:
    """Write the dataset, 64 rows whose prompts are 8 characters of the vocabulary, and return the path of its file."""
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": ALPHABET[at : at + 8]}) + "\n" for at in range(64)), encoding="utf-8")
    return str(path)


def _tail(run_dir: Path, num_groups: int) -> float:
    """Return the 90th percentile of the lengths, in tokens, of all answers in the ledger of the run, divided by their
    median: a measure of how heavy the tail is. The run has groups 0 to ``num_groups`` - 1."""
    with closing(open_ledger(run_dir)) as ledger:
        episodes = [episode for number in range(num_groups) for episode in ledger.episodes(number)]
    lengths = [len(turn.tokens) for episode in episodes for turn in episode.turns if turn.stop_reason is not None]
    middle, high = np.percentile(lengths, [50, 90])
    return float(high / middle)
