"""Runs that never happened, with a ledger: a directory as a run leaves it, every episode in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models

from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.observation import StepRecord
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.scored import TokenResults, paths
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import Tokens
from headrace.base.types.trace import Span
from headrace.flow.ledger import SqliteLedger
from headrace.flow.ledger.base import CommitVersion, EndEpisode, EndStep, Move, Submit
from headrace.run.observe import JsonlWriter
from tests.run.observe.synthetic import step_record, step_spans

GROUP_SIZE = 4
LONG = "abcdefgh" * 4
"""One token of 32 characters: a long line needs few of them."""
STARTED_S = 1_790_000_000.0


def bytes_to_unicode() -> dict[int, str]:
    """How byte-level tokenizers spell bytes (Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in spelled]
    return {**spelled, **{byte: chr(256 + index) for index, byte in enumerate(others)}}


def write_tokenizer(directory: Path) -> None:
    """One token for every byte, and :data:`LONG`."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()} | {LONG: 256}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))


def ids(text: str) -> list[int]:
    return list(text.encode())


def given(text: str) -> Turn:
    return Turn(author="task", tokens=Tokens.observed(ids(text)))


def sampled(
    tokens: str | Sequence[int], *, version: int, parent: int | None, author: str = "policy", **more: object
) -> Turn:
    numbers = ids(tokens) if isinstance(tokens, str) else list(tokens)
    count = len(numbers)
    columns = Tokens(
        ids_T=np.array(numbers, np.int32),
        logprobs_T=-np.abs(np.sin(np.arange(count), dtype=np.float32)) - np.float32(0.01),
        versions_T=np.full(count, version, np.int32) + (np.arange(count) > count // 2),
        kept=KeptSets.from_spans([[number, (number + 1) % 256] for number in numbers]) if count < 10_000 else None,
    )
    return replace(Turn(author=author, tokens=columns, parent=parent, stop_reason=StopReason.STOP), **more)


def routed(turn: Turn, experts: int, context: Routing | None = None) -> Turn:
    count = len(turn.tokens)
    routing = Routing(known_T=np.ones(count, bool), experts_RLK=np.full((count, 2, 2), experts, np.uint8))
    tokens = Tokens(
        ids_T=turn.tokens.ids_T, logprobs_T=turn.tokens.logprobs_T, versions_T=turn.tokens.versions_T,
        kept=turn.tokens.kept, routing=routing,
    )  # fmt: skip
    return Turn(
        author=turn.author, tokens=tokens, parent=turn.parent, stop_reason=turn.stop_reason, context_routing=context
    )


def plain_episode(group: int, index: int, version: int) -> EpisodeGraph:
    turns = [given(f"What is {group} + {index}?"), sampled(f"{group + index}", version=version, parent=0)]
    return EpisodeGraph(
        key=EpisodeKey(group, index), turns=turns, status=EpisodeStatus.SCORED, reward=float((group + index) % 3 == 0),
        parts={"right": 1.0, "short": 0.5},
    )  # fmt: skip


def branching_episode(group: int, index: int) -> EpisodeGraph:
    """A conversation with a tool, an error, and a branch whose tokens were routed twice."""
    first = routed(sampled("I ask the tool.", version=3, parent=0), 1)
    context = Routing(known_T=np.ones(27, bool), experts_RLK=np.full((27, 2, 2), 2, np.uint8))
    turns = [
        given("Look it up: "),
        first,
        Turn(author="tool", tokens=Tokens.observed(ids("no such file")), parent=1, failed=True),
        sampled("Then I guess.", version=4, parent=2, reward=0.25),
        routed(sampled("Or not at all.", version=4, parent=1), 3, context),
    ]
    return EpisodeGraph(key=EpisodeKey(group, index), turns=turns, status=EpisodeStatus.SCORED, reward=0.5)


def taught_episode(group: int, index: int) -> EpisodeGraph:
    """An answer that the teacher ``math`` finds likelier by half at every even token, and less likely at the others;
    it was not asked about the last one."""
    answer = sampled("It is 7", version=3, parent=0, teacher="math")
    gaps_T = np.where(np.arange(7) % 2, np.float32(-0.5), np.float32(0.25))
    said = TeacherScores(
        logprobs_T=answer.tokens.logprobs_T + gaps_T,
        versions_T=np.zeros(7, np.int32),
        ids_TK=np.stack([answer.tokens.ids_T, np.full(7, 33)], axis=1).astype(np.int32),
        logs_TK=np.log(np.full((7, 2), [0.5, 0.25])).astype(np.float32),
    )
    tokens = msgspec.structs.replace(answer.tokens, teacher_scores=said[:6] + TeacherScores.none(1, 2))
    turns = [given("3 + 4 = "), replace(answer, tokens=tokens)]
    return EpisodeGraph(key=EpisodeKey(group, index), turns=turns, status=EpisodeStatus.SCORED, reward=1.0)


def set_teachers(directory: Path, advantage: dict[str, object], *teachers: dict[str, object]) -> None:
    """Say in the run's settings that it had these."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "algo": {"advantage": advantage}, "learner": {"teachers": teachers}}))


