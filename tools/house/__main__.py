"""The command ``python -m tools.house [--json] [--root DIR] [--wings A,B] [--twice] [--circles] [--ways]``, and
``python -m tools.house --draw SEED --out DIR`` for readers who have seen nothing of the project."""

import argparse
import json
from pathlib import Path

from tools.house import ways
from tools.house.draw import draw_items, question_sheet
from tools.house.graph import Graph
from tools.house.measures import measure, repeated_names
from tools.house.tree import Tree

parser = argparse.ArgumentParser(prog="python -m tools.house", description="Measure how the house is built.")
parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout to measure")
parser.add_argument("--wings", default="wings,testing", help="folders below src/headrace that the core does without")
parser.add_argument("--json", action="store_true", help="print JSON")
parser.add_argument("--ways", action="store_true", help="list what a token and a weight cross")
parser.add_argument("--twice", action="store_true", help="list the class names that stand for two classes")
parser.add_argument("--circles", action="store_true", help="list the modules that import one another in a circle")
parser.add_argument("--draw", type=int, metavar="SEED", help="write 40 random functions and classes for four readers")
parser.add_argument("--out", type=Path, default=Path("build/readers"), help="the directory for --draw")
arguments = parser.parse_args()
tree = Tree(arguments.root, arguments.wings.split(","))
if arguments.draw is not None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn = draw_items(tree, seed=arguments.draw, count=40)
    for reader in range(4):
        file = arguments.out / f"draw-{arguments.draw}-reader-{reader + 1}.md"
        file.write_text(question_sheet(drawn[reader::4]), encoding="utf-8")
        print(file)
elif arguments.ways:
    for name, way in (("token", ways.TOKEN), ("weight", ways.WEIGHT)):
        print(f"a {name}: {ways.count_files(way)} files, {ways.count_records(way)} records")
        for hop in way:
            print(f"  {hop.file + '.py':36} {hop.function:34} → {hop.hands_to:16} {hop.record}".rstrip())
        print("\n".join(f"  not so: {problem}" for problem in ways.find_broken_hops(tree, way)), end="")
elif arguments.twice:
    places = repeated_names(tree)
    print(
        json.dumps(places, indent=1) if arguments.json else "\n".join(f"{k}: {', '.join(v)}" for k, v in places.items())
    )
elif arguments.circles:
    circles = Graph(tree).circles()
    print(json.dumps(circles, indent=1) if arguments.json else "\n".join(" ".join(circle) for circle in circles))
else:
    rows = measure(tree).rows()
    print(
        json.dumps(rows, indent=1)
        if arguments.json
        else "\n".join(f"{name:20} {value:>8g}" for name, value in rows.items())
    )
