"""The structure of an answer: a JSON schema, a regular expression or a choice of texts, which the engine keeps to.

A request's form of it (OpenAI's ``response_format``, vLLM's ``guided_*`` and ``structured_outputs``) becomes one
description, a text that travels with the request's sampling. :class:`Grammars` turns a description into masks, with
llguidance, which is imported here alone.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import RequestError, visible
from headrace.engine.schemas import has_end

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 65_536
"""Length of the longest description."""
_REMEMBERED = 64
"""How many compiled grammars are kept."""
_REMEDY = "send a JSON schema, a regular expression or a choice that llguidance supports"


def json_schema(schema: Mapping[str, Any]) -> str:
    """Return the description of JSON that follows ``schema``; ``{}`` allows any JSON."""
    return json.dumps({"json_schema": schema})


def regex(pattern: str) -> str:
    """Return the description of text that matches the whole ``pattern``."""
    return json.dumps({"regex": pattern})


def choice(texts: Sequence[str]) -> str:
    """Return the description of one of ``texts``.

    >>> choice(["yes", "no?"])
    '{"regex": "yes|no\\\\\\\\?"}'
    """
    return regex("|".join(re.escape(text) for text in texts))


def lark(grammar: str) -> str:
    """Return the description of text that follows ``grammar``, in llguidance's form of Lark's language."""
    return json.dumps({"lark": grammar})


class Grammars:
    """The maker of masks of one tokenizer (:data:`headrace.engine.native.masks.MaskMaker`). It may be called from any
    thread. ``vocab_size`` is that of the model; after a complete answer only ``stop_ids`` may come."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._wrapped: LLTokenizer | None = None
        self._wrapping = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, description: str) -> GrammarMask:
        """Return the mask of a new answer. Raises :class:`~headrace.base.errors.RequestError` for a description that
        llguidance refuses. While one is compiled, which may take seconds, others are not held up."""
        with self._lock:
            found = self._compiled.get(description)
            compiled = self._compiled[description] = found or Future()
            self._compiled.move_to_end(description)
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
        if found is None:
            self._fill(compiled, description)
        matcher = compiled.result()
        with self._lock:  # a matcher is not copied by two threads at once
            return GrammarMask(matcher.deep_copy(), self._vocab_size)

    def _fill(self, compiled: Future[LLMatcher], description: str) -> None:
        """Compile a description for all threads that wait for it. What is refused is not remembered."""
        try:
            compiled.set_result(self._compile(description))
        except BaseException as error:  # noqa: BLE001 - it is raised in each thread that waits for the result
            with self._lock:
                if self._compiled.get(description) is compiled:
                    del self._compiled[description]
            compiled.set_exception(error)

    def _compile(self, description: str) -> LLMatcher:
        if len(description) > MAX_CHARACTERS:
            raise RequestError(
                f"a structure of {len(description)} characters is longer than {MAX_CHARACTERS}", remedy="shorten it"
            )
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError(
                "structured output needs llguidance, which is not installed",
                remedy="pip install 'headrace[structured]' where the server runs",
            ) from None
        tree = json.loads(description)
        match tree:
            case {"regex": pattern}:
                grammar = LLMatcher.grammar_from_regex(pattern)
            case {"json_schema": schema}:
                refuse_endless(schema)
                grammar = LLMatcher.grammar_from_json_schema(schema)
            case _:
                grammar = LLMatcher.grammar_from_lark(tree["lark"])
        matcher = LLMatcher(self._wrap(), grammar, log_level=0)
        if matcher.is_error():
            words = visible(matcher.get_error().splitlines()[0], 300)
            raise RequestError(f"the structure cannot be kept to: {words}", remedy=_REMEDY)
        begun = matcher.deep_copy()
        allowed = GrammarMask(begun, self._vocab_size).allowed()
        allowed[self._stop_ids] &= begun.is_accepting()
        if not allowed.any():
            raise RequestError("the structure allows no answer that this tokenizer can write", remedy=_REMEDY)
        return matcher

    def _wrap(self) -> LLTokenizer:
        """Return the tokenizer in llguidance's form. Raises :class:`~headrace.base.errors.RequestError` for one that
        has none."""
        with self._wrapping:
            if self._wrapped is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._wrapped = from_tokenizer(
                        copy.copy(self._tokenizer), n_vocab=self._vocab_size, eos_token=self._stop_ids
                    )
                except ValueError as error:
                    words = visible(str(error), 200)
                    raise RequestError(
                        f"structured output needs a tokenizer of bytes, and this one is none: {words}",
                        remedy="leave the structure out, or serve a model with a byte-level or byte-fallback tokenizer",
                    ) from None
            return self._wrapped


def refuse_endless(schema: object) -> None:
    """Raise :class:`~headrace.base.errors.RequestError` for a schema that no finite JSON follows."""
    try:
        ends = has_end(schema)
    except RecursionError:
        raise RequestError("the structure cannot be kept to: the schema is nested too deeply", remedy=_REMEDY) from None
    if not ends:
        raise RequestError(
            "the structure cannot be kept to: the schema requires a part within itself without end",
            remedy="let that part be left out, be null, or be an empty array",
        )


class GrammarMask:
    """The mask of one answer (:class:`headrace.engine.native.masks.TokenMask`)."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which ids may come next; none if the grammar has failed (:mod:`llguidance` bounds its work)."""
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, bool)
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)

    def accept(self, token: int) -> None:
        """Append a token that was allowed."""
        self._matcher.consume_token(token)
