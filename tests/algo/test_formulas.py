"""The documented formulas are the ones that run."""

from pathlib import Path

import pytest
from pydantic import Field

from headrace.algo import formulas
from headrace.algo.registry import classes_by_kind, get_option_names
from headrace.base.config import Section, descriptions

DOCUMENT = Path(__file__).parents[2] / "docs" / "formulas.md"


@pytest.fixture(scope="module")
def text() -> str:
    return formulas.document()


def test_document_is_current(text: str) -> None:
    assert DOCUMENT.read_text() == text, "run python -m headrace.algo.formulas > docs/formulas.md"


@pytest.mark.parametrize(
    ("name", "kind"), [row for _, _, union in formulas.CHAPTERS for row in classes_by_kind(union).items()]
)
def test_every_formula_states_itself_its_source_and_its_options(name: str, kind: type[Section], text: str) -> None:
    assert f"### {name}\n" in text
    assert kind.__doc__
    assert "Source" in kind.__doc__ or name == "trust_region"
    for option in get_option_names(kind):
        assert descriptions(kind).get(option), f"{name}.{option} has no docstring"


def test_undocumented_option_stops_the_generator() -> None:
    class Silent(Section):
        """A formula."""

        kind: str = "silent"
        knob: float = Field(default=1.0)

    with pytest.raises(LookupError, match="option 'knob' of 'silent'"):
        list(formulas._entry("silent", Silent))
