"""The configuration of a run: the record of all sections (:class:`RunConfig`), the loading of run files, the checks
between sections, and the replacement of model names by directories.

A *tree* is a run file as nested dictionaries, section by section. A *hub name* is a model's name on the Hugging Face
Hub, such as ``Qwen/Qwen3-0.6B``, in place of a directory.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from headrace.base.config import leaves, load_toml, merge, parse_override, validate
from headrace.base.errors import ConfigError
from headrace.base.types.weights import Interrupt
from headrace.engine.capabilities import Capabilities
from headrace.models.hub import (
    Change,
    change_models,
    change_paths,
    is_hub_name,
    local_directory,
    pinned_path,
    same_repository,
)
from headrace.rollout.environments.program import with_absolute_files
from headrace.run.rules import FORMER_KEYS, refuse
from headrace.run.rules.sections import RunSections
from headrace.run.rules.settings import SETTINGS
from headrace.run.session.recipes import recipe

NATIVE = "set engine.kind = 'native'"
"""The remedy, for error messages, for a setting that the chosen engine does not support."""

RunFile = str | Path | Mapping[str, Any]
"""The path of a TOML file, or its tree."""


class RunConfig(RunSections):
    """The settings of a run: all sections of a run file, checked by the rules between sections."""

    former_keys: ClassVar[Mapping[str, str]] = FORMER_KEYS
    """The present name of each key that was renamed, by its former name."""

    @model_validator(mode="after")
    def _settings_go_together(self) -> RunConfig:
        """Refuse a run file that breaks a rule between settings of different sections (:data:`SETTINGS`), or settings
        that the chosen launcher (``launch.kind``), if it is one for clusters, or kind of engine does not support."""
        refuse(SETTINGS, self, self)
        if self.launch.cluster is not None:
            self.launch.cluster.refuse(self.launch, self.engine, self.learner, self.sync)
        _refuse_incapable(self)
        return self


def load_config(source: RunFile | RunConfig, overrides: Sequence[str] = (), *, like: str = "") -> RunConfig:
    """Return the checked configuration of the run file ``source``, with the ``section.key=value`` pairs of
    ``overrides`` applied.

    ``like`` names a recipe (:mod:`headrace.run.session.recipes`) for the settings that neither the run file nor
    ``overrides`` set. A table with another ``kind`` than the recipe's replaces the recipe's table as a whole.

    Paths in a TOML file are relative to the file. Paths in a tree and in ``overrides`` are relative to the working
    directory.

    >>> load_config({"model": {"path": "m"}}, ["flow.max_age=0"]).flow.max_age
    0
    """
    tree = read_run_tree(source)
    settings = recipe(like).settings if like else {}
    own = merge(tree, *(parse_override(text) for text in overrides))
    tree = with_absolute_paths(merge(settings, own, whole_kinds=True), Path.cwd())
    try:
        return validate(RunConfig, tree)
    except ConfigError as error:
        _name_recipe_settings(error, settings, tree, like)
        raise


def read_run_tree(source: RunFile | RunConfig) -> dict[str, Any]:
    """Return the settings of a run file as a tree, before they are checked. ``source`` is the path of the file, a tree,
    or checked settings. Paths in a file, which are relative to the directory of the file, become absolute."""
    if isinstance(source, RunConfig):
        return source.model_dump(mode="json")
    if isinstance(source, Mapping):
        return dict(source)
    return with_absolute_paths(load_toml(Path(source)), Path(source).resolve().parent)


def _name_recipe_settings(error: ConfigError, settings: Mapping[str, Any], tree: Mapping[str, Any], like: str) -> None:
    """Add to the text of ``error`` a list of the settings in it that come from the recipe ``like``, since the user does
    not find these in the run file. ``settings`` is the recipe's tree, and ``tree`` the merged tree that was refused."""
    from_recipe = {f"{path}={value!r}" for path, value in leaves(settings).items() if path in str(error)}
    named = sorted(from_recipe & {f"{path}={value!r}" for path, value in leaves(tree).items()})
    if named:
        error.problem += f" (the recipe {like!r} says {', '.join(named)})"
        error.remedy += ", or take another recipe"


