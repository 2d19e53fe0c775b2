"""The contract suite over engines, as a table: ``python -m headrace.testing.engine_report``.

Without arguments: the embedded engine, and the fakes of vLLM and SGLang. ``--vllm`` and ``--sglang`` name interpreters
that have the real ones. ``--write`` puts the table in the place of the last one in a page.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.engine.capabilities import CAPABILITIES, Capabilities
from headrace.engine.served.config import ServerConfig
from headrace.engine.served.core import ServedEngine
from headrace.errors import HeadraceError
from headrace.models.tiny import TinySpec, make_tiny
from headrace.testing.engine_contract import CLAUSES, keep
from headrace.testing.engine_rig import Rig, native_rig, served_rig
from headrace.testing.engine_servers import fake_server

MARK = "<!-- contract -->"
SPEC = TinySpec(vocab="0123456789+= abcdefgh", hidden_size=128, init_std=0.15)
"""Of the model that engines are held against the contract with: vLLM's attention on processors wants heads of 32."""
BROKEN = "BROKEN"
_AT_LOAD: dict[str, Callable[[Capabilities], bool]] = {
    "experts are recorded (mixtures of experts)": lambda can: can.routing,
    "takes the weights of a mixture of experts": lambda can: can.mixtures,
    "takes adapters alone (LoRA)": lambda can: can.adapters,
    "the same bits whatever the batch (`model.deterministic`)": lambda can: can.deterministic,
    "computes in the caller's process (own loop, `headrace serve`)": lambda can: can.embedded,
}
"""What is not asked of a running engine: settings are held against the capabilities when a run is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One engine, and what became of each clause."""

    title: str
    """With its version, and whether it was the real one."""
    can: Capabilities
    """What it claims."""
    found: tuple[str, ...]
    """``yes``, ``refused``, ``no`` or :data:`BROKEN`, in the order of the clauses."""


def main(arguments: list[str]) -> int:
    """The exit code: 1 where an engine breaks the contract."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="")
    parser.add_argument("--sglang", default="")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args(arguments)
    columns = list(_columns({"vllm": asked.vllm, "sglang": asked.sglang}))
    page = table(columns)
    print(page)  # noqa: T201 - a program
    if asked.write is not None:
        before, _, after = asked.write.read_text(encoding="utf-8").partition(f"{MARK}\n")
        _, _, rest = after.partition(f"{MARK}\n")
        asked.write.write_text(f"{before}{MARK}\n{page}{MARK}\n{rest}", encoding="utf-8")
    return int(any(BROKEN in column.found for column in columns))


def table(columns: list[Column]) -> str:
    """In Markdown."""
    lines = ["| | " + " | ".join(column.title for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for place, clause in enumerate(CLAUSES):
        lines.append(f"| {clause.name} | " + " | ".join(column.found[place] for column in columns) + " |")
    for name, has in _AT_LOAD.items():
        told = ["yes" if has(column.can) else "refused at load" for column in columns]
        lines.append(f"| {name} | " + " | ".join(told) + " |")
    return "\n".join(lines) + "\n"


def _columns(pythons: dict[str, str]) -> Iterator[Column]:
    with tempfile.TemporaryDirectory(prefix="headrace-contract-") as folder:
        model = make_tiny(Path(folder) / "model", SPEC)
        yield _column("native", partial(native_rig, model), CAPABILITIES["native"])
        for kind, python in pythons.items():
            if python:
                yield _column("", partial(_real, kind, python, model), CAPABILITIES[kind])
            yield _column("", partial(_faked, kind, model), CAPABILITIES[kind], fake=True)


def _real(kind: str, python: str, model: Path, scratch: Path) -> AbstractContextManager[Rig]:
    return served_rig(kind, ServerConfig(python=python, any_version=True, wait_s=900), model, scratch)


@contextmanager
def _faked(kind: str, model: Path, scratch: Path) -> Iterator[Rig]:
    with (
        fake_server(kind, model) as (url, _),
        served_rig(kind, ServerConfig(urls=(url,), any_version=True), model, scratch) as rig,
    ):
        yield rig


def _column(
    title: str, made: Callable[[Path], AbstractContextManager[Rig]], can: Capabilities, *, fake: bool = False
) -> Column:
    with tempfile.TemporaryDirectory(prefix="headrace-contract-") as scratch, made(Path(scratch)) as rig:
        if isinstance(rig.core, ServedEngine):
            title = f"{rig.core.facts()['server']}, {'fake' if fake else 'real, on a processor'}"
        return Column(title=title, can=can, found=tuple(_kept(place, rig) for place in range(len(CLAUSES))))


def _kept(place: int, rig: Rig) -> str:
    try:
        return keep(CLAUSES[place], rig)
    except (AssertionError, HeadraceError) as error:
        print(f"{CLAUSES[place].name}: {error}", file=sys.stderr)  # noqa: T201 - a program
        return BROKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
