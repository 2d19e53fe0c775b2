"""``headrace train --replay RUN``: repeat a whole recorded run, bit for bit.

    record of the run                     use in the replay
    settings, rows, seed                  must be equal: a difference is refused
    interleaving-engine.jsonl             the engine receives the same messages before the same steps
    ledger: the groups of every step      the flow assembles the same batches
    ledger: episodes                      tokens, logprobs, versions and rewards are compared when an episode ends
    ledger: the hashes of weights         every version is compared when it is committed

Rewards and weights are computed again. All random draws follow from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.config import leaves
from headrace.base.errors import ConfigError, LedgerError, ReplayDiffers
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.outline import groups_in_words
from headrace.control import ControlSettings, Summary
from headrace.control.controller import ENGINES, RECOVERY
from headrace.control.recovery import find_starting_point
from headrace.flow.ledger import Ledger, LedgerWriter
from headrace.flow.ledger.base import CommitVersion, EndEpisode, Operation
from headrace.flow.ledger.opening import open_ledger
from headrace.flow.policies.recorded import RecordedPolicy
from headrace.launch.interleaving import EngineInput, RecordedInput, interleaving_file, read_interleaving
from headrace.launch.order import Facts, LaunchOrder
from headrace.launch.starts import RecordedEngine
from headrace.rollout.environments.agents import TrainedAgent
from headrace.rollout.runner import episode_seed
from headrace.run.session.config import RunConfig, load_config, make_recorded_settings
from headrace.run.session.directory import FACTS_FILE, read_sealed, read_settings
from headrace.run.session.prepare import Prepared

CHANGEABLE = (
    *("observe", "run.dir", "run.stall_timeout_s", "run.keep_checkpoints"),
    *("launch.start_timeout_s", "launch.engine_restarts", "launch.engine_silence_s"),
)
"""The settings that a replay may change, because they affect no token."""
UNCOMPARED_FACTS = frozenset({"weights_address", "place"})
"""The facts of a part that may differ in a replay: where it takes weights, and which GPU of which machine it uses."""
UNREPEATABLE_CAUSES = frozenset({"env_timeout", "reward_timeout", "reward_crashed"})
"""The causes of an episode's end that depend on the clock or on a crash. A run with such an episode cannot be
repeated."""
NO_TIMEOUT_S = 24 * 3600.0
"""The time limit of an attempt and of a commit in a replay, in seconds. It is practically unlimited, since both wait
for the recorded moment."""
ENGINE_SHARE_OF_TIMEOUT = 0.8
"""The fraction of the stall timeout after which the engine reports the message that it waits for. The controller, whose
report would say less, reports a stall only after the whole timeout."""


def read_settings_to_replay(run_dir: Path) -> dict[str, Any]:
    """Return the settings of the run in ``run_dir`` with an empty ``run.dir``, for a run in another directory.

    Raises :class:`~headrace.base.errors.ConfigError` if the directory has no run.
    """
    tree = read_settings(run_dir)
    tree["run"] = {**tree["run"], "dir": ""}
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRecording:
    """The record of a run from which a replay repeats the run: the groups of each step, and the messages that the
    engine received before each of its steps."""

    run_dir: Path
    """The directory of the recorded run."""
    config: RunConfig
    """The settings of the recorded run."""
    ledger: Ledger
    """The ledger of the recorded run, the record of its groups, episodes and tokens; open for reading."""
    facts: Facts
    """The facts that each part reported when it started, such as its number of threads, by the role of the part."""
    checksums: Mapping[int, str]
    """The hash of the weights of every committed version."""
    steps: Mapping[int, tuple[int, ...]]
    """The groups that each step trained, by step."""
    rows: tuple[int, ...]
    """The dataset row of each group, by group number."""
    handled: tuple[RecordedInput, ...]
    """The messages that the engine received, in order, each with the step before which the engine handled it."""

    @classmethod
    def open(cls, run_dir: Path) -> ReplayRecording:
        """Open the record of the run in ``run_dir`` for reading.

        Raises :class:`~headrace.base.errors.ConfigError` with the reason if the run cannot be repeated.
        """
        config = load_config(read_settings_to_replay(run_dir))
        try:
            ledger = open_ledger(run_dir)
        except LedgerError as error:
            raise _make_refusal(run_dir, f"it has no ledger ({error.problem})") from None
        try:
            return cls._read(run_dir, config, ledger)
        except BaseException:
            ledger.close()
            raise

    @classmethod
    def _read(cls, run_dir: Path, config: RunConfig, ledger: Ledger) -> ReplayRecording:
        """Return the record of the run in ``run_dir`` with the settings ``config`` and the open ``ledger``. Raises
        :class:`~headrace.base.errors.ConfigError` if something that a replay needs was not recorded, or if the run
        depended on a clock or a crash, which cannot be repeated."""
        obstacle = next(_find_obstacles(run_dir, config, ledger), None)
        if obstacle is not None:
            raise _make_refusal(run_dir, obstacle)
        path = run_dir / interleaving_file("engine")
        handled, checksums = tuple(read_interleaving(path)), ledger.checksums()
        missing = checksums.keys() - {each.version for each in handled}
        if missing:
            raise _make_refusal(run_dir, f"{path.name} lacks the commit of version {min(missing)}: it was cut off")
        return cls(
            run_dir=run_dir,
            config=config,
            ledger=ledger,
            facts=read_sealed(run_dir / FACTS_FILE),
            checksums=checksums,
            steps=ledger.steps(),
            rows=tuple(group.row for group in ledger.attempts(0)),
            handled=handled,
        )

    def refuse_changed(self, prepared: Prepared) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the settings or rows of ``prepared``, the replay, differ
        from the recorded run. Settings in :data:`CHANGEABLE` may differ."""
        trees = map(make_recorded_settings, (prepared.config, self.config))
        settings, recorded = (leaves(tree, with_empty=True) for tree in trees)
        for key in sorted(settings.keys() | recorded.keys()):
            changeable = any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)
            if not changeable and settings.get(key) != recorded.get(key):
                raise ConfigError(
                    f"{key}={settings.get(key)!r}, and the run in {self.run_dir} has {recorded.get(key)!r}: it would "
                    "be another run",
                    remedy=f"leave {key} out; a replay may change only {', '.join(CHANGEABLE)}",
                )
        fingerprint = find_starting_point(self.run_dir).fingerprint
        if fingerprint not in ("", replace(prepared, config=self.config).fingerprint()):
            raise _make_refusal(self.run_dir, "its rows have changed, or the program that made it knew other settings")

    def adapt_order(self, order: LaunchOrder, stall_timeout_s: float) -> LaunchOrder:
        """Return a copy of ``order``, the launch order of the replay, with the recorded numbers of threads and cache
        blocks, without restarts, with practically unlimited times, and with an engine that follows the recorded
        messages. After a fraction of ``stall_timeout_s`` seconds the engine reports a message that has not arrived."""
        engine, learner = self.facts["engine"], self.facts["learner"]
        world = order.learner.parallel.world
        launch = {
            "engine_restarts": 0,
            "engine_threads": engine["threads"],
            "learner_threads": int(learner["threads"]) * world,
        }
        from headrace.models.paged.base import BLOCK

        cache = {"cache_tokens": int(engine["cache_blocks"]) * BLOCK, "cache_share": None}
        return replace(
            order,
            engine=order.engine.model_copy(update=cache),
            env=order.env.model_copy(update={"timeout_s": NO_TIMEOUT_S}),
            sync=order.sync.model_copy(update={"deadline_s": NO_TIMEOUT_S}),
            launch=order.launch.model_copy(update=launch),
            recorded=RecordedEngine(
                interleaving=str(self.run_dir / interleaving_file("engine")),
                deadline_s=ENGINE_SHARE_OF_TIMEOUT * stall_timeout_s,
                seed=self.config.run.seed,
                num_groups=len(self.rows),
                group_size=self.config.flow.group_size,
            ),
        )

    def adapt_settings(self, settings: ControlSettings) -> ControlSettings:
        """Return a copy of ``settings``, the controller's settings, for the replay: with the recorded number of steps,
        the recorded row of each group, and a flow policy that trains the recorded groups in each step."""
        policy = settings.flow.policy
        recorded = RecordedPolicy(
            starts=self._start_versions(),
            steps=self.steps,
            dropped_stale=policy.drops_stale,
            masked_stale=policy.masks_stale,
        )
        return replace(
            settings,
            run=settings.run.model_copy(update={"steps": len(self.steps)}),
            flow=settings.flow.model_copy(update={"policy": recorded}),
            order=self.rows.__getitem__,
            curriculum=None,
        )

    def _start_versions(self) -> tuple[int, ...]:
        """Return for each group, by number, the policy version before which the replay does not start the group. This
        is the version that the engine had committed when the first request of the group, or of a later group, arrived;
        without such a request, a version that the run never reaches."""
        size, run_seed = self.config.flow.group_size, self.config.run.seed
        groups = {
            episode_seed(run_seed, EpisodeKey(number, place)): number
            for number in range(len(self.rows))
            for place in range(size)
        }
        never = max(self.checksums, default=0) + len(self.steps) + 1
        starts = [never] * len(self.rows)
        version = 0
        for message in self.handled:
            if message.kind is EngineInput.COMMIT and message.version is not None:
                version = message.version
            elif message.kind is EngineInput.GENERATE:
                for number in {groups[seed] for seed in message.seeds if seed in groups}:
                    starts[number] = min(starts[number], version)
        for number in reversed(range(len(starts) - 1)):
            starts[number] = min(starts[number], starts[number + 1])
        return tuple(starts)

    def refuse_machine(self, facts: Facts) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if a part of the replay (engine or learner) reports in
        ``facts`` another value than in the recorded run, such as another version of torch, since results could then
        differ."""
        for role, recorded in self.facts.items():
            for name, value in facts[role].items():
                if name not in UNCOMPARED_FACTS and recorded.get(name) != value:
                    raise _make_refusal(
                        self.run_dir, f"its {role} had {name}={recorded.get(name)!r}, and has {value!r} here"
                    )


@contextmanager
def open_recording(replay: str | Path, prepared: Prepared, *, resume: bool = False) -> Iterator[ReplayRecording | None]:
    """Open the record of the run in the directory ``replay``, which the run ``prepared`` will repeat, for the duration
    of the context, and yield it. Yield ``None`` if ``replay`` is empty, which means that the run is not a replay.

    Raises :class:`~headrace.base.errors.ConfigError` if the recorded run cannot be repeated, if ``prepared`` has other
    settings or rows, and if ``resume`` is true, since a replay cannot be resumed.
    """
    if not replay:
        yield None
        return
    if resume:
        raise ConfigError("a replay cannot be resumed", remedy="leave --resume out, and choose a new run.dir")
    if prepared.config.launch.lend_cores:
        raise ConfigError(
            "launch.lend_cores=true: how many cores a part had at which step is not recorded, and bits depend on it",
            remedy="replay runs that lent no cores",
        )
    recording = ReplayRecording.open(Path(replay))
    try:
        recording.refuse_changed(prepared)
        yield recording
    finally:
        recording.ledger.close()


class ReplayComparison:
    """A ledger writer for a replay. It compares every ended episode and every committed version with the recorded run,
    and passes all operations on to the writer of the replay's own ledger.

    Raises :class:`~headrace.base.errors.ReplayDiffers` at the first difference, which ends the replay.
    """

    def __init__(self, writer: LedgerWriter, recording: ReplayRecording) -> None:
        """Create the writer, which compares with ``recording`` and passes operations on to ``writer``."""
        self._writer = writer
        self._recording = recording
        self._expected: dict[int, dict[int, EpisodeGraph]] = {}
        """The recorded episodes that are not compared yet, by the number of the group and by the index in the group. A
        group is read from the ledger when its first episode has ended."""
        self._unconfirmed = dict(recording.checksums)
        """The recorded hashes of the versions that the replay has not committed yet."""

    def write(self, operation: Operation) -> None:
        """Compare ``operation`` with the recorded run, if it ends an episode or commits a version, and then pass it
        on to the writer."""
        match operation:
            case EndEpisode(episode=episode) if (
                self._unconfirmed
            ):  # after the last version, episodes have no recorded order
                self._compare_episode(episode)
            case CommitVersion():
                self._compare_version(operation)
        self._writer.write(operation)

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until every operation is recorded in the replay's ledger; with ``durable``, until the records would
        survive a power failure."""
        await self._writer.flush(durable=durable)

    def close(self) -> None:
        """Close the writer of the replay's ledger."""
        self._writer.close()

    def finish(self, summary: Summary) -> Summary:
        """Return a copy of ``summary``, the summary of the ended replay, with the number of versions whose weights
        agree, which is the number of recorded versions.

        Raises :class:`~headrace.base.errors.ReplayDiffers` if the replay ended before the last recorded version.
        """
        if self._unconfirmed:
            raise ReplayDiffers(
                f"{self._agreement_in_words()}; the replay ended before version {min(self._unconfirmed)}: "
                f"{summary.cause or 'stopped'}",
                remedy="let it run to its end",
            )
        return msgspec.structs.replace(summary, versions_agree=len(self._recording.checksums))

    def _compare_version(self, commit: CommitVersion) -> None:
        """Compare the hash of the weights of a committed version with the recorded hash; raise
        :class:`~headrace.base.errors.ReplayDiffers` if they differ. A version that the recorded run did not commit is
        not compared."""
        expected = self._unconfirmed.get(commit.version)
        if expected is None:
            return
        if expected != commit.checksum:
            explanation = "what trained it is the same to the bit" if commit.version else "nothing was trained yet"
            raise ReplayDiffers(
                f"{self._agreement_in_words()}; version {commit.version} has other weights than in "
                f"{self._recording.run_dir}: their hash is {commit.checksum}, and was {expected}; {explanation}",
                remedy="use the same software and model directory; headrace ledger RUN --replay trains the recorded "
                "batches alone",
            )
        del self._unconfirmed[commit.version]

    def _agreement_in_words(self) -> str:
        """Return in words, for error messages, how many of the recorded versions of the weights have agreed so far."""
        total = len(self._recording.checksums)
        return f"{total - len(self._unconfirmed)} of {total} versions agree"

    def _compare_episode(self, replayed: EpisodeGraph) -> None:
        """Compare the ended episode ``replayed`` with the recorded episode of the same key, and raise
        :class:`~headrace.base.errors.ReplayDiffers` if they differ. An episode that did not end in the recorded run, or
        that was withdrawn, is not compared."""
        number, place = replayed.key.group, replayed.key.place
        if number not in self._expected:
            self._expected[number] = {each.key.place: each for each in self._recording.ledger.episodes(number)}
        recorded = self._expected[number].pop(place, None)
        if not self._expected[number]:
            del self._expected[number]
        # a withdrawn episode ends at a token that depends on the time of the withdrawal
        if recorded is None or replayed.status is EpisodeStatus.LEFT_OUT:
            return
        problem = describe_difference(replayed, recorded)
        if problem:
            raise ReplayDiffers(
                f"group {number} episode {place}: {problem} in {self._recording.run_dir}",
                remedy="make the reward function, and what it asks, give the same again"
                if problem.startswith("its reward")
                else "use the same software on the same kind of machine; if that is so, the record is damaged",
            )


