"""The examination of a model's directory by ``headrace doctor MODEL_DIR``, with checks that ``headrace check model``
does not make. Each check adds a finding to a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.base.errors import HeadraceError, ModelError
from headrace.models.endings import stop_ids
from headrace.models.kernels.build import find_compiler
from headrace.models.load import load_tokenizer
from headrace.models.settings import find_context_limit, read_config
from headrace.wings.doctor.report import DoctorReport, Fault, Grade


def examine_directory(directory: Path) -> DoctorReport:
    """Check whether the files of a model's directory agree with each other, and return the findings on vocabulary, stop
    tokens, chat template and sampling defaults."""
    report = DoctorReport(subject=f"the model in {directory}")
    path = str(directory)
    try:
        config, tokenizer = read_config(path), load_tokenizer(path)
        length = find_context_limit(path).length
    except HeadraceError as error:
        report.add("files", Grade.FAIL, error.problem, error.remedy)
        return report
    report.add("model", Grade.OK, f"{config.model_type}, a context of {length:,} tokens")
    _check_vocabulary(report, config, tokenizer)
    _check_stop_tokens(report, path, config, tokenizer)
    _check_chat_template(report, tokenizer)
    _check_sampling_defaults(report, directory)
    if find_compiler() is None:
        report.add("computed by", Grade.WARN, "torch: there is no C++ compiler", "apt install g++")
    return report


def _check_vocabulary(report: DoctorReport, config: Any, tokenizer: Any) -> None:
    """Add a finding to ``report``: whether the embedding of the model with the configuration ``config`` has a row for
    every token id of ``tokenizer``."""
    rows, ids = int(config.vocab_size), tokenizer.get_vocab().values()
    highest = max(ids)
    if highest >= rows:
        report.add(
            "vocabulary", Grade.FAIL, f"the tokenizer has ids up to {highest}, the model {rows} rows",
            "copy the tokenizer that belongs to the model, or resize its embedding", Fault.TRUNCATED_VOCABULARY,
        )  # fmt: skip
        return
    spare = rows - highest - 1
    detail = f"{len(ids)} tokens in {rows} rows"
    if spare:
        detail += f"; {spare} rows stand for no text, and can be sampled all the same"
    report.add("vocabulary", Grade.OK, detail)


def _check_stop_tokens(report: DoctorReport, path: str, config: Any, tokenizer: Any) -> None:
    """Add a finding to ``report``: which tokens end an answer of the model in ``path`` with the configuration
    ``config``, and whether the end-of-sequence token of ``tokenizer`` is among them."""
    try:
        ends = stop_ids(path, tokenizer.eos_token_id)
    except ModelError as error:
        report.add("ends", Grade.FAIL, error.problem, error.remedy)
        return
    named = ", ".join(f"{each} {tokenizer.convert_ids_to_tokens(each)!r}" for each in ends)
    if tokenizer.eos_token_id not in ends:
        report.add(
            "ends", Grade.WARN, f"answers end with {named}, which the tokenizer's own {tokenizer.eos_token!r} is not "
            "among", "set eos_token_id in generation_config.json to all of them",
        )  # fmt: skip
    else:
        report.add("ends", Grade.OK, named)


def _check_chat_template(report: DoctorReport, tokenizer: Any) -> None:
    """Add a finding to ``report``: whether the chat template renders a user's message, and whether the tokenizer has
    tokens for the rendered text."""
    if tokenizer.chat_template is None:
        report.add("chat template", Grade.NOTE, "none: chats are refused, completions work")
        return
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # noqa: BLE001 - a template is a program of the model, and may raise anything
        report.add("chat template", Grade.FAIL, f"refuses a user's message: {error}", "repair chat_template.jinja")
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    with_added = tokenizer.encode(text)
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        report.add(
            "chat template", Grade.WARN, "writes text that the tokenizer has no token for",
            "add the template's markers to the tokenizer as special tokens", Fault.OTHER_TEMPLATE,
        )  # fmt: skip
    elif len(with_added) > len(ids) and with_added[1 : len(ids) + 1] == ids and ids[:1] == with_added[:1]:
        report.add("chat template", Grade.WARN, "writes a beginning token that the tokenizer adds once more", "")
    else:
        report.add("chat template", Grade.OK, f"a user's message becomes {len(ids)} tokens")


def _check_sampling_defaults(report: DoctorReport, directory: Path) -> None:
    """Add a finding to ``report`` if ``generation_config.json`` contains sampling settings, which other servers use as
    defaults."""
    try:
        tree = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    defaults = {
        name: tree[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if name in tree
    }
    if defaults:
        settings = ", ".join(f"{name}={value}" for name, value in defaults.items())
        report.add(
            "sampling defaults", Grade.NOTE, f"generation_config.json sets {settings}: vLLM and SGLang use these "
            "values unless a request overrides them; Headrace does not read them",
        )  # fmt: skip