def write_run(directory: Path, steps: int = 6, *, extra: Sequence[EpisodeGraph] = (), name: str = "additions") -> Path:
    """``steps`` steps of two groups each, a group that failed, and for each of ``extra`` a step with plain siblings."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "model")
    write_sheets(directory, name)
    with JsonlWriter[StepRecord](directory / "metrics.jsonl") as metrics:
        metrics.write(record(step) for step in range(steps))
    with JsonlWriter[Span](directory / "trace.jsonl") as trace:
        trace.write(span for step in range(steps) for span in step_spans(step))
    ledger = SqliteLedger(directory / "ledger.sqlite", group_size=GROUP_SIZE, groups_per_step=2)
    for step in range(steps):
        pair = (2 * step, 2 * step + 1)
        train(ledger, pair, step, [plain_episode(g, p, max(0, step - 1)) for g in pair for p in range(GROUP_SIZE)])
    fail(ledger, 2 * steps)
    for number, episode in enumerate(extra, 2 * steps + 1):
        episode.key = EpisodeKey(number, 0)
        siblings = [plain_episode(number, index, steps - 1) for index in range(1, GROUP_SIZE)]
        train(ledger, (number,), number - steps - 1, [episode, *siblings])
    ledger.close()
    return directory


def record(step: int) -> StepRecord:
    return step_record(step, unix_s=STARTED_S + step, length_mean=12.0 + step, metrics={
        "loss": 0.1 / (step + 1), "entropy": 0.7 - 0.01 * step, "ess": 0.99,
        "grad_norm": 1.0 - 0.1 * step, "lr": 1e-4, "kl_mu_k3": 0.002,
        "memory/engine": 3e8 + 1e6 * step, "cpu/engine": 0.9,
    })  # fmt: skip


def write_sheets(directory: Path, name: str) -> None:
    config = {
        "run": {"name": name, "steps": 40, "dir": str(directory)},
        "model": {"path": str(directory / "model")},
        "flow": {"max_age": 2, "group_size": GROUP_SIZE, "groups_per_step": 2},
        "algo": {"advantage": {"kind": "grpo"}},
        "engine": {"temperature": 1.0},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "parts.json").write_text(
        json.dumps({"engine": {"device": "cpu", "cache_bytes": 4 << 20, "threads": 1}})
    )
    (directory / "summary.json").write_text(json.dumps({
        "status": "finished", "cause": "", "eval_before": 0.41, "eval_after": 0.93,
        "warnings": ["alarm entropy: it fell"],
        "verdict": "generation-bound: 38% of the learner's time goes by waiting for episodes. Raise flow.lead.",
        "engine_idle_frac": 0.02, "learner_idle_frac": 0.38, "generated_tok_s": 3677.18, "trained_tok_s": 3677.18,
        "commit_gap_ms": {"p50": 0.12, "p99": 0.29},
    }))  # fmt: skip


def write_status(directory: Path, *, living: bool, steps: int) -> None:
    components = [
        {"role": "controller", "pid": 1, "state": "ready" if living else "ended", "version": None, "device": ""},
        {"role": "engine", "pid": 999_999_999, "state": "ready", "version": steps, "device": "cpu", "restarts": 1},
    ]  # fmt: skip
    (directory / "status.json").write_text(json.dumps({
        "phase": "training", "steps_done": steps, "steps_total": 40, "version": steps, "written_s": RealClock().wall(),
        "components": components, "waits": ["learner waits 1 s for a batch, which scoring brings"],
    }))  # fmt: skip


def train(
    ledger: SqliteLedger,
    numbers: tuple[int, ...],
    step: int,
    episodes: Sequence[EpisodeGraph],
    teacher: int | None = None,
) -> None:
    """Groups from their beginning to their end. ``teacher``: the version of one beside the learner, if there is one."""
    at_s = STARTED_S + step
    ledger.apply(Submit(numbers=numbers, rows=tuple(number % 7 for number in numbers), at_s=at_s))
    for episode in episodes:
        ledger.apply(EndEpisode(episode=episode, at_s=at_s))
    ledger.apply(Move(numbers=numbers, state=GroupState.TAKEN, at_s=at_s, step=step))
    tokens = sum(episode.num_sampled for episode in episodes)
    ledger.apply(
        EndStep(
            step=step, numbers=numbers, trained_tokens=tokens, dropped_tokens={}, ages={1: tokens}, at_s=at_s,
            learned=None if step == 6 else learned(step, episodes, teacher),
        )
    )  # fmt: skip
    ledger.apply(CommitVersion(version=step + 1, numbers=numbers, checksum=f"{step:x}", at_s=at_s))


def learned(step: int, episodes: Sequence[EpisodeGraph], teacher: int | None) -> TokenResults:
    """The learner finds every fifth token less likely than the engine did, and its neighbour likelier; a teacher all
    of them less likely."""
    trained = [episode for episode in episodes if episode.status is EpisodeStatus.SCORED]
    batch = Batch.collate(step, [sample for episode in trained for sample in paths(episode, 0.0)])
    gaps_N = np.array([-0.2, 0.1, 0.0, 0.0, 0.0], np.float32)[batch.ids_N % 5]
    count = batch.num_tokens
    teacher_scores_N = None if teacher is None else TeacherScores(
        logprobs_T=np.where(batch.mask_N, batch.logprobs_N - np.float32(0.125), np.nan).astype(np.float32),
        versions_T=np.full(count, teacher, np.int32),
        ids_TK=np.zeros((count, 0), np.int32),
        logs_TK=np.zeros((count, 0), np.float32),
    )  # fmt: skip
    return TokenResults.from_batch(
        [episode.key for episode in trained], batch, batch.logprobs_N + gaps_N, teacher_scores_N
    )


def fail(ledger: SqliteLedger, number: int) -> None:
    """A group whose only ended episode failed, and that was dropped."""
    ledger.apply(Submit(numbers=(number,), rows=(0,), at_s=STARTED_S))
    turns = [given("Why?"), sampled("because", version=0, parent=0)]
    failed = EpisodeGraph(
        key=EpisodeKey(number, 0), turns=turns, status=EpisodeStatus.FAILED, cause="reward_error: <b>boom</b>"
    )
    ledger.apply(EndEpisode(episode=failed, at_s=STARTED_S))
    ledger.apply(Move(numbers=(number,), state=GroupState.DROPPED, reason="too_few_scored", at_s=STARTED_S))
