"""The text of token ids, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.base.errors import HeadraceError, ModelError
from headrace.engine.text import Detokenizer
from headrace.models.hub import local_directory

BEFORE = 16
"""Tokens before a window that may change how its first ones read."""

Decode = Callable[[Sequence[int]], str]


class DirectoryTokenizer:
    """Turns ids into text with the tokenizer of a model directory, loaded when it is first needed."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._decode: Decode | None = None
        self.problem = ""
        """Why there is no text, in words; empty where there is, or nobody has asked yet."""

    def pieces(self, ids: Sequence[int], first: int = 0, last: int | None = None) -> list[str]:
        """What each token of the places ``first`` to ``last`` adds to the text. A token that holds only a part of a
        character adds nothing: the one that completes it does. Without a tokenizer, every piece is its id."""
        decode = self._loaded()
        last = len(ids) if last is None else last
        if decode is None:
            return [f"⟨{token}⟩" for token in ids[first:last]]
        begin = max(0, first - BEFORE)
        words = Detokenizer(decode)
        found = [words.push([token]) for token in ids[begin:last]]
        if found and last == len(ids):
            found[-1] += words.end()
        return found[first - begin :]

    def text(self, ids: Sequence[int]) -> str:
        """All of them as one text."""
        decode = self._loaded()
        return " ".join(map(str, ids)) if decode is None else decode(ids)

    def _loaded(self) -> Decode | None:
        if self._decode is None and not self.problem:
            try:
                self._decode = _load(self._model_dir)
            except HeadraceError as error:
                self.problem = f"{error.problem}: tokens are shown as their numbers"
        return self._decode


def _load(model_dir: str) -> Decode:
    if not model_dir:
        raise ModelError("the settings of this run name no model", remedy="restore its config.json")
    model_dir = local_directory(model_dir, weights=False, fetch=False)
    file = Path(model_dir) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            fast = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ModelError(f"{file} cannot be loaded: {error}", remedy="copy it from the model again") from error
        return lambda ids: str(fast.decode([token for token in ids if token >= 0], skip_special_tokens=False))
    from headrace.models import load_tokenizer

    slow = load_tokenizer(model_dir)
    return lambda ids: str(slow.decode(list(ids), skip_special_tokens=False))
