"""A random draw of functions and classes for readers who have seen nothing of the project."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence

from tools.house.tree import FunctionNode, Layer, Module, Tree

HEAD_LINES = 20
"""Number of lines from the top of its file that a reader sees beside an item."""

QUESTIONS = """You have never seen this project, and what follows is all that you may read. For each of the {count}
items below you see the first {head} lines of its file, then its source. Answer for each item, in order:
1. What does it do, and what is it for? Two to four sentences; name what each parameter, field and result is.
2. How sure are you, from 0 to 100, that your explanation is right and complete?
3. Are the names and sentences natural technical English? Quote each word or sentence that is not, or that made you
   guess, and say what you would have written.
"""


def draw_items(tree: Tree, *, seed: int, count: int) -> list[tuple[Module, FunctionNode | ast.ClassDef]]:
    """Draw ``count`` functions, methods and classes of ``tree`` with ``seed``, each with equal probability."""
    modules = tree.list_modules(Layer.CORE) + tree.list_modules(Layer.WINGS)
    items = [(module, node) for module in modules for node in (*module.functions, *module.classes)]
    return random.Random(seed).sample(items, count)


def question_sheet(items: Sequence[tuple[Module, FunctionNode | ast.ClassDef]]) -> str:
    """Return the questions to one reader, with the source of every item and the head of its file."""
    parts = [QUESTIONS.format(count=len(items), head=HEAD_LINES)]
    for number, (module, node) in enumerate(items, 1):
        lines = module.text.splitlines()
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        parts.append(f"## Item {number}: {node.name}, lines {first} to {node.end_lineno} of {module.path}")
        parts.append("The head of its file:\n```python\n" + "\n".join(lines[:HEAD_LINES]) + "\n```")
        parts.append("Its source:\n```python\n" + "\n".join(lines[first - 1 : node.end_lineno]) + "\n```")
    return "\n\n".join(parts) + "\n"
