"""Recipes side by side: the same model, task, seed and budget, one run after the other, and one table.

run file (or the demo), without what recipes decide
    ├── recipe a ─▶ run directory ─┐
    ├── recipe b ─▶ run directory ─┼─▶ rows ─▶ compare.md, compare.json, compare.png
    └── ...                       ─┘
"""

from headrace.compare.rows import Row, row_of
from headrace.compare.running import Comparison, Terms, compare

__all__ = ["Comparison", "Row", "Terms", "compare", "row_of"]
