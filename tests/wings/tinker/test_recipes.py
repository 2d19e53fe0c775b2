"""Recipes of the cookbook, unmodified and without a network."""

from pathlib import Path

import pytest

from tests.wings.tinker.recipes import prepare, recipes
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

FAST = ("math_rl", "sl_loop", "rl_loop")
"""The recipes that the gate runs."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recipes")
    prepare(directory)
    return directory


@pytest.fixture(scope="module")
def running(place, tmp_path_factory):
    with served(place / NAME, tmp_path_factory.mktemp("recipes-state")) as found:
        yield found


@pytest.fixture(scope="module")
def process(place, running):
    with recipes(place, environment(*running)) as found:
        yield found


def environment(url, key):
    given = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}
    return {**given, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(recipe, process, running, log):
    name, *options = RECIPES[recipe]
    base = [] if name.startswith("multiplayer") else [f"base_url={running[0]}"]
    own = [*base, f"model_name={NAME}", f"log_path={log}"]
    status, output = process.run(f"tinker_cookbook.recipes.{name}", [*options, *own])
    assert status == 0, output[-3000:]


@pytest.mark.parametrize("recipe", FAST)
def test_a_recipe_runs_unmodified(recipe, process, running, tmp_path):
    run(recipe, process, running, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in FAST])
def test_every_recipe_runs_unmodified(recipe, process, running, tmp_path):
    run(recipe, process, running, tmp_path / "log")
