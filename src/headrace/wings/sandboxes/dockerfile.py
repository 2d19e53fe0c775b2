"""Dockerfiles as build steps of a session, with docker's rules for variables and quotes.

    Dockerfile ─▶ image, steps ─┬─▶ building.py runs the steps in a session, once
                                └─▶ settle: the resulting variables and directory, for the agent and for the tests

Source: docs.docker.com/reference/dockerfile, as of November 2026.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.base.errors import DataError

_WITHOUT_EFFECT = frozenset({"LABEL", "EXPOSE", "CMD", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL"})
"""Instructions that have no effect on an agent's commands."""
_STARTERS = frozenset({"bash", "sh", "tini", "dumb-init", "--", "-c", "-l", "-g"})
"""Words of an entry point that only starts a command, and so has no effect on a session."""
_ROOT = frozenset({"root", "0", "root:root", "0:0"})
_PLATFORM = re.compile(r"(?:TARGET|BUILD)(?:PLATFORM|OS|ARCH|VARIANT)")
"""Matches the names of arguments that docker sets itself."""
_SHELL: tuple[str, ...] = ("/bin/sh", "-c")
_NAME = re.compile(r"[A-Za-z_]\w*")
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""")
_HERE_DOCUMENT = re.compile(r"(?:^|\s)\d*<<-?[^<\s]")
_CONTINUED = re.compile(r"\\[ \t]*\n(?:[ \t]*\n)*")
_ESCAPE = re.compile(r"\s*#\s*escape\s*=\s*(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStep:
    """One step of a Dockerfile that builds the environment of a task."""

    kind: str
    """``RUN``, ``COPY``, ``ADD``, ``ENV``, ``ARG`` or ``WORKDIR``."""
    words: tuple[str, ...]
    """The arguments of the step: for ``RUN`` a program and its arguments; for ``COPY`` and ``ADD`` the sources and the
    target; for ``ENV`` and ``ARG`` names and values alternately; for ``WORKDIR`` a directory. Variables in them are not
    expanded yet; those of ``RUN`` are left to its shell."""
    mode: int | None = None
    """The mode of copied files; ``None``: their own modes."""


@dataclass(slots=True, kw_only=True)
class BuildState:
    """The variables and the directory before one step of a build."""

    environment: dict[str, str]
    """The variables that the built environment keeps: of the image and of ``ENV``."""
    directory: str
    """The directory in which commands begin."""
    arguments: dict[str, str] = field(default_factory=dict)
    """The variables of ``ARG``, which exist only during the build."""

    @property
    def known(self) -> dict[str, str]:
        """All variables of a step."""
        return {**self.arguments, **self.environment}

    def take(self, step: BuildStep) -> None:
        """Apply the effect of a step on the variables and the directory."""
        known = self.known
        if step.kind == "WORKDIR":
            self.directory = posixpath.normpath(posixpath.join(self.directory, expand(step.words[0], known)))
        elif step.kind in ("ENV", "ARG"):
            words = [expand(word, known) for word in step.words]
            target = self.environment if step.kind == "ENV" else self.arguments
            target.update(zip(words[::2], words[1::2], strict=True))


def state_after(steps: Iterable[BuildStep], base_variables: Mapping[str, str], directory: str) -> BuildState:
    """Return the variables and the directory after all ``steps``. ``base_variables`` are the environment variables of
    every command of the session, and ``directory`` is the first directory."""
    state = BuildState(environment=dict(base_variables), directory=directory)
    for step in steps:
        state.take(step)
    return state


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with its variables replaced and its quotes removed, by docker's rules. Raises ``ValueError`` for a
    text that docker would refuse."""
    return _Expansion(text, variables).read()


