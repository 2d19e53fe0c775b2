"""Models on a hub, by their name ``OWNER/NAME`` or ``OWNER/NAME@REVISION``.

huggingface_hub finds and downloads them, with its cache, its token and its offline mode. Only the files of a model
directory are downloaded: settings, tokenizer and safetensors weights, but no pickles and no code. Importing this module
does not import huggingface_hub.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headrace.base.config import merge
from headrace.base.errors import ModelError

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/models--(?P<repo>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")
SETTINGS = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "spiece.model")
"""The file patterns of a model's settings and tokenizer. These files are small."""
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
"""The file patterns of weights that Headrace reads."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
"""The file patterns of pickled weights. They can execute code when they are loaded, and are never read."""
MODEL_PATHS = (
    *("model.path", "model.lora.adapter", "learner.critic.path"),
    *("learner.reference.path", "learner.old.path"),
)
"""The settings whose value is a model or an adapter, as a directory or as a name on a hub."""
MODEL_TABLES = (("env", "agents", "path"), ("learner", "teachers", "path"))
"""The lists of tables with such a setting: the section, the list, and the key whose value is a model."""

Change = Callable[[str, str], str]
"""A function that returns the new value of a setting, given its name and its value."""


def is_hub_name(path: str) -> bool:
    """Return whether ``path`` has the form of a name of a model on a hub.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("Qwen/Qwen3-0.6B@main"), is_hub_name("./models/mine")
    (True, True, False)
    """
    return _NAME.fullmatch(path) is not None


def pinned_path(path: str) -> str:
    """Return ``OWNER/NAME@COMMIT`` if ``path`` is the directory of a snapshot in the hub's cache; otherwise return
    ``path`` unchanged.

    >>> pinned_path("/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/" + "0f" * 20)
    'Qwen/Qwen3-0.6B@0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f'
    """
    found = _SNAPSHOT.search(path)
    if found is None or found.end() != len(path):
        return path
    return f"{found['repo'].replace('--', '/', 1)}@{found['commit']}"


def short_model_name(path: str) -> str:
    """Return the short name of the model ``path``, without its directory, owner and revision.

    >>> short_model_name("/models/Qwen3-0.6B"), short_model_name("Qwen/Qwen3-0.6B@main")
    ('Qwen3-0.6B', 'Qwen3-0.6B')
    """
    name = pinned_path(path)
    return Path(name.partition("@")[0] if is_hub_name(name) else name).name


def change_models(tree: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return ``tree``, the settings of a run file as nested dicts, with every value that names a model replaced by the
    result of ``change``."""
    return change_paths(tree, change, MODEL_PATHS, MODEL_TABLES)


def change_paths(
    tree: dict[str, Any], change: Change, settings: Iterable[str], tables: Iterable[tuple[str, str, str]]
) -> dict[str, Any]:
    """Return ``tree``, the settings of a run file as nested dicts, with the values of some of them replaced by the
    results of ``change``: of ``settings``, dotted names, and of ``tables``, given as :data:`MODEL_TABLES` are. Values
    that are no text, or empty, are kept."""
    for setting in settings:
        *sections, key = setting.split(".")
        path = _table_at(tree, sections).get(key)
        if isinstance(path, str) and path:
            piece: dict[str, Any] = {key: change(setting, path)}
            for section in reversed(sections):
                piece = {section: piece}
            tree = merge(tree, piece)
    for section, name, key in tables:
        rows = _table_at(tree, [section]).get(name)
        if isinstance(rows, list | tuple) and rows:
            changed = [
                {**row, key: change(f"{section}.{name}[{place}].{key}", row[key])}
                if isinstance(row, dict) and isinstance(row.get(key), str) and row[key]
                else row
                for place, row in enumerate(rows)
            ]
            tree = merge(tree, {section: {name: changed}})
    return tree


