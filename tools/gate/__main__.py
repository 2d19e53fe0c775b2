"""The command ``python -m tools.gate``: prints every finding, and exits with 1 if there is one."""

import sys
from pathlib import Path

from tools.gate import check
from tools.gate.imports import circles, optional_imports, optional_packages
from tools.gate.source import read_sources
from tools.gate.words import unique_classes

root = Path(__file__).parents[2]
library = read_sources(root, "src")
findings = check([*library, *read_sources(root, "tests", "tools", "lab", "examples")])
findings += optional_imports(library, optional_packages((root / "pyproject.toml").read_text(encoding="utf-8")))
findings += unique_classes(library)
findings += circles(root)
print("\n".join(map(str, findings)) or "gate: nothing found")
sys.exit(bool(findings))