class _Expansion:
    """A parser that expands the variables of one text."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        """Create a parser at the start of ``text``, which expands ``variables``."""
        self._text, self._variables = text, variables
        self._at = 0
        """Index of the next character in the text."""

    def read(self, end: str = "") -> str:
        """Return the expanded text up to its end, or up to the character ``end``, which is consumed."""
        parts: list[str] = []
        quoted = False
        while self._at < len(self._text):
            character = self._next_character()
            if character == end and not quoted:
                return "".join(parts)
            if character == '"':
                quoted = not quoted
            elif character == "'" and not quoted:
                parts.append(self._single_quoted())
            elif character == "\\":
                parts.append(self._escaped(quoted))
            else:
                parts.append(self._variable() if character == "$" else character)
        if quoted or end:
            raise ValueError(f"{self._text!r} has an opening {'quote' if quoted else 'brace'} without its end")
        return "".join(parts)

    def _next_character(self) -> str:
        """Return the next character and advance; return an empty text at the end."""
        character = self._text[self._at : self._at + 1]
        self._at += 1
        return character

    def _single_quoted(self) -> str:
        """Return the text up to the closing single quote, unchanged."""
        inside, end, _ = self._text[self._at :].partition("'")
        if not end:
            raise ValueError(f"{self._text!r} has an opening quote without its end")
        self._at += len(inside) + 1
        return inside

    def _escaped(self, quoted: bool) -> str:
        """Return the text that a backslash and the next character stand for; ``quoted``: inside double quotes."""
        character = self._next_character()
        return f"\\{character}" if quoted and character not in ('"', "$", "\\") else character

    def _variable(self) -> str:
        """Return the value of the variable after a dollar sign; the sign itself if no name follows."""
        braced = self._text.startswith("{", self._at)
        match = _NAME.match(self._text, self._at + braced)
        if match is None and not braced:
            return "$"
        if match is None:
            raise ValueError(f"{self._text!r} has braces without a name")
        self._at = match.end()
        value = self._variables.get(match[0])
        return self._braced_value(match[0], value) if braced else value or ""

    def _braced_value(self, name: str, value: str | None) -> str:
        """Return the value of the variable ``name`` in braces, whose plain ``value`` is ``None`` if it is not set,
        after its operator (``-``, ``+``, ``?``, each also after a colon) is applied."""
        operator = self._next_character()
        if operator == "}":
            return value or ""
        if operator == ":":
            value, operator = value or None, self._next_character()
        if operator not in ("-", "+", "?"):
            raise ValueError(f"{self._text!r} has a form of variables that is not supported")
        other = self.read("}")
        if operator == "?" and value is None:
            raise ValueError(f"the variable {name} is not set: {other}")
        if operator == "+":
            return "" if value is None else other
        return other if value is None else value


def read_dockerfile(text: str, name: str) -> tuple[str, tuple[BuildStep, ...]]:
    """Return the image and the steps of the Dockerfile with the content ``text``. Raises
    :class:`~headrace.base.errors.DataError`, with the task's ``name``, for an instruction that a session cannot carry
    out.

    >>> read_dockerfile("ARG V=3.12\\nFROM python:$V\\nRUN echo a && \\\\\\n  echo b", "it")[1][0].words
    ('/bin/sh', '-c', 'echo a &&   echo b')
    """
    reader = _Reader(name)
    if (escape := _ESCAPE.match(text)) and escape[1] != "\\":
        raise reader.make_refusal(text.splitlines()[0])
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in _CONTINUED.sub("", "\n".join(lines)).splitlines():
        if line.strip():
            reader.read(line.strip())
    if not reader.image:
        raise DataError(f"the task {name} has no FROM in its Dockerfile", remedy="name an image there")
    return reader.image, tuple(reader.steps)


class _Reader:
    """A parser of one Dockerfile, one instruction at a time."""

    def __init__(self, name: str) -> None:
        """Create a parser for the Dockerfile of the task ``name``."""
        self.image = ""
        """The name of the image; empty before ``FROM``."""
        self.steps: list[BuildStep] = []
        self._name = name
        self._arguments: dict[str, str] = {}
        """The defaults of ``ARG`` before ``FROM``, by name."""
        self._shell = _SHELL
        """The program and its arguments that run a shell command, as ``SHELL`` sets them."""

    def make_refusal(self, line: str) -> DataError:
        """Return the error for the instruction ``line``, which sessions do not support."""
        return DataError(
            f"the task {self._name} has {line[:120]!r} in its Dockerfile, which sessions do not support",
            remedy="write it as RUN, COPY, ENV, ARG, WORKDIR of one stage, run by root",
        )

    def read(self, line: str) -> None:
        """Parse the instruction ``line``, and add its step. Raises :class:`~headrace.base.errors.DataError` if it is
        not supported or not valid."""
        kind, rest = _split(line)
        try:
            if not self._read(kind.upper(), rest):
                raise self.make_refusal(line)
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"the task {self._name} has {line[:120]!r} in its Dockerfile: {error}", remedy="correct it"
            ) from None

    def _read(self, kind: str, rest: str) -> bool:
        """Parse one instruction, given its name ``kind`` and its arguments ``rest``; return whether it is supported."""
        if kind == "FROM":
            return not self.image and self._from(_split_words(rest))
        if kind == "ARG":
            return self._argument(_split_words(rest))
        if not self.image:
            return False
        if kind == "RUN":
            return self._run(rest)
        if kind in ("COPY", "ADD"):
            return self._copy(kind, rest)
        if kind == "SHELL":
            self._shell = _parse_list(rest) or ()
            return bool(self._shell)
        if kind == "ENV":
            self._add(kind, _parse_pairs(rest))
        elif kind == "WORKDIR":
            expand(rest, {})
            self._add(kind, (rest,))
        elif kind == "ENTRYPOINT":
            return all(posixpath.basename(word) in _STARTERS for word in _parse_list(rest) or rest.split() or ())
        elif kind == "USER":
            return rest in _ROOT  # a session has one user, who owns all its files
        else:
            return kind in _WITHOUT_EFFECT
        return True

    def _add(self, kind: str, words: tuple[str, ...], mode: int | None = None) -> None:
        """Add a step to :attr:`steps`."""
        self.steps.append(BuildStep(kind=kind, words=words, mode=mode))

    def _from(self, words: list[str]) -> bool:
        """Parse ``FROM``; return whether it is supported. A platform is ignored: sessions have the platform of their
        machine."""
        named = [word for word in words if not word.startswith("--platform=")]
        self.image = expand(named[0], self._arguments) if named else ""
        return bool(self.image) and (len(named) == 1 or (len(named) == 3 and named[1].upper() == "AS"))

    def _argument(self, words: list[str]) -> bool:
        """Parse ``ARG``; return whether it is supported. Before ``FROM`` the arguments are variables of the image's
        name, and defaults of later arguments without a value."""
        for word in words:
            name, given, value = word.partition("=")
            if not given and _PLATFORM.fullmatch(name):
                return False
            if not self.image:
                self._arguments |= {name: expand(value, self._arguments)} if given else {}
            elif given:
                self._add("ARG", (name, value))
            elif name in self._arguments:
                self._add("ARG", (name, _escape(self._arguments[name])))
        return bool(words)

    def _run(self, rest: str) -> bool:
        """Parse ``RUN``, with a program and its arguments or with a shell command; return whether it is supported."""
        if _HERE_DOCUMENT.search(rest) or rest.startswith("--") or not rest:
            return False
        self._add("RUN", _parse_list(rest) or (*self._shell, rest))
        return True

    def _copy(self, kind: str, rest: str) -> bool:
        """Parse ``COPY``, or ``ADD`` of local files, given its name ``kind`` and its arguments ``rest``; return whether
        its options and sources are supported."""
        if _HERE_DOCUMENT.search(rest):
            return False
        mode = None
        while rest.startswith("--"):
            option, rest = _split(rest)
            name, _, value = option.partition("=")
            if name == "--chmod" and re.fullmatch(r"[0-7]{3,4}", value):
                mode = int(value, 8) & 0o777
            elif not (name == "--chown" and value in _ROOT) and option not in ("--link", "--link=true"):
                return False
        words = _parse_list(rest) or tuple(_split_words(rest))
        if len(words) < 2 or (kind == "ADD" and any("://" in word or word.startswith("git@") for word in words)):
            return False
        for word in words:
            expand(word, {})
        self._add(kind, words, mode)
        return True


def _split(text: str) -> tuple[str, str]:
    """Return the first word of a text, and the rest without spaces around it."""
    first, *rest = text.split(None, 1)
    return first, rest[0].strip() if rest else ""


def _split_words(text: str) -> list[str]:
    """Return the words of a text, quotes included. Raises ``ValueError`` for a quote that is not closed."""
    if _WORD.sub("", text).strip():
        raise ValueError(f"{text[:80]!r} has an opening quote without its end")
    return _WORD.findall(text)


def _parse_pairs(rest: str) -> tuple[str, ...]:
    """Return the names and values of ``ENV`` alternately. Raises ``ValueError`` if a name or a value is missing."""
    name, _, value = rest.partition(" ")
    if "=" not in name:
        pairs = [(name, value.strip())]
    else:
        pairs = [
            (left, right) for left, _, right in (word.partition("=") for word in _split_words(rest) if "=" in word)
        ]
        if len(pairs) != len(_split_words(rest)):
            raise ValueError("a variable has no value")
    for left, right in pairs:
        expand(right, {})
        if not left or (len(pairs) == 1 and "=" not in rest and not value.strip()):
            raise ValueError("a variable has no name, or no value")
    return tuple(word for pair in pairs for word in pair)


def _parse_list(rest: str) -> tuple[str, ...] | None:
    """Return the strings of a JSON list, docker's exec form; ``None`` for another text."""
    if not rest.startswith("["):
        return None
    try:
        words = json.loads(rest)
    except ValueError:
        return None
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _escape(text: str) -> str:
    """Return ``text`` escaped, so that :func:`expand` returns it unchanged."""
    return re.sub(r"([\\\"'$])", r"\\\1", text)
