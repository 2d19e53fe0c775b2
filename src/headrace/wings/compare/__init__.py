"""Recipes side by side: the same model, task, seed and budget, one run after the other, and one table.

run file (or the demo), without what recipes decide
    ├── recipe a ─▶ run directory ─┐
    ├── recipe b ─▶ run directory ─┼─▶ rows ─▶ compare.md, compare.json, compare.png
    └── ...                       ─┘
"""

from headrace.wings.compare.rows import RecipeRow, row_of
from headrace.wings.compare.running import ComparisonConfig, RecipeComparison, compare

__all__ = ["ComparisonConfig", "RecipeComparison", "RecipeRow", "compare", "row_of"]