def describe_difference(replayed: EpisodeGraph, recorded: EpisodeGraph) -> str:
    """Return the first difference between an episode ``replayed`` and the same episode ``recorded`` in the first run,
    in words that end with the recorded value (``its reward is 1.0, and was 0.0``); an empty string if the episodes are
    equal bit for bit."""
    if len(replayed.turns) != len(recorded.turns):
        return f"it has {len(replayed.turns)} turns, and {len(recorded.turns)}"
    for index, (turn, recorded_turn) in enumerate(zip(replayed.turns, recorded.turns, strict=True)):
        problem = _describe_turn_difference(turn, recorded_turn)
        if problem:
            return f"turn {index}, {problem}"
    if (replayed.status is EpisodeStatus.FAILED) != (recorded.status is EpisodeStatus.FAILED):
        return (
            f"it is {replayed.status} ({replayed.cause or 'no cause'}), "
            f"and was {recorded.status} ({recorded.cause or 'no cause'})"
        )
    if replayed.reward != recorded.reward:
        return f"its reward is {replayed.reward!r}, and was {recorded.reward!r}"
    return ""


def _describe_turn_difference(replayed: Turn, recorded: Turn) -> str:
    """Return in words the first difference between the tokens, versions and logprobs of a turn ``replayed`` and of the
    same turn ``recorded`` in the first run; an empty string if they are equal bit for bit."""
    length, recorded_length = len(replayed.tokens), len(recorded.tokens)
    common_length = min(length, recorded_length)
    for words, values, recorded_values in (
        ("is token", replayed.tokens.ids_T, recorded.tokens.ids_T),
        ("is of version", replayed.tokens.versions_T, recorded.tokens.versions_T),
        ("has the logprob", replayed.tokens.logprobs_T, recorded.tokens.logprobs_T),
    ):
        # compared as integers: bits must be equal, and a NaN is equal to itself
        bits, recorded_bits = (column[:common_length].view(np.int32) for column in (values, recorded_values))
        differing = np.flatnonzero(bits != recorded_bits)
        if len(differing):
            index = int(differing[0])
            return f"position {index} {words} {values[index]!s}, and {recorded_values[index]!s}"
    return "" if length == recorded_length else f"it has {length} tokens, and {recorded_length}"


