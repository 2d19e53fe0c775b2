"""Settings of the engines (the table ``[engine]`` of a run file), and the description of a kind of engine: its
settings, its capabilities and how it is opened. Kinds are ``native``, which computes in a process of Headrace, and
servers such as vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from headrace.base.config import Section, validate
from headrace.base.config.kinds import NameOf
from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry, make_class_check
from headrace.engine import structure
from headrace.engine.capabilities import Capabilities
from headrace.models.devices import AUTO, CPU, DeviceName, Devices

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.base import EngineCore
    from headrace.models.config import ModelConfig

MIN_TEMPERATURE = 0.01
"""The lowest sampling temperature other than 0: below it, scaled logits overflow 32-bit floats. Temperature 0 always
takes the most likely token."""

SHARED_CACHE_SHARE = 0.3
"""The share of the free memory that the cache takes by default. The rest is left for a learner on the same device,
whose optimizer state is not allocated yet."""
EXCLUSIVE_CACHE_SHARE = 0.9
"""The default share on a GPU that no learner uses. The rest is for the activations of a forward pass."""


class EngineSettings(Section):
    """The settings that only one kind of engine has: its table ``[engine.server]``. This base class has none; a kind
    with settings of its own derives from it."""

    def for_engine(self, index: int) -> EngineSettings:
        """Return the settings of the engine with index ``index`` in a run of several engines."""
        return self

    def refuse_run(self, *, count: int, width: int, start_timeout_s: float) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for settings that conflict with ``count`` engines
        (``engine.count``), with ``width`` GPUs per engine, or with ``launch.start_timeout_s``, the seconds that an
        engine may take to start. This base class refuses nothing."""

    @property
    def is_fixed(self) -> bool:
        """Whether the engines are servers that run already, so that their number cannot be changed while a run goes on.
        False in this base class."""
        return False

    def refuse_start(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for settings that are still read but no longer supported: a
        run file of an older version of Headrace can be loaded with them, but no engine is started."""

    def sentence(self, kind: str) -> str:
        """Return a sentence about where an engine of this ``kind`` runs, for the summary of a run; empty if there is
        none, as in this base class."""
        return ""

    @property
    def quantises(self) -> bool:
        """Whether these settings make the engine compute in 8 bits or fewer."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The arguments that an engine is opened with, in its own process. The process that runs the engine makes the
    record, and passes it to :attr:`EngineKind.open`."""

    config: EngineConfig
    model: ModelConfig
    max_context: int
    """The most tokens of a prompt and its completion together."""
    deadline_s: float
    """The longest time to wait for new weights."""
    record_kept: bool
    """Whether requests will record the kept-set of each token."""
    record_routing: bool
    """Whether requests will record the routing of each token."""
    sleeps: bool
    """Whether the engine has to free its memory while a learner computes."""
    own_weights: bool
    """Whether the engine serves the weights of its model directory as version 0, without a learner that sends
    others."""
    history: Path | None
    """The file in which the engine keeps its history of answers, if it drafts tokens from one; ``None``: in memory
    alone."""
    receive: Callable[[Mapping[str, Tensor]], Any]
    """Open the :class:`~headrace.sync.receiver.Receiver` that receives new versions of these tensors. The receiver
    stays open until the engine's process ends."""
    adopt: Callable[[EngineCore, Mapping[str, Tensor]], None]
    """Stage and commit these tensors as version 0, as if a learner had sent them. Called if ``own_weights`` is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEngine:
    """An opened engine, ready to be driven by a step loop."""

    core: EngineCore
    device: str
    """The device on which the engine computes."""
    address: str = ""
    """The address to which a learner sends new weights; empty where the learner does not need one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the engine that are recorded in the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The description of a kind of engine: what Headrace needs before it opens an engine of this kind.

    A package registers a kind by an entry point in its ``pyproject.toml``,
    ``[project.entry-points."headrace.engines"]``. The module of this object is imported when a run file names it, so it
    should import the engine itself only in ``open``.
    """

    capabilities: Capabilities
    open: Callable[[EngineSetup], AbstractContextManager[OpenedEngine]]
    """Open an engine, and close it when the context ends. Raises :class:`~headrace.base.errors.ConfigError` if the
    machine cannot provide what the settings require."""
    settings: type[EngineSettings] = EngineSettings
    """The section that ``[engine.server]`` is validated as."""
    unread: frozenset[str] = frozenset()
    """The settings of ``[engine]`` that this kind does not use. A run file that sets one of them is refused."""


ENGINES = Registry[EngineKind](
    group="headrace.engines",
    setting="engine.kind",
    rows={"native": "headrace.engine.embedded:NATIVE"},
    check=make_class_check(EngineKind),
)
"""The registry behind ``engine.kind``. The wing ``servers`` registers vLLM and SGLang."""


class EngineConfig(Section):
    """Settings of sampling and of the batch."""

    kind: Annotated[str, NameOf(ENGINES)] = "native"
    """``native``: the embedded engine. ``vllm``, ``sglang``: a server of that kind, started on this machine. An
    installed package can offer others. docs/engines.md lists the capabilities of each; a run that needs a missing one
    is refused."""
    server: SerializeAsAny[EngineSettings] = EngineSettings()
    """The settings that only this ``kind`` of engine has; for ``vllm`` and ``sglang``, the settings of the server."""
    device: DeviceName = AUTO
    """The device of the engine: ``cpu``, ``cuda`` or ``cuda:N``. ``auto``: the last GPU that torch sees, or the
    processor where there is none."""
    tensor: int = Field(default=1, ge=1, le=64)
    """The number of GPUs of one machine among which an engine divides every layer (tensor parallelism), for models that
    do not fit one; for ``vllm`` and ``sglang``. On processors, the number of processes."""
    pipeline: int = Field(default=1, ge=1, le=64)
    """The number of parts, of ``tensor`` GPUs each, among which an engine divides its layers (pipeline parallelism);
    for ``vllm`` and ``sglang``."""
    max_new_tokens: int = Field(default=256, ge=1)
    """The longest completion, in tokens."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    """The sampling temperature during training. The learner uses the same."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many most likely tokens, and from those exactly as likely as the last of them; 0: from
    all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the most likely tokens whose probabilities together reach this value; 1: from all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample only from tokens at least this fraction as likely as the most likely one; 0: from all."""
    max_sequences: int = Field(default=64, ge=1)
    """The most sequences in the batch at once."""
    max_context: int | None = Field(default=None, ge=2)
    """The most tokens of a prompt and its completion together. Unset: the longest prompt of the data plus
    ``max_new_tokens``."""
    max_step_tokens: int = Field(default=2048, ge=1)
    """The most tokens of one step. Decoding sequences come first; pieces of prompts fill the rest."""
    max_waiting: int = Field(default=65_536, ge=1)
    """The most requests that may wait to join the batch; a further request is refused."""
    cache_tokens: int | None = Field(default=None, ge=1)
    """The number of tokens whose keys and values fit the cache. Unset: as many as ``max_sequences`` sequences of
    ``max_context`` tokens could need, but at most ``cache_share`` of the free memory."""
    cache_share: float | None = Field(default=None, gt=0, le=1)
    """The largest share of the memory that is free after the engine has loaded which the cache may take. Unset: 0.9 on
    a GPU that no learner uses, else 0.3, which leaves the rest to the learner."""
    state_snapshots: int | None = Field(default=None, ge=0)
    """The most snapshots of the states of recurrent layers that are kept, so that sequences can share a prefix; each
    needs the memory of one sequence's states. Unset: as many as ``max_sequences``. Without effect for models whose
    layers only attend."""
    fork_memory: int = Field(default=256, ge=0)
    """The number of ended sequences that can still be forked: the tokens of that many are kept."""
    max_pinned_versions: int = Field(default=2, ge=1)
    """The most older versions that sequences may be pinned to at once; each needs a copy of the model. Sequences that
    would need one more wait until one is free."""
    stream_steps: int = Field(default=8, ge=1)
    """The number of steps over which the commit mode ``stream`` spreads the exchange of the parameters."""
    kernels: Literal["auto", "off"] = "auto"
    """``auto``: parts of the model run as fused kernels where this machine has them. ``off``: none does."""
    speculation: Literal["off", "history", "heads"] = "off"
    """``history``: draft tokens from earlier answers to the same prompt and from a sequence's own text, and check all
    of a draft in one pass. ``heads``: where the history has no likely draft, also from the prediction head of the
    checkpoint (multi-token prediction), for the kinds of models that docs/engines.md lists. Tokens, logprobs and all
    records are the same as with ``off``. ``off``: one token of a sequence in a pass."""
    draft_tokens: int = Field(default=8, ge=1, le=64)
    """The most tokens of a sequence that are drafted for one pass. How many are drafted depends on their chances."""
    history_tokens: int = Field(default=1_000_000, ge=1024, le=2**28)
    """The number of tokens of earlier answers that are kept for drafts, the newest ones. Each takes about 40 bytes of
    memory."""
    flush_tokens: int = Field(default=64, ge=1)
    """The tokens of a running sequence are reported each time there are this many new ones, and when it ends."""

    @property
    def can(self) -> Capabilities:
        """The capabilities of this kind of engine (``kind``) on this ``device``."""
        return ENGINES.load(self.kind).capabilities.on(self.device)

    @property
    def width(self) -> int:
        """The number of GPUs that one engine computes on."""
        return self.tensor * self.pipeline

    @property
    def can_fuse(self) -> bool:
        """Whether the model may run on fused kernels: this kind of engine reads the setting ``kernels``, and it is not
        ``off``."""
        return self.kernels == "auto" and "kernels" not in ENGINES.load(self.kind).unread

    def refuse_server(self, caller: str) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` unless this kind of engine can compute in the caller's
        process. ``caller`` names the caller in the error, such as a command."""
        if not self.can.embedded:
            raise ConfigError(
                f"engine.kind={self.kind!r} is a server of its own, and {caller} computes in its own process",
                remedy="set engine.kind = 'native'",
            )

    @field_validator("server", mode="before")
    @classmethod
    def _validate_server(cls, server: Any, info: ValidationInfo) -> EngineSettings:
        """Validate ``server``, the table ``[engine.server]`` or its settings, as the section of the chosen
        ``engine.kind``, and return that section. A kind without settings of its own gets an empty one."""
        kind = info.data.get("kind", "native")  # an unknown kind has been refused before
        section = ENGINES.load(kind).settings
        tree = server.model_dump() if isinstance(server, EngineSettings) else server
        if section is EngineSettings and tree:
            _refuse_unused_server(kind, tree)
            return section()
        return validate(section, tree, "engine.server")

    @model_validator(mode="after")
    def _refuse_unread_settings(self) -> Self:
        """Raise :class:`~headrace.base.errors.ConfigError` for a changed setting that the chosen kind of engine does
        not read, so that no setting is without effect."""
        fields = type(self).model_fields
        for name in sorted(ENGINES.load(self.kind).unread):
            given = self.__dict__[name]
            if given != fields[name].default:
                raise ConfigError(
                    f"engine.{name}={given!r} is of engine.kind='native': engine.kind={self.kind!r} decides that by "
                    "itself",
                    remedy=f"leave it out, or say it in the words of {self.kind}, below [engine.server]",
                )
        return self

    @model_validator(mode="after")
    def _refuse_several_devices(self) -> Self:
        """Refuse tensor and pipeline parallelism for an engine that computes on one device."""
        if self.width > 1 and not self.can.gangs:
            name, value = ("tensor", self.tensor) if self.tensor > 1 else ("pipeline", self.pipeline)
            raise ConfigError(
                f"engine.{name}={value} divides an engine among devices, and engine.kind={self.kind!r} computes on one",
                remedy="set engine.kind = 'vllm' or 'sglang'; several engines, each with the whole model, are "
                "engine.count",
            )
        return self

    def on(self, device: str, *, shared: bool) -> Self:
        """Return a copy of these settings for ``device``. ``cache_share`` gets its default if it is not set, which
        leaves room for a learner if the device is ``shared`` with one or is the processor.

        >>> EngineConfig().on("cuda:1", shared=False).cache_share, EngineConfig().on("cuda:0", shared=True).cache_share
        (0.9, 0.3)
        """
        alone = device != CPU and not shared
        share = self.cache_share or (EXCLUSIVE_CACHE_SHARE if alone else SHARED_CACHE_SHARE)
        return self.model_copy(update={"device": device, "cache_share": share})


def _refuse_unused_server(kind: str, tree: Any) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a table ``tree`` of ``[engine.server]`` beside a ``kind``
    that has no such settings. A table that holds only defaults of another kind is accepted: run files that Headrace
    wrote before each kind had a section of its own contain it."""
    owners = {name: ENGINES.load(name).settings for name in ENGINES.own_names()}
    owners = {name: section for name, section in owners.items() if section is not EngineSettings}
    if any(validate(section, tree, "engine.server") == section() for section in owners.values()):
        return
    raise ConfigError(
        f"engine.server is set, and engine.kind={kind!r} has none",
        remedy=f"set engine.kind = {' or '.join(map(repr, owners))}, or leave [engine.server] out",
    )


class StructureConfig(Section):
    """The settings of ``[engine.structure]``: the form that every answer of a run must have, given as exactly one of a
    JSON schema, a regular expression and a choice of texts."""

    json_schema: dict[str, Any] | None = None
    """The schema that an answer follows, as a table."""
    regex: str = ""
    """The expression that an answer matches from beginning to end."""
    choice: tuple[str, ...] = ()
    """The texts one of which an answer is."""

    @model_validator(mode="after")
    def _require_one_form(self) -> Self:
        """Refuse a structure that is not given in exactly one of the three ways."""
        given = [name for name in type(self).model_fields if self.__dict__[name] not in (None, "", ())]
        if len(given) != 1:
            raise ConfigError(
                f"engine.structure has {' and '.join(given) or 'nothing'}, and it takes one of json_schema, regex and "
                "choice",
                remedy="keep one of them, or leave engine.structure out",
            )
        return self

    @property
    def description(self) -> str:
        """The structure as one text, in the form of a request to an engine
        (:attr:`headrace.base.types.sampling.Sampling.structure`)."""
        if self.json_schema is not None:
            return structure.json_schema(self.json_schema)
        return structure.regex(self.regex) if self.regex else structure.choice(self.choice)


class FleetConfig(EngineConfig):
    """The settings of all engines of a run: the settings of a single engine, the number of engines, and the structure
    of answers."""

    structure: StructureConfig | None = None
    """The structure of every answer, in training and evaluation: tokens that violate it cannot be drawn, and log π is
    normalised over the allowed tokens. Needs ``headrace[structured]``. Unset: anything."""

    count: int = Field(default=1, ge=1, le=64)
    """The number of engines: processes of this machine that share the requests. ``launch.engine_threads`` is divided
    among all of them, ``cache_share`` among those on one device; ``max_sequences``, ``cache_tokens``, ``max_waiting``
    and ``fork_memory`` apply to each."""

    def for_engine(self, place: int, devices: Devices) -> EngineConfig:
        """Return the settings of the engine with index ``place``, on its own device of ``devices``. Engines on one
        device divide its ``cache_share`` equally.

        >>> two = Devices(engines=("cuda:1", "cuda:1"), learner=("cuda:0",))
        >>> FleetConfig(count=2).for_engine(0, two).cache_share
        0.45
        """
        device = devices.engines[place]
        settled = self.on(device, shared=device in devices.learner)
        share = (settled.cache_share or 0.0) / devices.engines.count(device)
        one = EngineConfig.model_validate({**settled.model_dump(exclude={"count", "structure"}), "cache_share": share})
        return one.model_copy(update={"server": one.server.for_engine(place)})
