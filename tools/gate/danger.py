"""The rules against executing data: the library uses no module or call that runs what it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.gate.imports import imported_modules
from tools.gate.source import Finding, Source

_MODULES = frozenset({
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "runpy", "code",
    "codeop", "imp",
})  # fmt: skip
_CALLS = frozenset({
    "eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "torch.jit.load",
    "torch.package.PackageImporter", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "multiprocessing.Queue", "multiprocessing.Pipe", "multiprocessing.Pool", "multiprocessing.Manager",
})  # fmt: skip
_SWITCHES = {"trust_remote_code": False, "allow_pickle": False, "shell": False, "weights_only": True}
"""Keyword arguments, each with the only value that is allowed."""


def danger(source: Source) -> Iterator[Finding]:
    """Yield findings of the rules ``code`` (a module or call that executes data) and ``remote-code`` (a keyword that
    allows it) in ``source``."""
    for name, call in source.calls:
        for keyword in call.keywords:
            if keyword.arg in _SWITCHES and not _is_constant(keyword.value, _SWITCHES[keyword.arg]):
                text = f"{keyword.arg} may only be {_SWITCHES[keyword.arg]}: what is read is never run"
                yield source.find("remote-code", call, text, hard=True)
        if source.package and (name in _CALLS or name.rpartition(".")[2] == "create_subprocess_shell"):
            yield source.find("code", call, f"{name} runs what it reads: msgspec, safetensors or a list of arguments")
    if source.package:
        for node, module in imported_modules(source):
            if module.partition(".")[0] in _MODULES:
                yield source.find("code", node, f"{module} runs what it reads: msgspec or safetensors")


def _is_constant(value: ast.expr, allowed: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is allowed
