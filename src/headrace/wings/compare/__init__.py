"""The comparison of recipes (``headrace compare``): runs with the same model, task, seed and number of steps, one after
another, and their results in one table. A recipe is the set of choices that a known system makes on every axis, such as
its loss and its staleness bound.

run file (or the demo), without the settings that recipes decide
    ├── recipe a ─▶ run directory ─┐
    ├── recipe b ─▶ run directory ─┼─▶ rows ─▶ compare.md, compare.json, compare.svg
    └── ...                       ─┘
"""
