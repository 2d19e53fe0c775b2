"""Several runs, called stages, from one file. Each begins with the final weights of the stage before.

    model.path ──▶ 1-sft ──▶ 1-sft/model ──▶ 2-dpo ──▶ 2-dpo/model ──▶ 3-rl ──▶ 3-rl/model
        │              └── measured with the table [eval], if present, before the next stage begins
        └── measured too

Each stage is a run with a run directory of its own. ``stages.json`` in the directory of all stages contains the results
of the stages that have ended. A stage has ended when its ``model`` directory exists, which is created atomically. So
stages that were killed at any moment can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field

from headrace.base.config import Section, load_toml, merge, parse_override, validate
from headrace.base.errors import ConfigError, DataError
from headrace.flow.ledger.opening import has_ledger
from headrace.run.session import Evaluation, RunConfig, evaluate, load_config
from headrace.run.session import train as train_by_rewards
from headrace.run.session.config import with_absolute_paths
from headrace.run.session.directory import read_summary, write_json
from headrace.run.session.exporting import export
from headrace.run.session.prepare import Inputs, prepare
from headrace.wings.supervised.config import VERBS, TuningConfig, load_tuning, with_absolute_rows
from headrace.wings.supervised.preparing import prepare_tuning, settings_hash
from headrace.wings.supervised.session import tune

STAGES_FILE = "stages.json"
MODEL = "model"
"""The directory of a stage's final weights, in the directory of the stage."""
BASE = "base"
"""The name of the result for the weights with which the first stage begins."""
Tree = dict[str, Any]
StageKind = Literal["sft", "dpo", "distill", "rl"]


def _as_tree(value: Any) -> Any:
    """Return a table ``[[stage]]`` as its ``kind`` and its other sections as ``settings``. Raises ``ValueError`` for a
    value without a kind."""
    if not isinstance(value, dict) or "kind" not in value:
        raise ValueError('every [[stage]] needs kind = "sft", "dpo", "distill" or "rl"')
    return {"kind": value["kind"], "settings": {key: part for key, part in value.items() if key != "kind"}}


class StageSection(Section):
    """A table ``[[stage]]``: its kind, and the settings of a run file of that kind."""

    kind: StageKind
    """``sft``, ``dpo``, ``distill``, or ``rl`` (``headrace train``)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The sections of the stage, without the model's path and the directory of the run."""


class WholeSection(Section):
    """The section ``[run]`` of a file of stages."""

    dir: str
    """The directory of all stages; each stage has a directory of its own in it."""


class StagesConfig(Section):
    """The content of a file of stages, validated."""

    model: dict[str, Any]
    """The section ``[model]`` of every stage: ``path`` is the model of the first."""
    run: WholeSection
    """The directory of all stages."""
    observe: dict[str, Any] = Field(default_factory=dict)
    """The section ``[observe]`` of every stage that has none of its own."""
    eval: dict[str, Any] = Field(default_factory=dict)
    """The sections of a run file of ``headrace train`` that say how weights are measured before the first stage and
    after every stage; empty: they are not."""
    stage: tuple[Annotated[StageSection, BeforeValidator(_as_tree)], ...]
    """The stages in their order."""


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a stage that has ended. The weights with which the first stage begins also have a result, named
    ``base``."""

    name: str
    """The stage's number from 1 and its kind, as in ``2-dpo``; ``base`` for the weights before the first stage."""
    model: str
    """The directory of the weights."""
    settings: str = ""
    """A hash of the stage's settings, which reveals a change; empty for ``base``."""
    steps: int = 0
    """The number of optimizer steps of the stage; 0 for ``base``."""
    mean_reward: float | None = None
    """The mean reward of the evaluation ``[eval]``; ``None`` if there was none."""
    pass_at: dict[int, float] = {}
    """pass@k by k: the share of tasks that at least one of k attempts solves."""


class StagesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``stages.json``: the results of the stages so far, and whether they still run."""

    status: str
    """``running``, ``finished`` or ``stopped`` (by a signal or an alarm)."""
    stopped_by: str = ""
    """The signal that stopped the stages; empty if none did."""
    results: list[StageResult] = []
    """The results of ``base`` and of every stage that has ended, in order."""
    run_dir: str
    """The directory of all stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One stage of a file: its settings, and its run directory."""

    number: int
    """The number of the stage in the file, from 1."""
    kind: StageKind
    settings: Tree
    """The sections of the stage's run file, without the model's path and the directory."""
    directory: Path
    """The directory of the stage's run."""

    @property
    def name(self) -> str:
        """The stage's number and kind, as in ``2-dpo``."""
        return f"{self.number}-{self.kind}"

    @property
    def model(self) -> Path:
        """The directory of the stage's final weights."""
        return self.directory / MODEL

    def fingerprint(self) -> str:
        """Return a hash of the settings, without settings that only affect the display."""
        return settings_hash({key: part for key, part in self.settings.items() if key != "observe"})

    def config(self, model: str) -> TuningConfig | RunConfig:
        """Return the validated settings of the stage's run, which begins with the weights in the directory ``model``: a
        :class:`RunConfig` for the kind ``rl``, else the settings of the verb with the name of the kind. Raises
        :class:`~headrace.base.errors.ConfigError`, whose text names the stage."""
        tree = merge(self.settings, {"model": {"path": model}, "run": {"dir": str(self.directory)}})
        try:
            return load_tuning(VERBS[self.kind], tree) if self.kind in VERBS else load_config(tree)
        except ConfigError as error:
            error.problem = f"stage {self.name}: {error.problem}"
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a file, loaded and validated by :func:`load_stages`."""

    base: str
    """The model with which the first stage begins."""
    directory: Path
    """The directory of all stages."""
    eval_settings: Tree
    """The table ``[eval]``, the settings of the evaluation of weights; empty: weights are not evaluated."""
    stages: Sequence[StageRun]
    """The stages in their order."""


def load_stages(source: str | Path | Tree, overrides: Sequence[str] = ()) -> Stages:
    """Return the stages of ``source``, a file or a tree, with the pairs ``key=value`` of ``overrides`` applied. The key
    of a stage's setting contains the stage's number: ``stage.2.learner.lr=1e-6``."""
    tree = (
        source if isinstance(source, dict) else _resolve_paths(load_toml(Path(source)), Path(source).resolve().parent)
    )
    if not isinstance(tree.get("stage"), list) or not tree["stage"]:
        raise ConfigError("the file has no [[stage]]", remedy="write one, or use headrace sft, dpo or train")
    tree = _resolve_paths(_apply_overrides(tree, [parse_override(text) for text in overrides]), Path.cwd())
    config = validate(StagesConfig, tree)
    if not config.model.get("path"):
        raise ConfigError("model.path is missing", remedy="set it to the model with which the first stage begins")
    stages = []
    for number, each in enumerate(config.stage, start=1):
        _refuse_own_paths(number, each)
        settings = merge({"model": config.model, "observe": config.observe}, each.settings)
        directory = Path(config.run.dir) / f"{number}-{each.kind}"
        stages.append(StageRun(number=number, kind=each.kind, settings=settings, directory=directory))
    return Stages(
        base=config.model["path"], directory=Path(config.run.dir), eval_settings=config.eval, stages=stages
    )  # fmt: skip


def _resolve_paths(tree: Tree, home: Path) -> Tree:
    """Return ``tree``, the content of a file of stages, with every relative path resolved against the directory
    ``home``, also in its stages."""
    found = with_absolute_paths(tree, home)
    if isinstance(tree.get("eval"), dict):
        found["eval"] = with_absolute_paths(tree["eval"], home)
    if isinstance(tree.get("stage"), list):
        found["stage"] = [
            (with_absolute_rows if each.get("kind") in VERBS else with_absolute_paths)(each, home)
            if isinstance(each, dict)
            else each
            for each in tree["stage"]
        ]
    return found


def _apply_overrides(tree: Tree, changes: Sequence[Tree]) -> Tree:
    """Return ``tree``, the content of a file of stages, merged with ``changes``, the parsed overrides of the command
    line. An override of a stage has the stage's number as key. Raises :class:`~headrace.base.errors.ConfigError` for a
    number that no stage has."""
    for change in changes:
        of_stages = change.pop("stage", {})
        tree = merge(tree, change)
        for number, settings in of_stages.items():
            stages = list(tree["stage"])
            if not number.isdigit() or not 1 <= int(number) <= len(stages):
                raise ConfigError(
                    f"--set stage.{number}: there is no such stage", remedy=f"give a number from 1 to {len(stages)}"
                )
            stages[int(number) - 1] = merge(stages[int(number) - 1], settings)
            tree = {**tree, "stage": stages}
    return tree


def _refuse_own_paths(number: int, stage: StageSection) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if stage ``number`` sets ``model.path`` or ``run.dir``, which
    follow from its position among the stages."""
    for section, key in (("model", "path"), ("run", "dir")):
        table = stage.settings.get(section)
        if isinstance(table, dict) and key in table:
            raise ConfigError(
                f"stage {number}-{stage.kind} sets {section}.{key}, which follows from the stages: each begins with "
                "the weights of the one before, in a directory of run.dir",
                remedy=f"leave {section}.{key} out of [[stage]]",
            )


