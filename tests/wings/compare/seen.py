"""What a run did on every axis, from the files it left: ledger, record of the engine's orders, steps, status."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.types.episode import EpisodeKey
from headrace.flow.ledger.browse import Browser
from headrace.launch.interleaving import EngineInput, RecordedInput, interleaving_file, read_interleaving
from headrace.rollout.runner import episode_seed
from headrace.run.observe.metrics import combine_over_run
from headrace.run.observe.rundata import load_run


@dataclass(frozen=True)
class Seen:
    run_dir: Path

    @cached_property
    def steps(self) -> list[Any]:
        return load_run(self.run_dir).steps

    @cached_property
    def config(self) -> dict[str, Any]:
        return load_run(self.run_dir).config

    @cached_property
    def sums(self) -> dict[str, float]:
        """The metrics of all steps."""
        return combine_over_run(self.steps)

    @cached_property
    def books_balance(self) -> bool:
        browser = Browser.open_run(self.run_dir)
        try:
            return browser.conservation().holds
        finally:
            browser.close()

    def rows(self, query: str) -> list[Any]:
        db = sqlite3.connect(self.run_dir / "ledger.sqlite")
        try:
            return db.execute(query).fetchall()
        finally:
            db.close()

    @cached_property
    def ages(self) -> dict[int, int]:
        """Tokens trained at each age, as the ledger's steps say."""
        total: Counter[int] = Counter()
        for (ages,) in self.rows("SELECT ages FROM steps"):
            total.update({int(age): tokens for age, tokens in json.loads(ages).items()})
        return dict(total)

    @cached_property
    def dropped(self) -> dict[str, int]:
        return dict(self.rows("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"))

    @cached_property
    def lead(self) -> int:
        """How many batches beyond the one that is next to be committed were ever in flight."""
        size = self.config["flow"]["groups_per_step"]
        commits = [at for (at,) in self.rows("SELECT committed_s FROM versions WHERE version > 0")]
        drops = [at for (at,) in self.rows("SELECT moved_s FROM groups WHERE state = 'dropped'")]
        held = [
            place - sum(at <= began for at in drops) - size * sum(at <= began for at in commits)
            for place, (began,) in enumerate(self.rows("SELECT submitted_s FROM groups ORDER BY number"), start=1)
        ]
        return -(-max(held) // size) - 1

    @cached_property
    def in_order(self) -> bool:
        """Whether every step trained the batch that was started as such."""
        size = self.config["flow"]["groups_per_step"]
        rows = self.rows("SELECT number, step FROM groups WHERE state IN ('trained', 'released')")
        return all(number // size == step for number, step in rows)

    @cached_property
    def versions(self) -> dict[EpisodeKey, list[int]]:
        """Of each episode that ended, the version of every token."""
        browser = Browser.open_run(self.run_dir)
        try:
            found = {}
            for group, place in self.rows("SELECT group_number, position FROM episodes"):
                key = EpisodeKey(group, place)
                episode = browser.episode(key)
                sampled = [turn.tokens.versions_T for turn in episode.turns if turn.stop_reason is not None]
                found[key] = np.concatenate(sampled).tolist() if sampled else []
        finally:
            browser.close()
        return found

    @cached_property
    def across(self) -> int:
        """Episodes whose tokens are of more than one version."""
        return sum(len(set(versions)) > 1 for versions in self.versions.values())

    @cached_property
    def versions_rise(self) -> bool:
        return all(left <= right for each in self.versions.values() for left, right in pairwise(each))

    @cached_property
    def orders(self) -> list[RecordedInput]:
        """What the engine was told, in order."""
        return read_interleaving(self.run_dir / interleaving_file("engine"))

    @cached_property
    def held_back(self) -> int:
        """Episodes that were asked for before a commit and begun after it: none of their tokens is older."""
        seed = self.config["run"]["seed"]
        keys = {episode_seed(seed, key): key for key in self.versions}
        asked: set[EpisodeKey] = set()
        count = 0
        for order in self.orders:
            if order.kind is EngineInput.GENERATE:
                asked |= {keys[one] for one in order.seeds if one in keys}
            if order.kind is EngineInput.COMMIT:
                count += sum(bool(self.versions[key]) and min(self.versions[key]) >= order.version for key in asked)
        return count

    @cached_property
    def naps(self) -> list[int]:
        """Steps that the engine made between each time that it was put to sleep and the commit that woke it."""
        made, asleep = [], None
        for order in self.orders:
            if order.kind is EngineInput.PAUSE and asleep is None:
                asleep = order.steps
            if order.kind is EngineInput.COMMIT and asleep is not None:
                made.append(order.steps - asleep)
                asleep = None
        return made

    @cached_property
    def sent_bytes(self) -> list[float]:
        """Per commit, step by step."""
        told = [step.metrics for step in self.steps]
        return [each["sync/bytes"] / each["sync/commits"] for each in told if each.get("sync/commits")]

    @cached_property
    def pids(self) -> dict[str, int]:
        """The processes of the run, by role."""
        status = json.loads((self.run_dir / "status.json").read_text())
        return {part["role"]: part["pid"] for part in status["components"]}
