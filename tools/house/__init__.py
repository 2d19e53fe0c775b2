"""Measurements of the code base: its size, how it is divided into files and functions, and duplicate names.

    python -m tools.house                      table of this checkout
    python -m tools.house --json               table as JSON
    python -m tools.house --ways               functions through which a token and a weight pass
    python -m tools.house --circles            modules that import one another in a circle
    python -m tools.house --root OTHER         table of another checkout
    python -m tools.house --root OTHER --wings engine/vllm,view,...    of an older one, whose wings lie elsewhere

A *code line* is neither blank, nor part of a docstring, nor only a comment. Core and wings are told apart by folder.
"""

from tools.house.graph import Graph
from tools.house.measures import Measures, measure
from tools.house.tree import Tree

__all__ = ["Graph", "Measures", "Tree", "measure"]
