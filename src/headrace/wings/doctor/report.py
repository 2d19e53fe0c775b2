"""The report of ``headrace doctor``: findings with their grades, and the faults that have names."""

from __future__ import annotations

import enum

import msgspec


class Grade(enum.StrEnum):
    """The severity of a finding, from ``OK`` to ``FAIL``."""

    OK = "ok"
    """Nothing is wrong."""
    NOTE = "note"
    """Information, or a property that could not be determined."""
    WARN = "warn"
    """A condition that makes a run slow, or gives it other results than its user may expect."""
    FAIL = "FAIL"
    """A condition that makes a run fail, or its results wrong."""


class Fault(enum.StrEnum):
    """The faults that have names, by which scripts can distinguish them."""

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
    """The result of one check."""

    name: str
    """Name of the check, such as ``memory``."""
    level: Grade
    """Severity of the finding."""
    detail: str
    """Result of the check, in words."""
    remedy: str = ""
    """Remedy for the user, in words; empty if nothing is wrong."""
    fault: Fault | None = None
    """The fault that was found; ``None`` if there is no fault, or if it has no name."""


class DoctorReport(msgspec.Struct, kw_only=True):
    """The findings about a machine, a directory or a server, in the order of the checks."""

    subject: str
    """The examined machine, directory or server, in words."""
    findings: list[DoctorFinding] = []

    @property
    def ok(self) -> bool:
        """Return whether no finding is a failure."""
        return all(each.level is not Grade.FAIL for each in self.findings)

    @property
    def faults(self) -> list[Fault]:
        """Return the named faults of all findings, in the order of the checks."""
        return [each.fault for each in self.findings if each.fault is not None]

    def add(self, name: str, level: Grade, detail: str, remedy: str = "", fault: Fault | None = None) -> None:
        """Append a finding with the fields ``name``, ``level``, ``detail``, ``remedy`` and ``fault``; see
        :class:`DoctorFinding`."""
        self.findings.append(DoctorFinding(name=name, level=level, detail=detail, remedy=remedy, fault=fault))

    def __str__(self) -> str:
        """Return the findings as lines of text for the terminal."""
        lines = [self.subject]
        for each in self.findings:
            fault = f"{each.fault}: " if each.fault else ""
            lines.append(f"  {each.level:<5}{each.name}: {fault}{each.detail}")
            if each.remedy:
                lines.append(f"       remedy: {each.remedy}")
        return "\n".join(lines)
