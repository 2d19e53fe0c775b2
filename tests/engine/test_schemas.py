"""Schemas that no finite JSON follows are told from those that some JSON does."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.schemas import has_end

LIST = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
MUTUAL: dict[str, Any] = {
    "$ref": "#/$defs/a~1b",
    "$defs": {
        "a/b": {"type": "object", "properties": {"x": {"$ref": "#/$defs/c"}}, "required": ["x"]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}},
    },
}


CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}


def changed(tree: dict[str, Any], **c: Any) -> dict[str, Any]:
    return {**tree, "$defs": {**tree["$defs"], "c": {**tree["$defs"]["c"], **c}}}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        (LIST, True),
        ({**LIST, "properties": {"next": {"$ref": "#"}}}, False),
        ({**LIST, "properties": {"next": {"allOf": [{"$ref": "#"}]}}}, False),
        ({**LIST, "properties": {"next": {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}}}, False),
        ({**LIST, "type": ["object", "null"], "properties": {"next": {"$ref": "#"}}}, True),
        (MUTUAL, True),
        (changed(MUTUAL, minItems=1), False),
        (changed(MUTUAL, minItems=1, type=["array", "string"]), True),
        ({"$ref": "#"}, False),
        ({"type": 5}, True),  # what is no schema is refused by those who read the rest of it
        ({"type": ["array", 5], "minItems": 1, "items": {"$ref": "#"}}, False),
        ({"$ref": "https://else.where/schema"}, True),
        ({"type": "array", "minItems": 2, "items": {"type": "integer"}}, True),
        ({"enum": [1]}, True),
        (True, True),
        ({"required": ["a"], "properties": {"a": {"$ref": "#"}}}, True),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 2}, False),
        ({"type": "object", "required": ["q"], "additionalProperties": {"$ref": "#"}}, False),
        ({**CLOSED, "patternProperties": {"^a$": {"$ref": "#"}}, "required": ["a"]}, False),
        ({**CLOSED, "patternProperties": {"^a$": {"$ref": "#"}}, "properties": {"b": {}}, "required": ["b"]}, True),
        ({"allOf": [{"type": "object"}, {"properties": {"x": {"$ref": "#"}}, "required": ["x"]}]}, False),
        ({**CLOSED, "properties": {"x": {"$ref": "#"}}, "minProperties": 1}, False),
        ({**CLOSED, "properties": {"x": {"$ref": "#"}, "y": {}}, "minProperties": 1}, True),
        ({**CLOSED, "required": ["x"]}, False),
        (CLOSED, True),
    ],
)
def test_a_schema_ends_where_some_json_follows_it(schema: object, ends: bool) -> None:
    assert has_end(schema) is ends


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("ends", [True, False])
def test_a_long_chain_of_references_takes_few_rounds(order: int, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, Any] = {
        f"p{number}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/p{number + 1}"}}, "required": ["x"]}
        for number in range(1000)
    }
    parts["p1000"] = {"type": "null"} if ends else {"$ref": "#/$defs/p0"}
    names = list(parts)[::order]
    monkeypatch.setattr("headrace.engine.schemas.MAX_ROUNDS", 4)
    assert has_end({"$ref": "#/$defs/p0", "$defs": {name: parts[name] for name in names}}) is ends