_PATHS = ("data.path", "data.eval_path", "env.reward", "env.entry", "run.dir")
"""The dotted names of the settings whose value is a path, besides those of models."""
_TABLES = (("env", "rewards", "ref"),)
"""The lists of tables whose entries name a file: the section, the list, and the key whose value is
``file.py:function``."""


def with_absolute_paths(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the settings ``tree`` with absolute paths: every relative path in it is resolved against ``directory``.
    Hub names of models are kept."""

    def make_absolute(setting: str, path: str) -> str:
        """Return the value ``path`` of ``setting`` as an absolute path."""
        bridged = setting == "env.entry" and tree["env"].get("kind") == "bridge"
        return _absolute_bridge(path, directory) if bridged else _absolute_path(path, directory)

    changed = change_models(tree, lambda _, path: _absolute_model(path, directory))
    changed = change_paths(changed, make_absolute, _PATHS, _TABLES)
    return _with_absolute_command(_with_absolute_loss(changed, directory), directory)


def _absolute_path(path: str, directory: Path) -> str:
    """Return ``path``, which may begin with ``~``, as an absolute path; a relative path is resolved against
    ``directory``."""
    return str(directory / Path(path).expanduser())


def _absolute_model(path: str, directory: Path) -> str:
    """Return the absolute path of a model. A hub name is returned unchanged, unless ``directory`` has a directory with
    that name."""
    absolute = _absolute_path(path, directory)
    return path if is_hub_name(path) and not Path(absolute).exists() else absolute


def _with_absolute_command(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the settings ``tree`` with absolute paths for the files in ``env.command``, the command of a program that
    runs episodes, since the program runs in another working directory. A word of the command is such a file if
    ``directory`` contains it."""
    env = tree.get("env")
    command = env.get("command") if isinstance(env, dict) else None
    try:
        parts = shlex.split(command) if isinstance(command, str) else command
    except ValueError:  # the validation of settings reports a command that cannot be split
        return tree
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return tree
    absolute = with_absolute_files(parts, directory)
    return merge(tree, {"env": {"command": absolute}}) if absolute else tree


def _absolute_bridge(entry: str, directory: Path) -> str:
    """Return the entry ``LIBRARY/WHAT`` of a bridge, which names an environment of another library, with absolute paths
    for the Python files in ``WHAT`` that ``directory`` contains. ``WHAT`` is a command, or ``file.py:name``."""
    library, _, what = entry.partition("/")
    try:
        parts = shlex.split(what)
    except ValueError:  # the start of the command reports a command that cannot be split
        return entry
    files = [part.rpartition(":")[0] if ".py:" in part else part for part in parts]
    absolute = [
        str(directory / part) if file.endswith(".py") and os.path.isfile(directory / file) else part
        for part, file in zip(parts, files, strict=True)
    ]
    return entry if absolute == parts else f"{library}/{shlex.join(absolute) if len(absolute) > 1 else absolute[0]}"


def _with_absolute_loss(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the settings ``tree`` with an absolute path in the reference of a custom loss, ``file.py:function``, which
    is the value of ``algo.loss`` or of ``algo.loss.ref``. A relative path is resolved against ``directory``."""
    algo = tree.get("algo")
    loss = algo.get("loss") if isinstance(algo, dict) else None
    ref = loss.get("ref") if isinstance(loss, dict) else loss
    if not isinstance(ref, str) or ".py:" not in ref:
        return tree
    absolute = _absolute_path(ref, directory)
    return merge(tree, {"algo": {"loss": {"ref": absolute} if isinstance(loss, dict) else absolute}})


def _refuse_incapable(config: RunConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for the first setting that the chosen engine does not
    support."""
    engine, can = config.engine, config.engine.can
    refuse_interrupt(config, can)
    lora = config.model.lora
    truncated = engine.top_k > 0 or engine.top_p < 1 or engine.min_p > 0
    requirements = {
        "model.deterministic=true": (config.model.deterministic and not can.deterministic, "leave it out"),
        "model.lora, whose adapters alone travel": (lora is not None and not can.adapters, "leave it out"),
        f"room for model.lora.rank={lora.rank if lora else 0}": (
            lora is not None and can.max_rank is not None and lora.rank > can.max_rank,
            f"set it to {can.max_rank} or less",
        ),
        "model.lora.use_dora or experts": (
            lora is not None and (lora.use_dora or lora.experts) and not can.any_adapters,
            "leave them out",
        ),
        "engine.top_k, top_p or min_p": (truncated and not can.truncates, "leave them out"),
        "learner.keep_sampling_mask=true under engine.top_k, top_p or min_p": (
            truncated and config.learner.keep_sampling_mask and not can.kept_sets,
            "set it to false: log π is then that of the whole vocabulary",
        ),
        "engine.structure, with logprobs and kept-sets of the masked distribution": (
            engine.structure is not None and not can.structures,
            "leave it out",
        ),
        "entropies (observe.record_entropy, or an advantage that reads them)": (
            (config.observe.record_entropy or "entropies" in config.algo.advantage.reads) and not can.entropies,
            "leave them out",
        ),
        "flow.pivots, whose branches stay under the weights they leave": (
            config.flow.pivots is not None and not can.pins,
            "leave them out",
        ),
    }
    for feature, (lacking, instead) in requirements.items():
        if lacking:
            raise ConfigError(f"engine.kind={engine.kind!r} has no {feature}", remedy=f"{instead}, or {NATIVE}")
    engine.server.refuse_run(count=engine.count, width=engine.width, start_timeout_s=config.launch.start_timeout_s)


def refuse_interrupt(config: RunConfig, can: Capabilities) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the engine, whose capabilities are ``can``, does not support
    ``sync.interrupt``, which selects what happens to running sequences when new weights are committed."""
    mode = config.sync.interrupt
    if mode in can.interrupts:
        return
    supported = ", ".join(repr(supported_mode.value) for supported_mode in sorted(can.interrupts))
    unknown_versions = "does not say which tokens the old weights sampled"
    reason = "does not free its memory" if mode is Interrupt.SLEEP else unknown_versions
    raise ConfigError(
        f"engine.kind={config.engine.kind!r} cannot commit with sync.interrupt={mode.value!r}: it {reason}",
        remedy=f"set sync.interrupt to one of {supported}, or {NATIVE}",
    )


def with_local_models(config: RunConfig, *, weights: bool = True) -> RunConfig:
    """Return ``config`` with a local directory in place of each model's hub name. A model that is not in the cache is
    downloaded from the hub.

    If ``weights`` is false, only configurations and tokenizers are downloaded. Raises
    :class:`~headrace.base.errors.ModelError` if a model cannot be found or downloaded.
    """
    return _with_changed_paths(config, lambda setting, path: local_directory(path, setting, weights=weights))


def with_recorded_models(config: RunConfig, settings: Path) -> RunConfig:
    """Return ``config``, the settings of a run to resume, with hub models fixed to their recorded revisions.
    ``settings`` is the path of the ``config.json`` that the run wrote. A model that ``config`` names with another
    revision is not changed.

    A resumed run thereby keeps its initial weights, although the branch on the hub may have newer weights.
    """
    try:
        recorded = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that cannot be resumed is refused later, when its directory is locked
        return config
    recorded_paths: dict[str, str] = {}
    change_models(recorded, recorded_paths.setdefault)
    return _with_changed_paths(
        config,
        lambda setting, path: (
            recorded_paths[setting] if same_repository(path, recorded_paths.get(setting, "")) else path
        ),
    )


def make_recorded_settings(config: RunConfig, exclude: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings ``config`` in the form in which ``config.json`` records them, without the keys in
    ``exclude``. Hub models are recorded by name and commit, independent of the cache directory."""
    return change_models(config.model_dump(mode="json", exclude=exclude), lambda _, path: pinned_path(path))


def _with_changed_paths(config: RunConfig, change: Change) -> RunConfig:
    """Return the settings ``config`` with the result of ``change(setting's name, path)`` in place of the path of every
    model, validated again if a path has changed."""
    tree = config.model_dump(mode="json")
    changed = change_models(tree, change)
    return config if changed == tree else validate(RunConfig, changed)
