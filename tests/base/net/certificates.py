"""Certificates made for a test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(directory: Path, name: str = "127.0.0.1") -> tuple[Path, Path]:
    """One that signs itself, for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    crt, key = directory / "server.crt", directory / "server.key"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj"
    subprocess.run(
        ["openssl", *words.split(), f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
         "-out", str(crt)], check=True, capture_output=True,
    )  # fmt: skip
    return crt, key
