"""The conversion of token ids to text, token by token, for the dashboard's pages that show tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.base.errors import HeadraceError, ModelError
from headrace.engine.text import Detokenizer
from headrace.models.hub import local_directory

BEFORE = 16
"""Number of tokens before a window that are decoded with it, because they may change the text of its first tokens."""

Decode = Callable[[Sequence[int]], str]
"""A function from token ids to their text."""


class DirectoryTokenizer:
    """A decoder of token ids with the tokenizer of a model directory, which is loaded at the first use."""

    def __init__(self, model_dir: str) -> None:
        """Create a decoder. ``model_dir`` is the directory or the hub name of the model; empty if it is unknown."""
        self._model_dir = model_dir
        self._decode: Decode | None = None
        """The function that decodes token ids; ``None`` before the first use and if it cannot be loaded."""
        self.problem = ""
        """The reason why the tokenizer cannot be loaded; empty if it is loaded or was not needed yet."""

    def pieces(self, ids: Sequence[int], first: int = 0, last: int | None = None) -> list[str]:
        """Return the text that each of the tokens ``ids[first:last]`` adds (``last=None``: to the end). The piece of a
        token that has only a part of a character is empty; the token that completes the character has the whole
        character. Without a tokenizer, every piece is the token's id."""
        decode = self._get_decode()
        last = len(ids) if last is None else last
        if decode is None:
            return [f"⟨{token}⟩" for token in ids[first:last]]
        begin = max(0, first - BEFORE)
        words = Detokenizer(decode)
        pieces = [words.push([token]) for token in ids[begin:last]]
        if pieces and last == len(ids):
            pieces[-1] += words.end()
        return pieces[first - begin :]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of all ids together; without a tokenizer, the ids themselves."""
        decode = self._get_decode()
        return " ".join(map(str, ids)) if decode is None else decode(ids)

    def _get_decode(self) -> Decode | None:
        """Return the decoding function, which is loaded at the first call; ``None`` if it cannot be loaded. In that
        case ``problem`` is set, and later calls do not try again."""
        if self._decode is None and not self.problem:
            try:
                self._decode = _load(self._model_dir)
            except HeadraceError as error:
                self.problem = f"{error.problem}: tokens are shown as ids"
        return self._decode


def _load(model_dir: str) -> Decode:
    """Return the decoding function for the model in ``model_dir``, with its fast tokenizer if the file
    ``tokenizer.json`` exists. Raises :class:`~headrace.base.errors.ModelError` if no tokenizer can be loaded."""
    if not model_dir:
        raise ModelError("the settings of this run have no model", remedy="restore its config.json")
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