def _table_at(tree: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    """Return the table of a run file under the nested names ``sections``; empty if it does not exist."""
    for section in sections:
        inner = tree.get(section)
        tree = inner if isinstance(inner, dict) else {}
    return tree


def same_repository(name: str, other: str) -> bool:
    """Return whether ``name`` has no revision, and ``other`` is the same model, with or without a revision.

    >>> same_repository("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@main"), same_repository("a/b@main", "a/b@v2")
    (True, False)
    """
    return is_hub_name(name) and "@" not in name and other.partition("@")[0] == name and is_hub_name(other)


def local_directory(path: str, setting: str = "model.path", *, weights: bool = True, fetch: bool = True) -> str:
    """Return the model directory for ``path``, the value of ``setting``. It is ``path`` itself if ``path`` exists or
    cannot be a name on a hub, otherwise the snapshot of the model with that name. The snapshot is downloaded unless the
    cache contains it. Without ``weights``, only the settings and the tokenizer are downloaded. Without ``fetch``,
    nothing is downloaded, and the result is ``path`` if the cache does not contain the snapshot.

    Raises :class:`~headrace.base.errors.ModelError` if the model is not available.
    """
    named = None if Path(path).exists() else _NAME.fullmatch(path)
    if named is None:
        return path
    patterns = (*SETTINGS, *(WEIGHTS if weights else ()))
    failures = _failures()
    try:
        return _snapshot(named["repo"], named["revision"], patterns, fetch=fetch)
    except ModelError as error:
        raise ModelError(f"{setting}={path!r}: {error.problem}", remedy=error.remedy) from None
    except failures as error:
        raise _refusal(path, setting, error) from error


def _failures() -> tuple[type[Exception], ...]:
    """Return the exception classes with which huggingface_hub reports that a model is not available: errors of the
    network, the disk and its HTTP library, an invalid name or address (``ValueError``), errors of its downloader in
    Rust (``RuntimeError``), and a file that is missing both on the hub and in the cache."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    of_http: type[Exception] = HfHubHTTPError.__bases__[0]  # httpx, or its successor in a later version
    library = importlib.import_module(of_http.__module__.partition(".")[0])
    return (OSError, ValueError, RuntimeError, EntryNotFoundError, of_http, library.InvalidURL)


def _snapshot(repo: str, revision: str | None, patterns: tuple[str, ...], *, fetch: bool) -> str:
    """Return the directory of a snapshot of the repository ``repo`` (OWNER/NAME), from the cache or downloaded, as
    described in :func:`local_directory`. ``revision`` is ``None`` for the newest revision. ``patterns`` are the file
    patterns of the required files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if not fetch or (revision is not None and _COMMIT.fullmatch(revision)):
        known = _cached(repo, revision, patterns)
        if known is not None or not fetch:
            return known or (repo if revision is None else f"{repo}@{revision}")
    try:
        info = HfApi().model_info(repo, revision=revision)
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except _failures():
        known = _cached(repo, revision, patterns)  # without the network or the hub, a cached snapshot is used
        if known is None:
            raise
        return known
    _refuse_without_safetensors([each.rfilename for each in info.siblings or ()])
    return _download(repo, revision, patterns, local_files_only=False)


def _cached(repo: str, revision: str | None, patterns: tuple[str, ...]) -> str | None:
    """Return the directory of a snapshot in the hub's local cache; ``None`` if the cache does not contain it."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _download(repo, revision, patterns, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def _download(repo: str, revision: str | None, patterns: tuple[str, ...], *, local_files_only: bool) -> str:
    """Return the directory of a snapshot, after downloading the files that match ``patterns`` and are not in the cache.
    With ``local_files_only`` nothing is downloaded, and an error is raised if the cache does not contain the
    snapshot."""
    from huggingface_hub import snapshot_download

    return snapshot_download(
        repo,
        revision=revision,
        allow_patterns=list(patterns),
        ignore_patterns=["*/*"],  # folders contain other formats of the same weights
        local_files_only=local_files_only,
    )


def _refuse_without_safetensors(files: Iterable[str]) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` if ``files``, the files of a repository, contain no safetensors
    weights."""
    names = [name for name in files if "/" not in name]
    if any(fnmatch(name, pattern) for name in names for pattern in WEIGHTS):
        return
    pickled = [name for name in names if any(fnmatch(name, pattern) for pattern in PICKLES)]
    if pickled:
        raise ModelError(
            f"its weights are pickles ({', '.join(pickled[:3])}), which run code when they are read, and it holds no "
            "safetensors",
            remedy="name a revision that has safetensors (many have one: NAME@refs/pr/1), or convert a copy that you "
            "trust: save_pretrained writes them",
        )
    raise ModelError("it holds no safetensors weights", remedy="name the repository of a causal language model")


def _refusal(path: str, setting: str, error: Exception) -> ModelError:
    """Return the error for users that explains why the model ``path``, the value of ``setting``, is not available.
    ``error`` is the exception of huggingface_hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    repo, _, revision = path.partition("@")
    hub = constants.ENDPOINT
    login = "log in (hf auth login, or set HF_TOKEN)"
    cache = f"its cache ({constants.HF_HUB_CACHE}) does not hold all of it"
    local = f"there is no directory {path} here"
    if isinstance(error, GatedRepoError):
        return ModelError(
            f"{setting}={path!r}: the model is gated, and its owner has not let you in",
            remedy=f"accept its terms at {hub}/{repo}, then {login}",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(
            f"{setting}={path!r}: {repo} has no revision {revision!r} at {hub}",
            remedy="name a branch, a tag or a commit, or leave @ and what follows it out",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"{setting}={path!r}: {local}, and no model of that name at {hub}, unless it is private",
            remedy=f"correct the name{_similar(repo)}; for a private model, {login}",
        )
    if constants.HF_HUB_OFFLINE:
        return ModelError(
            f"{setting}={path!r}: {local}, HF_HUB_OFFLINE is set, and {cache}",
            remedy=f"unset HF_HUB_OFFLINE, fetch it where there is a network (hf download {repo}){_similar(repo)}",
        )
    return ModelError(
        f"{setting}={path!r}: {local}, {cache}, and it could not be fetched from {hub}: {_first_line(error)}",
        remedy=f"look at the network (HF_ENDPOINT names another hub) and the disk, or give a directory{_similar(repo)}",
    )


def _first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _similar(repo: str) -> str:
    """Return the end of a remedy that suggests local model directories with a similar name; empty if there are none."""
    owner, _, name = repo.partition("/")
    found = {
        folder.name.casefold(): str(folder)
        for place in (Path(), Path("models"), Path(owner))
        for folder in (place.iterdir() if place.is_dir() else ())
        if (folder / "config.json").is_file()
    }
    near = difflib.get_close_matches(name.casefold(), found, n=2, cutoff=0.5)
    return f"; did you mean the directory {' or '.join(found[each] for each in near)}?" if near else ""