def _find_obstacles(run_dir: Path, config: RunConfig, ledger: Ledger) -> Iterator[str]:
    """Yield the reasons why a replay cannot repeat the run in ``run_dir`` with the settings ``config`` and the ledger
    ``ledger``, each as the end of a sentence: that something was not recorded, or depended on a clock or a crash. Only
    the first reason is sure to be true: a check expects that the earlier ones have found nothing."""
    notes = ledger.notes()
    num_lives = sum(kind == "start" for kind, _, _ in notes)
    if num_lives > 1:
        yield f"it has {num_lives} lives, and the last messages to the engine in a life are not recorded"
    for words, event in (("a part of it was started again", RECOVERY), ("its engines were changed", ENGINES)):
        yield from (f"{words} while it ran ({detail})" for kind, detail, _ in notes if kind == event)
    frozen = (agent.name for agent in config.env.agents if not isinstance(agent, TrainedAgent))
    yield from (f"agent {name!r} has an engine of its own, which is not recorded" for name in frozen)
    if config.learner.served_teachers:
        yield "a teacher has an engine of its own, which is not recorded"
    if config.launch.rollouts:
        yield (
            f"launch.rollouts={config.launch.rollouts}, and the order in which its engine got the messages of several "
            "processes is not recorded"
        )
    if config.flow.pivots is not None:
        yield "flow.pivots is set, and the moments when branches were requested are not recorded"
    if not config.engine.can.seeds:
        yield f"engine.kind={config.engine.kind!r}, whose draws do not follow from a seed"
    if config.engine.count > 1:
        yield f"engine.count={config.engine.count}, and which engine served what is not recorded"
    yield from _find_accidents(ledger)
    path = run_dir / interleaving_file("engine")
    if not path.exists() or not (run_dir / FACTS_FILE).exists():
        yield f"{path.name} or {FACTS_FILE} is missing: the messages to its engine are not recorded"
    steps = ledger.steps()
    if not steps or sorted(steps) != list(range(len(steps))):
        yield f"its ledger holds {len(steps)} steps, whose numbers do not run from 0 without a gap"


def _find_accidents(ledger: Ledger) -> Iterator[str]:
    """Yield the events in ``ledger`` that a replay would not repeat, in words: episodes that were ended by a clock or a
    crash, and groups that carried no loss because their columns could not be read."""
    conservation = ledger.conservation()
    by_clock = UNREPEATABLE_CAUSES & (conservation.groups.dropped.keys() | conservation.episodes.dropped.keys())
    if by_clock:
        yield f"episodes of it were ended by a clock or a crash: {', '.join(sorted(by_clock))}"
    for step, groups in sorted(ledger.lost().items()):  # no groups if an older version of Headrace recorded none
        names = groups_in_words([each.number for each in groups]) if groups else "groups"
        reason = groups[0].why if groups else "their numbers are not recorded"
        yield f"columns of {names} could not be read when step {step} was trained: {reason}"


def _make_refusal(run_dir: Path, reason: str) -> ConfigError:
    """Return the error to raise if the run in ``run_dir`` cannot be repeated. ``reason`` is the end of a sentence."""
    return ConfigError(
        f"the run in {run_dir} cannot be replayed: {reason}",
        remedy="replay another run; headrace ledger RUN --replay trains the batches of any",
    )
