"""Imports of former module names: packages and modules that have been moved can still be imported by their old names.

    import headrace.errors          is headrace.base.errors
    from headrace.session import train

A former name refers to the same module object as the present name, so that a class is the same under both names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

FORMER = {
    "errors": "base.errors",
    "clock": "base.clock",
    "environ": "base.environ",
    "heap": "base.heap",
    "buffers": "base.buffers",
    "types": "base.types",
    "config": "base.config",
    "groups": "sync.groups",
    "checkpoint": "learner.checkpoint",
    "env": "rollout.environments",
    "scoring": "rollout.scoring",
    "bridges": "wings.bridges",
    "rollout.endpoint": "wings.agents",
    "engine.local": "launch.inprocess",
    "engine.server.text": "engine.text",
    "engine.server": "wings.serve",
    "engine.served": "wings.servers.client",
    "engine.vllm": "wings.servers.vllm",
    "engine.sglang": "wings.servers.sglang",
    "launch.ray": "wings.cluster.ray",
    "launch.joining": "wings.cluster.joining",
    "launch.far": "wings.cluster.far",
    "plan": "wings.plan",
    "view": "wings.view",
    "bench": "wings.bench",
    "compare": "wings.compare",
    "recipes": "wings.recipes",
    "observe": "run.observe",
    "session": "run.session",
    "cli": "run.cli",
    "control.summary": "control.metrics.summary",
    "algo.losses.sequences": "algo.losses.clipped",
    "flow.filters.zero_variance": "flow.filters.rewards",
    "flow.filters.dynamic_sampling": "flow.filters.rewards",
    "flow.filters.redundancy": "flow.filters.oversampling",
    "flow.filters.resample_correct": "flow.filters.oversampling",
    "rollout.answers.hermes": "rollout.answers.formats",
    "rollout.answers.bare_json": "rollout.answers.formats",
    "sync.codecs.cast": "sync.codecs.forms",
    "sync.codecs.float8": "sync.codecs.forms",
    "testing.lengths": "testing.fakes",
}
"""The former name of each module or package that has moved, mapped to its present name, both without ``headrace``."""


def current(name: str) -> str | None:
    """Return the present full name of the module whose former full name is ``name``; ``None`` if the module was not
    moved. The submodules of a moved package move with it.

    >>> current("headrace.types.tokens"), current("headrace.flow.flow")
    ('headrace.base.types.tokens', None)
    """
    top, _, rest = name.partition(".")
    parts = rest.split(".")
    for size in range(len(parts), 0, -1):
        moved = FORMER.get(".".join(parts[:size]))
        if top == "headrace" and moved is not None:
            return ".".join([top, moved, *parts[size:]])
    return None


class FormerNames(MetaPathFinder, Loader):
    """A finder and loader for Python's import system: an import of a former name returns the module that was moved."""

    def __init__(self) -> None:
        """Start without any import in progress. ``_specs`` stores the original specification of each module, by its
        former name, while the module is imported under that name."""
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the specification for a former name; ``None`` for any other name, so that Python asks the other
        finders."""
        return None if current(name) is None else spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the moved module, imported under its present name."""
        now = current(spec.name)
        assert now is not None, spec.name
        module = import_module(now)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's original specification, which the import under a former name has replaced. The module's
        code is not executed again."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def install() -> None:
    """Enable imports of former names by adding a :class:`FormerNames` to ``sys.meta_path``. A second call changes
    nothing."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        # before the finder of files, which would load a submodule of a former package a second time
        sys.meta_path.insert(0, FormerNames())
