"""The settings of ``headrace sft``, ``dpo`` and ``distill``, which train on the rows of a dataset: the sections of
their run files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from headrace.algo.losses.preference import AnyPreferenceLoss
from headrace.algo.losses.supervised import Distill, Dpo
from headrace.base.config import Section, load_toml, merge, parse_override, validate
from headrace.base.config.addresses import refuse_secret
from headrace.base.errors import ConfigError, nearest
from headrace.learner.auxiliary.config import OwnEngine
from headrace.learner.config import LearnerConfig
from headrace.models import ModelConfig
from headrace.run.observe.config import ObserveConfig
from headrace.run.session.config import with_absolute_paths

LossOn = Literal["assistant", "last", "all"]
"""The tokens of a row that carry loss."""


COLUMNS = (
    *("messages", "tools", "prompt", "completion", "text", "input_ids", "labels"),
    *("chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids", "label", "teacher_ids", "teacher_logprobs"),
)
"""The column names that the forms of rows use (rendering.py)."""


class SourceConfig(Section):
    """A table ``[[data.sources]]``: one file of rows, and how often its rows are trained."""

    path: str = Field(min_length=1)
    """A ``.jsonl``, ``.csv`` or ``.parquet`` file."""
    weight: float | None = None
    """The share of this source among the rows that are trained, relative to the other weights. Unset for all sources:
    every row of every source is trained once per epoch."""

    @model_validator(mode="after")
    def _weight_is_positive(self) -> Self:
        """Refuse a weight with which no row of the source would be trained."""
        if self.weight is not None and self.weight <= 0:
            raise ConfigError(
                f"data.sources: {self.path!r} has weight={self.weight:g}, so none of its rows would ever be trained",
                remedy="give it a weight above 0, or remove the source",
            )
        return self


class RowsConfig(Section):
    """The section ``[data]``: the rows to train on, the held-out rows, and the rules for reading them."""

    path: str = ""
    """A ``.jsonl``, ``.csv`` or ``.parquet`` file. Empty if rows are passed in Python or ``sources`` is set."""
    sources: tuple[SourceConfig, ...] = ()
    """Several files, a table ``[[data.sources]]`` for each, in place of ``path``."""
    eval_path: str = ""
    """A file of held-out rows in the same form, on which the loss is measured; empty: no evaluation."""
    columns: dict[str, str] = Field(default_factory=dict)
    """The names of the files' columns by the expected names: ``columns = { completion = "answer" }``."""
    loss_on: LossOn = "assistant"
    """The tokens that carry loss. ``assistant``: all turns of the assistant, or the completion. ``last``: the last turn
    of the assistant only. ``all``: every token but the first. A row of plain text has loss on every token but the
    first."""
    max_length: int | None = Field(default=None, ge=2)
    """The maximum length of a row, in tokens. Unset: the smaller of the model's context and
    ``learner.tokens_per_microbatch``."""
    long_rows: Literal["refuse", "skip", "cut"] = "refuse"
    """The handling of longer rows: the run is refused with the first of them (``refuse``), or they are left out
    (``skip``) or truncated (``cut``) and counted."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """The handling of rows that cannot be trained: the run is refused with the first of them (``refuse``), or they are
    left out, counted and listed in ``left_out.jsonl`` of the run directory (``skip``)."""
    shuffle: bool = True
    """Whether each epoch has a new random order of rows."""

    @model_validator(mode="after")
    def _columns_are_known(self) -> Self:
        """Refuse a mapping to a column name that no form of row uses."""
        unknown = next((name for name in self.columns if name not in COLUMNS), None)
        if unknown is not None:
            raise ConfigError(f"data.columns.{unknown}: no row is read by that name", remedy=nearest(unknown, COLUMNS))
        return self

    @model_validator(mode="after")
    def _sources_go_together(self) -> Self:
        """Refuse a path beside sources, and weights of only some sources."""
        if self.path and self.sources:
            raise ConfigError(f"data.path={self.path!r} and data.sources are both set", remedy="leave one of them out")
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            bare = self.sources[weighted.index(False)].path
            raise ConfigError(
                f"data.sources: {bare!r} has no weight, and others have one",
                remedy="give every source a weight, or none",
            )
        return self

    @property
    def files(self) -> tuple[SourceConfig, ...]:
        """Return the files to train on, as sources: ``sources``, or ``path`` as the only source; empty if rows are
        passed in Python."""
        return self.sources or ((SourceConfig(path=self.path),) if self.path else ())


class TuningSection(Section):
    """The section ``[run]``: the length of the run, its batches, its directory and its checkpoints."""

    dir: str = ""
    """The run's directory; empty: ``runs/``, the verb, and the date and time."""
    epochs: int = Field(default=1, ge=1)
    """The number of passes over the rows. With weights, as many rows are drawn as that many passes have."""
    steps: int | None = Field(default=None, ge=1)
    """The number of optimizer steps, in place of ``epochs``."""
    rows_per_step: int = Field(default=16, ge=1)
    """The number of rows (of ``headrace dpo``: pairs) that one optimizer step trains. The last step has the rest."""
    seed: int = Field(default=0, ge=0)
    """The seed of the order of rows."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Steps between snapshots. There is always one at the end, and one when the run is stopped."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The number of snapshots to keep."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between measurements of the held-out loss and of rewards; 0: only before the first step and after the
    last."""
    threads: int | None = Field(default=None, ge=1)
    """The number of threads that compute, of each rank if there are several. Unset: one for each processor core that
    this process may use, divided among the ranks."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        """Refuse a number of steps beside a number of epochs."""
        if self.steps is not None and self.epochs != 1:
            raise ConfigError(
                f"run.steps={self.steps} and run.epochs={self.epochs} are both set", remedy="leave one of them out"
            )
        return self


class TuningConfig(Section):
    """The sections of a run file that ``headrace sft``, ``dpo`` and ``distill`` share."""

    verb: ClassVar[str]
    """The name of the verb."""
    has_teacher: ClassVar[bool] = False
    """Whether the loss uses a teacher's log-probabilities."""
    model: ModelConfig
    """The model that is trained."""
    data: RowsConfig = RowsConfig()
    """The rows to train on, and the held-out rows."""
    learner: LearnerConfig = LearnerConfig(lr=1e-5, betas=(0.9, 0.999))
    """The optimizer, its schedule, and the reference policy."""
    eval: dict[str, Any] = Field(default_factory=dict)
    """The evaluation of rewards and pass@k: sections of a run file of ``headrace train`` without the model; empty: no
    evaluation. It runs at the same steps as the held-out loss, while training continues."""
    observe: ObserveConfig = ObserveConfig()
    """The display of the run, its writers, its alarms and its report."""
    run: TuningSection = TuningSection()
    """The length of the run, its batches, its seed and its directory."""

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, tree: Any) -> Any:
        """Fill in those defaults of ``[learner]`` that differ from the defaults of ``headrace train``."""
        if not isinstance(tree, dict) or not isinstance(tree.get("learner", {}), dict):
            return tree
        return {**tree, "learner": {**_LEARNER, **tree.get("learner", {})}}

    @model_validator(mode="after")
    def _learner_reads_rows(self) -> Self:
        """Refuse settings of the learner that supervised losses do not use, such as adapters of agents."""
        idle = {"learner.teachers": self.learner.teachers and not self.has_teacher, "learner.old": self.learner.old}
        if what := next((name for name, value in idle.items() if value), ""):
            raise ConfigError(f"{what} has no effect: the loss does not read it", remedy=f"leave {what} out")
        if self.model.adapter_agents:
            raise ConfigError(
                "model.lora.agents: rows have no agents, so one adapter is trained", remedy="leave it out"
            )
        return self


