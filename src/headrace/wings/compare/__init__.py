"""Comparison of recipes: the same model, task, seed and number of steps, one run after another, in one table.

run file (or the demo), without the settings that recipes decide
    ├── recipe a ─▶ run directory ─┐
    ├── recipe b ─▶ run directory ─┼─▶ rows ─▶ compare.md, compare.json, compare.svg
    └── ...                       ─┘
"""
