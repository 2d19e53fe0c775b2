"""Recipes of the cookbook, unmodified and without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wings.tinker.recipes import prepare
from tests.wings.tinker.serving import NAME, served

tinker_cookbook = pytest.importorskip("tinker_cookbook")  # pip has no tml-renderers for it: docs/tinker.md

SMALL = ["groups_per_batch=2", "group_size=2", "max_steps=1", "max_tokens=8", "env=arithmetic"]
MATH = ["math_rl.train", *SMALL]
CHAT = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
GAME = ["group_size=2", "batch_size=2", "max_tokens=4", "max_steps=1", "eval_every=0"]
LOOP = ["batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1", "loss_fn=importance_sampling"]
DISTIL = ["renderer_name=qwen3", f"file_path={CHAT}", "batch_size=8", "num_epochs=1"]
RECIPES = {
    "math_rl": [*MATH, "loss_fn=importance_sampling"],
    "math_rl with substeps": [*MATH, "loss_fn=cispo", "num_substeps=2", "compute_post_kl=True"],
    "math_rl off policy": [*MATH, "max_steps_off_policy=2", "loss_fn=ppo"],
    "rl_loop": ["rl_loop", *LOOP],
    "sl_loop": ["sl_loop", "batch_size=8", "max_steps=2"],
    "prompt_distillation": ["prompt_distillation.train", *DISTIL],
    "guess_number": ["multiplayer_rl.guess_number.train", "renderer_name=qwen3_disable_thinking", *GAME],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recipes")
    prepare(directory)
    return directory


@pytest.fixture(scope="module")
def running(place, tmp_path_factory):
    with served(place / NAME, tmp_path_factory.mktemp("recipes-state")) as found:
        yield found


def run(recipe, place, running, tmp_path):
    name, *options = RECIPES[recipe]
    url, key = running
    given = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    base = [] if name.startswith("multiplayer") else [f"base_url={url}"]
    own = [*base, f"model_name={NAME}", f"log_path={tmp_path / 'log'}"]
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *options, *own]
    environment = {**os.environ, **given, "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("recipe", ["math_rl"])
def test_a_recipe_runs_unmodified(recipe, place, running, tmp_path):
    run(recipe, place, running, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "math_rl"])
def test_every_recipe_runs_unmodified(recipe, place, running, tmp_path):
    run(recipe, place, running, tmp_path)
