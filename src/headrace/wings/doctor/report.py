"""The findings of ``headrace doctor``, and the faults that it knows by name."""

from __future__ import annotations

import enum

import msgspec


class Grade(enum.StrEnum):
    """The weight of a finding."""

    OK = "ok"
    NOTE = "note"
    """Something to know, or something that could not be told."""
    WARN = "warn"
    """Something that makes a run slow, or other than one may think."""
    FAIL = "FAIL"
    """Something that makes a run fail, or its results wrong."""


class Fault(enum.StrEnum):
    """The faults that are told apart."""

    OTHER_WEIGHTS = "other weights"
    OTHER_ADAPTER = "other adapter"
    ADAPTER_NOT_APPLIED = "adapter not applied"
    PRECISION = "other precision"
    OTHER_ROPE = "other rotary embedding"
    OTHER_TEMPLATE = "other chat template"
    OTHER_TOKENIZER = "other tokenizer"
    TRUNCATED_VOCABULARY = "truncated vocabulary"
    STALE_VERSION = "stale version"
    OTHER_DEFAULTS = "other sampling defaults"
    WRONG_TEMPERATURE = "wrong temperature in logprobs"
    FULL_SHARED_MEMORY = "full shared memory"
    HIDDEN_GPU = "hidden GPU"


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    """What was looked at."""
    level: Grade
    detail: str
    """What was seen, in words."""
    remedy: str = ""
    """What to do; empty where nothing is wrong."""
    fault: Fault | None = None
    """The fault that this is, if it is one of those that are told apart."""


class DoctorReport(msgspec.Struct, kw_only=True):
    """All findings about a machine, a directory or a server."""

    subject: str
    """What was examined."""
    findings: list[DoctorFinding] = []

    @property
    def ok(self) -> bool:
        """Return whether nothing fails."""
        return all(each.level is not Grade.FAIL for each in self.findings)

    @property
    def faults(self) -> list[Fault]:
        """Return the named faults, in the order in which they were found."""
        return [each.fault for each in self.findings if each.fault is not None]

    def add(self, name: str, level: Grade, detail: str, remedy: str = "", fault: Fault | None = None) -> None:
        """Append a finding."""
        self.findings.append(DoctorFinding(name=name, level=level, detail=detail, remedy=remedy, fault=fault))

    def __str__(self) -> str:
        lines = [self.subject]
        for each in self.findings:
            fault = f"{each.fault}: " if each.fault else ""
            lines.append(f"  {each.level:<5}{each.name}: {fault}{each.detail}")
            if each.remedy:
                lines.append(f"       remedy: {each.remedy}")
        return "\n".join(lines)
