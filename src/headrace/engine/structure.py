"""The structure of an answer: a JSON schema, a regular expression or a choice of texts, to which the engine constrains
the sampling of tokens.

The forms in which requests specify a structure (OpenAI's ``response_format``, vLLM's ``guided_*`` and
``structured_outputs``) are converted to one *description*, a JSON text that is sent with the request's sampling
parameters. :class:`Grammars` compiles a description into a *mask*, which determines after each token the ids that may
come next. It uses llguidance, whose *matcher* is a compiled grammar and its position within an answer; no other module
imports it.
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
from headrace.engine.schemas import has_end, refers

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 65_536
"""Length of the longest description, in characters."""
_MAX_COMPILED = 64
"""The most compiled grammars that are kept."""
_REMEDY = "send a JSON schema, a regular expression or a choice that llguidance supports"


def json_schema(schema: Mapping[str, Any]) -> str:
    """Return the description of answers that are JSON and follow the JSON schema ``schema``; ``{}`` allows any JSON."""
    return json.dumps({"json_schema": schema})


def regex(pattern: str) -> str:
    """Return the description of answers that match the regular expression ``pattern`` from beginning to end."""
    return json.dumps({"regex": pattern})


def choice(texts: Sequence[str]) -> str:
    """Return the description of answers that are exactly one of ``texts``.

    >>> choice(["yes", "no?"])
    '{"regex": "yes|no\\\\\\\\?"}'
    """
    return regex("|".join(re.escape(text) for text in texts))


def lark(grammar: str) -> str:
    """Return the description of answers that follow ``grammar``, written in llguidance's variant of Lark's grammar
    language."""
    return json.dumps({"lark": grammar})


class Grammars:
    """The maker of masks for one tokenizer, which the engine calls for each new answer that has a structure
    (:data:`headrace.engine.native.masks.MaskMaker`). It may be called from any thread, and keeps the grammars compiled
    last. ``vocab_size`` is the number of the model's logits; after a complete answer only the tokens ``stop_ids``,
    which end it, are allowed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Create the maker. ``tokenizer`` is converted for llguidance only when the first mask is made. The other
        arguments are described at the class."""
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._wrapped: LLTokenizer | None = None
        """The tokenizer in llguidance's form; ``None`` until the first mask is made."""
        self._wrapping = threading.Lock()
        """The lock that is held while the tokenizer is converted."""
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        """The grammars that were compiled last, or are being compiled, by description, the least recently used
        first."""
        self._lock = threading.Lock()
        """The lock that guards ``_compiled`` and the matchers in it."""

    def __call__(self, description: str) -> GrammarMask:
        """Return the mask at the beginning of a new answer with this structure. Raises
        :class:`~headrace.base.errors.RequestError` for a description that llguidance refuses. Compiling may take
        seconds; calls for other descriptions do not wait for it."""
        with self._lock:
            found = self._compiled.get(description)
            compiled = self._compiled[description] = found or Future()
            self._compiled.move_to_end(description)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        if found is None:
            self._compile_into(compiled, description)
        matcher = compiled.result()
        with self._lock:  # a matcher is not copied by two threads at once
            return GrammarMask(matcher.deep_copy(), self._vocab_size)

    def _compile_into(self, compiled: Future[LLMatcher], description: str) -> None:
        """Compile ``description`` and store the result, or the error, in the future ``compiled``, on which all threads
        wait that need this grammar. A description that is refused is not kept, so that a later call tries again."""
        try:
            compiled.set_result(self._compile(description))
        except BaseException as error:  # noqa: BLE001 - it is raised in each thread that waits for the result
            with self._lock:
                if self._compiled.get(description) is compiled:
                    del self._compiled[description]
            compiled.set_exception(error)

    def _compile(self, description: str) -> LLMatcher:
        """Return the compiled grammar of ``description``, at the beginning of an answer. Raises
        :class:`~headrace.base.errors.RequestError` if it is too long, is not supported by llguidance, or allows no
        answer that this tokenizer can write, and if llguidance is not installed."""
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
        matcher = LLMatcher(self._converted_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            lines = matcher.get_error().splitlines()
            why = next((line for line in lines if line.startswith("error: ")), "")
            words = visible(" ".join(filter(None, (lines[0], why.removeprefix("error: ")))), 300)
            raise RequestError(f"the structure cannot be kept to: {words}", remedy=_REMEDY)
        start = matcher.deep_copy()
        allowed = GrammarMask(start, self._vocab_size).allowed()
        allowed[self._stop_ids] &= start.is_accepting()
        if not allowed.any():
            raise RequestError("the structure allows no answer that this tokenizer can write", remedy=_REMEDY)
        return matcher

    def _converted_tokenizer(self) -> LLTokenizer:
        """Return the tokenizer converted for llguidance; it is converted once. Raises
        :class:`~headrace.base.errors.RequestError` for a tokenizer that llguidance does not support."""
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
    """Raise :class:`~headrace.base.errors.RequestError` for a JSON schema that no finite JSON can follow, since an
    answer with it would never end."""
    try:
        ends = has_end(schema)
    except RecursionError:
        raise RequestError("the structure cannot be kept to: the schema is nested too deeply", remedy=_REMEDY) from None
    if not ends and not refers(schema):
        raise RequestError(
            "the structure cannot be kept to: no JSON follows the schema, whose parts exclude each other",
            remedy="look for types that exclude each other, and for required parts that are not allowed",
        )
    if not ends:
        raise RequestError(
            "the structure cannot be kept to: the schema requires a part within itself without end",
            remedy="let that part be left out, be null, or be an empty array",
        )


class GrammarMask:
    """The mask of one answer, which determines the tokens that may come next and is updated with each token
    (:class:`headrace.engine.native.masks.TokenMask`)."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """Make the mask of one answer from ``matcher``, a copy that belongs to this answer alone. ``vocab_size`` is the
        number of logits of the model."""
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each id of the vocabulary whether it may come next; all false if the grammar has failed, because
        llguidance reached the limit of its work."""
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, bool)
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)

    def accept(self, token: int) -> None:
        """Advance the grammar by ``token``, which was just sampled; it must have been allowed."""
        self._matcher.consume_token(token)