_LEARNER = {"lr": 1e-5, "betas": (0.9, 0.999)}
"""The defaults of ``[learner]`` that differ from ``headrace train``: training on given rows allows a higher learning
rate."""


class SftConfig(TuningConfig):
    """A run file of ``headrace sft``: cross-entropy on the rows."""

    verb: ClassVar[str] = "sft"


class ServerTeacher(Section):
    """The settings of a teacher on a server. The server must offer OpenAI's completions with the log-probabilities of
    prompts, and ``/detokenize``, as ``headrace serve`` and vLLM do."""

    base_url: str
    """The URL of its API, such as ``http://localhost:8000/v1``."""
    model: str = ""
    """The server's name for the model; unset: the first model that the server lists."""
    api_key_env: str = ""
    """The name of the environment variable with the API key; unset: no key is sent."""
    top_k: int = Field(default=20, ge=1)
    """The number of the teacher's likeliest entries that are compared at each token; the remaining probability counts
    as one more entry. ``headrace serve`` returns at most 20 entries, and vLLM too unless ``--max-logprobs`` is set."""
    concurrency: int = Field(default=8, ge=1)
    """The largest number of requests at the same time."""
    timeout_s: float = Field(default=120.0, gt=0)
    """The time limit of one request, in seconds. A request without an answer ends the run, which can be resumed."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        """Refuse a ``base_url`` that is not an HTTP address or contains a password."""
        refuse_secret("teacher.base_url", self.base_url, "name an environment variable that holds the key: api_key_env")
        if urlsplit(self.base_url).scheme not in ("http", "https") or not urlsplit(self.base_url).hostname:
            raise ConfigError(
                f"teacher.base_url={self.base_url!r} is not an address",
                remedy="write base_url = 'http://localhost:8000/v1'",
            )
        return self


class DistillConfig(TuningConfig):
    """A run file of ``headrace distill``: the divergence from a teacher's distribution, on the tokens of the rows.

    The teacher is ``[[learner.teachers]]``, a model that the learner or an engine of this process computes, or
    ``[teacher]``, a server; without both, the rows contain a teacher's scores of each token."""

    verb: ClassVar[str] = "distill"
    has_teacher: ClassVar[bool] = True
    loss: Distill = Distill(divergence="forward")
    """The divergence between teacher and model. ``forward`` by default: the rows are not the model's own samples."""
    teacher: ServerTeacher | None = None
    """A teacher on a server; unset: no server."""

    @property
    def has_engine(self) -> bool:
        """Return whether an engine of this process, or a server, scores all rows before the first step. If not, the
        learner computes the teacher in every step, or the rows contain its scores."""
        return self.teacher is not None or bool(self.learner.served_teachers)

    @model_validator(mode="after")
    def _there_is_one_teacher(self) -> Self:
        """Refuse several teachers, and engine settings that have no effect because the engine only scores given
        rows."""
        if self.teacher is not None and self.learner.teachers:
            raise ConfigError("[teacher] and [[learner.teachers]] are both set", remedy="leave one of them out")
        if len(self.learner.teachers) > 1:
            raise ConfigError(
                f"learner.teachers has {len(self.learner.teachers)}, and headrace distill reads one",
                remedy="leave one of them, or make a run of each teacher's rows",
            )
        for _, engine in self.learner.served_teachers.values():
            default = OwnEngine()
            idle = [name for name, value in engine if value != dict(default)[name]]
            if idle:
                raise ConfigError(
                    f"learner.teachers: engine.{idle[0]} has no effect: the teacher reads the tokens of the rows, in "
                    "this process and before the first step",
                    remedy="write engine = {}",
                )
        return self

    @model_validator(mode="after")
    def _nothing_is_idle(self) -> Self:
        """Refuse settings that have no effect, because distillation does not use them."""
        if self.data.eval_path or (self.run.eval_every and not self.eval):
            raise ConfigError(
                "data.eval_path and run.eval_every: a divergence from a teacher is not measured on held-out rows",
                remedy="leave them out, or measure rewards: a table [eval]",
            )
        if self.learner.reference is not None:
            raise ConfigError(
                "learner.reference has no effect: loss='distill' reads no reference", remedy="leave it out"
            )
        return self


