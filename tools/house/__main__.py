"""``python -m tools.house [--json] [--root DIR] [--wings A,B] [--twice]``."""

import argparse
import json
from pathlib import Path

from tools.house.measures import measure, twice
from tools.house.tree import Tree

parser = argparse.ArgumentParser(prog="python -m tools.house", description="Measure how the house is built.")
parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout to measure")
parser.add_argument("--wings", default="wings", help="folders below src/headrace that count as wings")
parser.add_argument("--json", action="store_true", help="print JSON")
parser.add_argument("--twice", action="store_true", help="list the class names that stand for two classes")
arguments = parser.parse_args()
tree = Tree(arguments.root, arguments.wings.split(","))
if arguments.twice:
    found = twice(tree)
    print(
        json.dumps(found, indent=1) if arguments.json else "\n".join(f"{k}: {', '.join(v)}" for k, v in found.items())
    )
else:
    rows = measure(tree).rows()
    print(
        json.dumps(rows, indent=1)
        if arguments.json
        else "\n".join(f"{name:20} {value:>8g}" for name, value in rows.items())
    )
