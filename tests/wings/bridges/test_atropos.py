"""The trainer's side of Atropos: what environments send is trained as it was sampled, or not at all."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import headrace
from headrace.base.errors import DataError, RunError
from headrace.policy import Sample, Tokens
from headrace.wings.bridges.atropos import UNMARKED, Answers, AtroposGroup, Registration, registered, serving
from tests.venvs import python_with
from tests.wings.bridges.test_own_environments import free_port
from tests.wings.bridges.test_own_environments import serving as program

NEEDS = ("aiofiles", "aiohttp", "fastapi", "jsonlines", "pydantic-cli", "tenacity", "wandb", "transformers<5")
"""What atroposlib 0.4.0 imports, that the tests do not have. It reads chat templates as transformers did before 5."""


def sampled(*ids: int, version: int = 3) -> Tokens:
    return Tokens(ids_T=ids, logprobs_T=[-0.5] * len(ids), versions_T=[version] * len(ids))


def marked(tokens: list[int], *spans: tuple[int, int]) -> list[int]:
    """A mask as environments send it."""
    return [token if any(a <= at < b for a, b in spans) else UNMARKED for at, token in enumerate(tokens)]


def test_an_answer_is_found_behind_what_was_read_before_it() -> None:
    answers = Answers()
    answers.keep(np.array([5, 6], np.int32), sampled(7, 8, 9))
    answers.keep(np.array([4, 6], np.int32), sampled(7, 8, 1, version=4))
    found = answers.sampled([5, 6, 7, 8, 9, 2], marked([5, 6, 7, 8, 9, 2], (2, 5)))
    assert found.ids_T.tolist() == [5, 6, 7, 8, 9, 2]
    assert found.versions_T.tolist() == [-1, -1, 3, 3, 3, -1]
    assert (answers.num_marked, answers.num_unknown) == (3, 0)


def test_what_was_not_sampled_here_carries_no_loss_and_is_counted() -> None:
    answers = Answers()
    answers.keep(np.array([5, 6], np.int32), sampled(7, 8, 9))
    drifted = answers.sampled([5, 6, 7, 1, 9], marked([5, 6, 7, 1, 9], (2, 5)))
    assert drifted.sampled_T.tolist() == [False, False, True, False, False]
    foreign = answers.sampled([1, 2, 3], marked([1, 2, 3], (1, 3)))
    assert not foreign.sampled_T.any()
    assert (answers.num_marked, answers.num_unknown) == (5, 4)


def test_both_turns_of_a_conversation_are_found() -> None:
    answers = Answers()
    answers.keep(np.array([5], np.int32), sampled(7, 2))
    answers.keep(np.array([5, 7, 2, 6], np.int32), sampled(8, 2, version=4))
    whole = [5, 7, 2, 6, 8, 2, 1]
    sample = Sample.from_tokens(answers.sampled(whole, marked(whole, (1, 3), (4, 6))))
    assert sample.full.versions_T.tolist() == [-1, 3, 3, -1, 4, 4]
    assert sample.mask_F.tolist() == [False, True, True, False, True, True]


def test_the_oldest_answers_are_forgotten_first() -> None:
    answers = Answers(most_tokens=8)
    for first in range(4):
        answers.keep(np.array([first], np.int32), sampled(7, 8, 9))
    found = [answers.sampled([first, 7, 8, 9], marked([first, 7, 8, 9], (1, 4))) for first in range(4)]
    assert [bool(tokens.sampled_T.any()) for tokens in found] == [False, False, True, True]


def test_a_server_that_is_not_there_is_told_in_words() -> None:
    async def register() -> None:
        registration = Registration(batch_size=8, max_token_len=64, num_steps=2)
        async with registered(f"http://127.0.0.1:{free_port()}", Answers(), registration):
            raise AssertionError

    with pytest.raises(RunError, match="does not answer /register"):
        asyncio.run(register())


async def environment(queue: str, model: str, key: str, tokenizer: Any, log: list[dict[str, Any]]) -> None:
    """A small environment: it waits for the trainer, asks the model, and sends groups of four."""
    async with httpx.AsyncClient(timeout=60) as client:
        told: dict[str, Any] = {}
        while told.get("status") != "success":
            about = {"max_token_length": 64, "desired_name": "digits", "weight": 1.0, "group_size": 4}
            told = (await client.post(f"{queue}/register-env", json=about)).json()
            await asyncio.sleep(0.05)
        for number in range(200):
            prompt = [{"role": "user", "content": f"{number}?"}]
            body = {"model": "policy", "messages": prompt, "n": 4, "max_tokens": 6}
            headers = {"authorization": f"Bearer {key}"}
            answer = (await client.post(f"{model}/v1/chat/completions", json=body, headers=headers)).json()
            read = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            head = tokenizer.encode(read, add_special_tokens=False)
            said = [choice["token_ids"] for choice in answer["choices"]]
            tokens = [[*head, *ids] for ids in said]
            group = {
                "tokens": tokens,
                "masks": [marked(ids, (len(head), len(ids))) for ids in tokens],
                "scores": [sum(c.isdigit() for c in choice["message"]["content"]) for choice in answer["choices"]],
                "env_id": told["env_id"],
            }
            log.append((await client.post(f"{queue}/scored_data", json=group)).json())
            await asyncio.sleep(0.01)


async def step(policy: headrace.Policy, groups: list[AtroposGroup]) -> list[AtroposGroup]:
    samples = [[Sample.from_tokens(tokens) for tokens in group.sequences] for group in groups]
    policy.forward_backward(samples, policy.advantages("grpo", [group.scores for group in groups]))
    policy.optim_step()
    await policy.publish()
    return groups


async def first(batches: AsyncIterator[list[AtroposGroup]], count: int) -> AsyncIterator[list[AtroposGroup]]:
    for _ in range(count):
        yield await anext(batches)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_batches_of_the_real_server_are_trained(model_dir: Path) -> None:
    python = python_with("fastapi", no_deps=("atroposlib==0.4.0",))
    start = "import sys, uvicorn; from atroposlib.api import app; uvicorn.run(app, port=int(sys.argv[1]))"
    port, log = free_port(), list[dict[str, Any]]()
    policy = headrace.Policy.load(model_dir, lr=1e-2, loss="grpo", engine={"max_context": 64, "max_sequences": 16})

    async def train(queue_url: str) -> list[list[AtroposGroup]]:
        where = free_port()
        about = Registration(batch_size=8, max_token_len=64, num_steps=3)
        async with policy, serving(policy, port=where) as answers, asyncio.TaskGroup() as tasks:
            model = f"http://127.0.0.1:{where}"
            working = tasks.create_task(environment(queue_url, model, answers.token, policy.tokenizer, log))
            async with registered(queue_url, answers, about, timeout_s=60) as queue:
                trained = [await step(policy, groups) async for groups in first(queue.batches(), 3)]
            working.cancel()
        assert answers.num_unknown == 0
        return trained

    with program(python, "-c", start, str(port), port=port) as url:
        trained = asyncio.run(train(url))
    assert policy.version == 3
    assert all(len(group.sequences) == 4 for groups in trained for group in groups)
    versions = [int(tokens.versions_T.max()) for groups in trained for group in groups for tokens in group.sequences]
    assert versions[0] == 0
    assert max(versions) > 0
    assert all(answer["status"] == "received" for answer in log)


ENVIRONMENT = '''
    """How many digits: an environment of Atropos, as its documentation says to write one."""

    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
    from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


    class Digits(BaseEnv):
        name = "digits"

        @classmethod
        def config_init(cls):
            about = BaseEnvConfig(group_size=4, use_wandb=False, wandb_name="digits", max_token_length=64)
            return about, [APIServerConfig()]

        async def setup(self):
            self.asked = 0

        async def get_next_item(self):
            self.asked += 1
            return {"question": f"{self.asked % 50}?"}

        async def evaluate(self, *args, **kwargs):
            pass

        async def collect_trajectories(self, item):
            said = [{"role": "user", "content": item["question"]}]
            completions = await self.server.chat_completion(
                messages=said, n=self.config.group_size, max_tokens=6, temperature=1.0
            )
            group = ScoredDataGroup(tokens=[], masks=[], scores=[])
            for choice in completions.choices:
                text = choice.message.content
                told = tokenize_for_trainer(
                    self.tokenizer, [*said, {"role": "assistant", "content": text}], finish_reason=choice.finish_reason
                )
                group["tokens"].append(told["tokens"])
                group["masks"].append(told["masks"])
                group["scores"].append(float(sum(each.isdigit() for each in text)))
            return group, []


    if __name__ == "__main__":
        Digits.cli()
'''


NUM_BATCHES = 8
"""The environment is ahead by three batches: what it asks later, later weights answer."""


@contextmanager
def playing(python: Path, file: Path, *flags: str) -> Iterator[None]:
    """The environment's own program for the body's duration; what it prints lies beside it."""
    with file.with_suffix(".log").open("w") as printed:
        playing = subprocess.Popen([str(python), str(file), "serve", *flags], stdout=printed, stderr=printed)
    try:
        yield
    finally:
        playing.kill()
        playing.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_environment_of_the_library_is_trained_as_it_is(model_dir: Path, tmp_path: Path) -> None:
    python = python_with(*NEEDS, no_deps=("atroposlib==0.4.0",))
    (file := tmp_path / "digits.py").write_text(textwrap.dedent(ENVIRONMENT))
    policy = headrace.Policy.load(model_dir, lr=1e-2, loss="grpo", engine={"max_context": 64, "max_sequences": 16})
    port, where = free_port(), free_port()

    async def train(queue_url: str) -> tuple[list[list[AtroposGroup]], Answers]:
        about = Registration(batch_size=8, max_token_len=64, num_steps=NUM_BATCHES)
        async with (
            policy,
            serving(policy, port=where, token="sesame") as answers,
            registered(queue_url, answers, about, timeout_s=120) as queue,
        ):
            return [await step(policy, groups) async for groups in first(queue.batches(), NUM_BATCHES)], answers

    start = "import sys, uvicorn; from atroposlib.api import app; uvicorn.run(app, port=int(sys.argv[1]))"
    with program(python, "-c", start, str(port), port=port) as url:
        flags = {
            "--env.tokenizer_name": str(readable_before(model_dir, tmp_path / "tokenizer")),
            "--env.rollout_server_url": url,
            "--openai.base_url": f"http://127.0.0.1:{where}/v1",
            "--openai.model_name": "policy",
            "--openai.api_key": "sesame",
        }
        with playing(python, file, *(word for flag in flags.items() for word in flag)):
            trained, answers = asyncio.run(train(url))
    assert policy.version == NUM_BATCHES
    sizes = [len(group.sequences) for groups in trained for group in groups]
    assert sum(sizes) + answers.num_left_out == 8 * NUM_BATCHES
    # its text is tokenized again: special tokens are lost, and with one at its beginning an answer is not found
    assert answers.num_left_out < 0.2 * 8 * NUM_BATCHES
    assert answers.num_marked > 0
    assert answers.num_unknown < 0.3 * answers.num_marked
    versions = [int(tokens.versions_T.max()) for groups in trained for group in groups for tokens in group.sequences]
    assert versions[0] == 0
    assert max(versions) > 0


def readable_before(model_dir: Path, to: Path) -> Path:
    """The tokenizer for the library's transformers, of the version before."""
    to.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(model_dir / name, to / name)
    told = json.loads((model_dir / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**told, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return to


def test_a_group_that_does_not_fit_together_is_refused() -> None:
    from headrace.wings.bridges.atropos import _decode_group

    with pytest.raises(DataError, match="masks of another length"):
        _decode_group({"tokens": [[1, 2]], "masks": [[1]], "scores": [1.0]})
    with pytest.raises(DataError, match="tokens"):
        _decode_group({"tokens": "x", "masks": [[1]], "scores": [1.0]})
