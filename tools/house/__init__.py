"""Measure the house: how much code there is, how it is cut, and which words stand for two things.

    python -m tools.house                      the table of this checkout
    python -m tools.house --json               the same for programs
    python -m tools.house --root OTHER         of another checkout
    python -m tools.house --root OTHER --wings engine/vllm,view,...    where an older checkout keeps its wings

A *code line* is neither blank, nor part of a docstring, nor only a comment. Core and wings are told apart by folder.
"""

from tools.house.graph import Graph
from tools.house.measures import Measures, measure
from tools.house.tree import Tree

__all__ = ["Graph", "Measures", "Tree", "measure"]