class DpoConfig(TuningConfig):
    """A run file of ``headrace dpo``: a preference loss on pairs of answers, or on labelled answers."""

    verb: ClassVar[str] = "dpo"

    loss: Annotated[AnyPreferenceLoss, Field(discriminator="kind")] = Dpo()
    """The loss over a pair: ``dpo``, ``ipo``, ``simpo`` or ``orpo``; or ``kto``, over single answers with a label. A
    name alone stands for its table: ``loss = "simpo"`` is ``[loss] kind = "simpo"``."""

    @model_validator(mode="before")
    @classmethod
    def _name_is_a_table(cls, tree: Any) -> Any:
        """Replace the name of a loss, ``loss = "simpo"``, by the table that it stands for."""
        if isinstance(tree, dict) and isinstance(tree.get("loss"), str):
            return {**tree, "loss": {"kind": tree["loss"]}}
        return tree

    @model_validator(mode="after")
    def _reference_is_read(self) -> Self:
        """Refuse a reference policy that the loss does not use."""
        if self.learner.reference is not None and "log_ref" not in self.loss.columns():
            raise ConfigError(
                f"learner.reference has no effect: loss={self.loss.kind!r} has no reference policy",
                remedy="leave learner.reference out, or set loss = 'dpo', 'ipo' or 'kto'",
            )
        return self


VERBS: dict[str, type[TuningConfig]] = {kind.verb: kind for kind in (SftConfig, DpoConfig, DistillConfig)}
"""The settings of each verb, by its name."""
C = TypeVar("C", bound=TuningConfig)


def load_tuning(kind: type[C], source: str | Path | dict[str, Any] | TuningConfig, overrides: Sequence[str] = ()) -> C:
    """Return the validated settings of a run file as ``kind``, the class of one verb's settings. ``source`` is the path
    of the file, its content as a tree, or settings. ``overrides`` are ``section.key=value`` pairs to apply.

    Paths in a file are relative to its directory; paths in a tree and in ``overrides`` are relative to the working
    directory. Raises :class:`~headrace.base.errors.ConfigError`.
    """
    if isinstance(source, TuningConfig):
        tree: dict[str, Any] = source.model_dump(mode="json")
    elif isinstance(source, dict):
        tree = source
    else:
        tree = with_absolute_rows(load_toml(Path(source)), Path(source).resolve().parent)
    tree = merge(tree, *(parse_override(text) for text in overrides), whole_kinds=True)
    return validate(kind, with_absolute_rows(tree, Path.cwd()))


def with_absolute_rows(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return ``tree``, the content of a run file, with every relative path resolved against ``directory``, also in
    ``[eval]`` and ``[[data.sources]]``."""
    tree = with_absolute_paths(tree, directory)
    if isinstance(tree.get("eval"), dict):
        tree = {**tree, "eval": with_absolute_paths(tree["eval"], directory)}
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("sources"), list):
        sources = [
            {**each, "path": str(directory / Path(each["path"]).expanduser())}
            if isinstance(each, dict) and isinstance(each.get("path"), str) and each["path"]
            else each
            for each in data["sources"]
        ]
        tree = {**tree, "data": {**data, "sources": sources}}
    return tree
