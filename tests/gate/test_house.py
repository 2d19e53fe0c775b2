"""The figures of the house count what they say they count."""

from pathlib import Path
from textwrap import dedent

import pytest

from tools.house import Graph, Tree, measure, ways
from tools.house.draw import draw_items, question_sheet
from tools.house.measures import protocols, repeated_names


def house(root: Path, **files: str) -> Tree:
    """A checkout of the given modules: ``flow__state`` is src/headrace/flow/state.py."""
    for name, text in files.items():
        path = root / "src/headrace" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return Tree(root)


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path: Path) -> None:
    text = '''
    """What it is.

    And more.
    """

    # why
    x = 1  # beside it
    y = """a
    text that is used"""


    class A:
        """A record."""

        field: int
        """What it holds."""
    '''
    figures = measure(house(tmp_path, flow__state=dedent(text) + "\n\ndef f():\n    return 1\n"))
    assert figures.lines_core == figures.lines_src == 1 + 2 + 2 + 2
    assert figures.comments == 1


def test_wings_and_lab_are_counted_apart(tmp_path: Path) -> None:
    tree = house(tmp_path, flow__state="def f(): ...", wings__view__page="x = 1\ny = 2")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/fuzz.py").write_text("x = 1\n")
    figures = measure(Tree(tmp_path))
    assert (figures.lines_core, figures.lines_wings, figures.lines_lab) == (1, 2, 1)
    assert (figures.files, figures.files_lab, figures.top_level_entries) == (2, 1, 2)
    assert measure(tree).lines_src == 3


def test_circles_are_found_through_late_imports_too(tmp_path: Path) -> None:
    tree = house(
        tmp_path,
        flow__a="from headrace.flow import b",
        flow__b="def f():\n    from headrace.flow.c import x",
        flow__c="from .a import y\nx = 1",
        flow__d="import headrace.flow.a",
    )
    assert Graph(tree).circles() == [["headrace.flow.a", "headrace.flow.b", "headrace.flow.c"]]


def test_import_of_a_wing_by_the_core_is_found(tmp_path: Path) -> None:
    tree = house(
        tmp_path,
        run__main="def f():\n    from headrace.wings.view.page import show",
        wings__view__page="from headrace.run.main import f\nshow = f",
    )
    (found,) = Graph(tree).core_to_wings()
    assert (found.importer, found.imported, found.line) == ("headrace.run.main", "headrace.wings.view.page", 2)


def test_class_of_the_same_name_is_told_with_both_places(tmp_path: Path) -> None:
    tree = house(tmp_path, flow__a="class Limits: ...\nclass Once: ...", sync__b="class Limits: ...")
    assert repeated_names(tree) == {"Limits": ["src/headrace/flow/a.py:1", "src/headrace/sync/b.py:1"]}
    assert measure(tree).repeated_class_names == 1


@pytest.mark.parametrize(("more", "expected"), [("", 1), ("class C(B): ...", 2)])
def test_protocol_is_fulfilled_by_classes_that_have_its_methods(tmp_path: Path, more: str, expected: int) -> None:
    contract = "class P(Protocol):\n    def f(self): ...\n"
    tree = house(tmp_path, flow__a=f"{contract}class A:\n    def g(self): ...\nclass B:\n    def f(self): ...\n{more}")
    assert len(protocols(tree.modules)["P"]) == expected


@pytest.mark.parametrize("way", [ways.TOKEN, ways.WEIGHT], ids=["token", "weight"])
def test_way_of_a_token_and_of_a_weight_is_as_the_source_has_it(way: tuple[ways.Hop, ...]) -> None:
    assert not ways.find_broken_hops(Tree(Path(__file__).parents[2]), way)


@pytest.mark.parametrize(
    ("hop", "problem"),
    [
        (ways.Hop("flow/b", "f", "g"), "flow/b.py is not there"),
        (ways.Hop("flow/a", "A.g", "h"), "flow/a.py has no A.g"),
        (ways.Hop("flow/a", "A.f", "store"), "flow/a.py: A.f does not name store"),
        (ways.Hop("flow/a", "A.f", "send", "Batch"), "flow/a.py does not name Batch"),
    ],
)
def test_hop_that_the_source_does_not_bear_out_is_named(tmp_path: Path, hop: ways.Hop, problem: str) -> None:
    tree = house(tmp_path, flow__a="class A:\n    def f(self, x: Turn):\n        self.send(x)\n")
    right = ways.Hop("flow/a", "A.f", "send", "Turn")
    assert ways.find_broken_hops(tree, [right, hop]) == [problem]
    assert (ways.count_files([right, right]), ways.count_records([right, right])) == (1, 1)


def test_readers_see_an_item_with_its_decorators_and_the_head_of_its_file_alone(tmp_path: Path) -> None:
    lines = ["# head", "@decorated", "def f():", "    return 1", *["# more"] * 20, "# end of the file"]
    (module,) = house(tmp_path, flow__a="\n".join(lines)).modules
    shown = question_sheet([(module, module.functions[0])])
    assert "```python\n@decorated\ndef f():\n    return 1\n```" in shown
    assert "# head" in shown
    assert "# end of the file" not in shown


def test_a_draw_is_the_same_for_a_seed_and_draws_nothing_twice(tmp_path: Path) -> None:
    tree = house(tmp_path, flow__a="\n".join(f"class A{number}:\n    def f(self): ..." for number in range(20)))
    first, again, other = (draw_items(tree, seed=seed, count=30) for seed in (1, 1, 2))
    assert [node for _, node in first] == [node for _, node in again]
    assert [node for _, node in first] != [node for _, node in other]
    assert len({id(node) for _, node in first}) == 30