def run_stages(
    source: str | Path | Tree | Stages, *, resume: bool = False, tell: Callable[[str], None] = lambda line: None
) -> StagesSummary:
    """Run the stages of ``source``, a file, one after the other, and return the content of ``stages.json``.

    All stages are checked before the first begins. ``resume`` continues with the stage that was stopped or killed;
    stages that have ended are not repeated. ``tell`` is called with one line when a stage begins. Raises
    :class:`~headrace.base.errors.HeadraceError`.
    """
    stages = source if isinstance(source, Stages) else load_stages(source)
    before = read_stages(stages.directory)
    if before is not None and not resume:
        raise ConfigError(
            f"run.dir={str(stages.directory)!r} holds stages already",
            remedy="add --resume to go on, or choose another run.dir",
        )
    if before is None and resume:
        raise ConfigError(
            f"run.dir={str(stages.directory)!r} holds no stages to resume",
            remedy="leave --resume out, or correct run.dir",
        )
    results = {each.name: each for each in before.results} if before else {}
    _refuse_changed(stages, results)
    check_stages(stages, results)
    stages.directory.mkdir(parents=True, exist_ok=True)
    return _StageRunner(stages, results, tell).run()


def read_stages(directory: Path) -> StagesSummary | None:
    """Return the content of ``stages.json`` in ``directory``; ``None`` if there is no such file. Raises
    :class:`~headrace.base.errors.DataError` if it is damaged."""
    try:
        return msgspec.json.decode((directory / STAGES_FILE).read_bytes(), type=StagesSummary)
    except OSError:
        return None
    except msgspec.DecodeError as error:
        raise DataError(f"{directory / STAGES_FILE} is damaged: {error}", remedy="restore it from a copy") from None


def check_stages(stages: Stages, ended: dict[str, StageResult] | None = None) -> None:
    """Check every stage that is not in ``ended``, with its rows and its reward, and the table ``[eval]``. The checks
    use the model of the first stage, because the weights of later stages do not exist yet. Raises
    :class:`~headrace.base.errors.HeadraceError`."""
    for stage in stages.stages:
        if ended and stage.name in ended:
            continue
        config = stage.config(stages.base)
        if isinstance(config, TuningConfig):
            prepare_tuning(config)
        else:
            prepare(config, Inputs(thorough=True))
    if stages.eval_settings:
        prepare(_eval_config(stages, stages.base), Inputs(thorough=True), training=False)


def _eval_config(stages: Stages, model: str) -> RunConfig:
    """Return the settings of the evaluation ``[eval]`` of the weights in the directory ``model``."""
    try:
        return load_config(merge(stages.eval_settings, {"model": {"path": model}}))
    except ConfigError as error:
        error.problem = f"[eval]: {error.problem}"
        raise


