"""Stages of the tests: they run in real processes, and end as real ones may."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from headrace.wings.bench.base import at_least
from headrace.wings.bench.gpu.base import StageContext


def run(stage: StageContext) -> None:
    what = stage.request.stage
    stage.add_row(what=what, pid=os.getpid(), ceilings=stage.request.ceilings)
    stage.add_target(at_least(f"{what} was here", 1.0, 1.0, "times"))
    stage.add_target(at_least(f"{what} was fast", 0.0, 1.0, "ratio"), measured=True)
    stage.add_figures(**{f"{what} rate": 2.0})
    if what == "failing":
        raise RuntimeError("the kernel of nobody's business")
    if what == "hanging":
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        stage.add_row(what="child", pid=child.pid)
        threading.Event().wait()  # for ever
    stage.attempt("what is endless", threading.Event().wait, needs_s=1e9)
    stage.attempt("what is broken", lambda: 1 // 0)
    stage.attempt("what comes after", lambda: stage.add_row(what="after"))
