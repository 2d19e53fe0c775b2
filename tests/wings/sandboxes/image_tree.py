"""The files of a small image of Linux, copied from this machine: a shell, what a session needs, and what tests call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    "bash", "cat", "mkdir", "tar", "dd", "env", "setsid", "find", "sort", "head", "tail", "tr", "yes", "sleep",
    "ls", "rm", "mv", "cp", "ln", "touch", "chmod", "date", "wc", "mkfifo", "readlink", "grep", "pgrep", "seq",
    "true", "stat", "base64", "sed", "git", "diff", "setpriv", "rmdir", "unshare", "stty",
)  # fmt: skip
LIBRARY = re.compile(r"(/\S+) \(0x")


def build(root: Path) -> None:
    """Write the image's files below ``root``. Raises ``OSError`` where this machine lacks a program."""
    for folder in ("usr/bin", "tmp", "etc", "dev", "proc", "sys", "root", "run"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "bin").symlink_to("usr/bin")
    for name in ("lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is None:
            raise OSError(f"there is no {name} here")
        shutil.copy2(os.path.realpath(found), root / "usr/bin" / name)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        for path in LIBRARY.findall(listed):
            target = root / os.path.realpath(os.path.dirname(path)).lstrip("/") / os.path.basename(path)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(os.path.realpath(path), target)
    shutil.copy2(root / "usr/bin/bash", root / "usr/bin/sh")
