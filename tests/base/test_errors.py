"""Errors say what is wrong and what to do; the tree is the one that is drawn."""

from __future__ import annotations

import inspect
import re

import pytest

from headrace.base import errors
from headrace.base.errors import HeadraceError, nearest

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HeadraceError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_holds_problem_and_remedy_and_says_both(kind: type[HeadraceError]) -> None:
    error = kind("flow.lead=-1 is negative", remedy="set flow.lead >= 0")
    assert (error.problem, error.remedy) == ("flow.lead=-1 is negative", "set flow.lead >= 0")
    assert str(error) == "flow.lead=-1 is negative\n  remedy: set flow.lead >= 0"


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_can_be_raised_without_a_remedy(kind: type[HeadraceError]) -> None:
    with pytest.raises(TypeError, match="remedy"):
        kind("something is wrong")


def test_tree_is_the_one_that_is_drawn() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(kind.__name__ for kind in KINDS if kind is not HeadraceError)


def test_mistakes_of_the_user_are_value_errors() -> None:
    marked = re.findall(r"(\w+) \(ValueError\)", errors.__doc__ or "")
    assert sorted(marked) == sorted(kind.__name__ for kind in KINDS if issubclass(kind, ValueError))


def test_nearest_name_is_offered_only_where_one_is_near() -> None:
    assert nearest("dappo", ["grpo", "dapo"]) == "did you mean 'dapo'? (known: dapo, grpo)"
    assert nearest("zzz", ["grpo", "dapo"]) == "known: dapo, grpo"
    assert nearest("solution", ["answer", "completion", "completions"]) == "known: answer, completion, completions"
    assert nearest("rl", ["lr", "eps"]) == "did you mean 'lr'? (known: eps, lr)"