def _refuse_changed(stages: Stages, results: dict[str, StageResult]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if a stage that has ended was changed in the file or removed
    from it, because the later stages depend on its weights. ``results`` are the results of the stages that have
    ended."""
    stages_by_name = {stage.name: stage for stage in stages.stages}
    for name, result in results.items():
        if name == BASE:
            changed = result.model != stages.base
        else:
            changed = name not in stages_by_name or stages_by_name[name].fingerprint() != result.settings
        if changed:
            what = "model.path has" if name == BASE else f"the settings of the stage {name} have"
            raise ConfigError(
                f"{what} changed since it ended: the stages after it begin with what it has made",
                remedy="put them back, or choose another run.dir",
            )


class _StageRunner:
    """Runs the stages of a file one after the other, evaluates their weights, and writes ``stages.json``."""

    def __init__(self, stages: Stages, results: dict[str, StageResult], tell: Callable[[str], None]) -> None:
        """Create the runner of ``stages``. ``results`` are the results of earlier processes by the name of the stage.
        ``tell`` is called with one line when a stage or an evaluation begins."""
        self._stages, self._results, self._tell = stages, results, tell

    def run(self) -> StagesSummary:
        """Run all stages that have not ended, and stop at a stage that does not finish. Return the results, with the
        status ``finished`` or ``stopped``."""
        base = self._stages.base
        self._write("running")
        if BASE not in self._results:
            self._record(StageResult(name=BASE, model=base))
        model = base
        for stage in self._stages.stages:
            if stage.name not in self._results:
                self._tell(f"stage {stage.name}: begins with {model}")
                status, stopped_by, steps = self._run_stage(stage, model)
                if status != "finished":
                    return self._write("stopped", stopped_by)
                weights, settings = str(stage.model), stage.fingerprint()
                self._record(StageResult(name=stage.name, model=weights, settings=settings, steps=steps))
            model = str(stage.model)
        return self._write("finished")

    def _run_stage(self, stage: StageRun, model: str) -> tuple[str, str, int]:
        """Run or resume a stage from the weights in the directory ``model``, and export its final weights when it has
        finished. Return the status of its run, the signal that stopped it (empty for none), and its number of steps."""
        has_begun = has_ledger(stage.directory)
        summary = read_summary(stage.directory) if has_begun else None
        if summary is None or summary["status"] != "finished":
            config = stage.config(model)
            if isinstance(config, TuningConfig):
                tuned = tune(config, resume=has_begun)
                status, stopped_by, steps = tuned.status, tuned.stopped_by, tuned.steps
            else:
                trained = train_by_rewards(config, resume=has_begun)
                status, stopped_by, steps = trained.status, trained.stopped_by, trained.steps
        else:
            status, stopped_by, steps = "finished", "", summary["steps"]
        if status == "finished" and not stage.model.exists():
            export(stage.directory, stage.model)
        return status, stopped_by, steps

    def _record(self, result: StageResult) -> None:
        """Evaluate the weights of ``result`` if there is a table ``[eval]``, and write the result to
        ``stages.json``."""
        if self._stages.eval_settings:
            self._tell(f"measuring {result.name}")
            measured: Evaluation = evaluate(_eval_config(self._stages, result.model))
            shares = {k: estimate.value for k, estimate in measured.pass_at.items()}
            result = msgspec.structs.replace(result, mean_reward=measured.mean_reward, pass_at=shares)
        self._results[result.name] = result
        self._write("running")

    def _write(self, status: str, stopped_by: str = "") -> StagesSummary:
        """Write the present results to ``stages.json``, and return its content. ``status`` is ``running``, ``finished``
        or ``stopped``; ``stopped_by`` is the signal that stopped the stages."""
        summary = StagesSummary(
            status=status,
            stopped_by=stopped_by,
            results=list(self._results.values()),
            run_dir=str(self._stages.directory),
        )
        write_json(self._stages.directory / STAGES_FILE, summary)
        return summary
