"""Reinforcement learning in a plain loop: sample a batch, train on it, bring the weights to the engine, again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from headrace.algo.advantages import Outcomes
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine.native import NativeEngine
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import load_model, load_tokenizer
from headrace.models.weights import weight_tensors
from headrace.rollout.environments.data import RowOrder, load_rows
from headrace.rollout.runner import episode_seed
from headrace.run.session import RunConfig
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver


def small_digits(completion: str) -> float:
    """What the reward of the runs says."""
    return sum(character in "01234" for character in completion) / 4


def same_learner(first: Path, second: Path) -> bool:
    """Whether two snapshots hold the same weights and moments, bit for bit."""
    moments = [load_file(directory / "optimizer.safetensors") for directory in (first, second)]
    for tensors in moments:
        tensors.pop("random_state.cpu")  # of the process; nothing of a step draws from it
    same_moments = moments[0].keys() == moments[1].keys() and all(
        np.array_equal(tensor, moments[1][name]) for name, tensor in moments[0].items()
    )
    weights = [(directory / "model.safetensors").read_bytes() for directory in (first, second)]
    return same_moments and weights[0] == weights[1]


class SerialLoop:
    """Engine and learner of ``config`` in this process, one after the other."""

    def __init__(self, config: RunConfig, buffer: Path) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        rows = load_rows(Path(config.data.path))
        self.prompts = [np.array(self.tokenizer.encode(row["prompt"]), np.int32) for row in rows]
        self.order = RowOrder(num_rows=len(rows), seed=config.run.seed, shuffle=config.data.shuffle)
        served, trained = load_model(config.model), load_model(config.model)
        self.engine = NativeEngine(
            served,
            config.engine,
            max_context=max(map(len, self.prompts)) + config.engine.max_new_tokens,
            receiver=make_receiver(Route(), weight_tensors(served)),
            clock=RealClock(),
        )
        context = LearnerContext(
            temperature=config.engine.temperature,
            total_steps=config.run.steps,
            model_dir=Path(config.model.path),
            clock=RealClock(),
        )
        self.learner = LearnerCore(trained, config.learner, Objective.build(config.algo), context)
        self.publisher = make_publisher(Route(address=str(buffer)), weight_tensors(trained))

    def train(self, out: Path) -> None:
        """All steps; the trained model is written to ``out``."""
        self._bring(0)
        for step in range(self.config.run.steps):
            self.learner.train(self._batch(step))
            self._bring(step + 1)
        out.mkdir()
        self.learner.save(out)
        self.publisher.close()

    def _bring(self, version: int) -> None:
        self.publisher.copy(version % 2)
        self.engine.stage(self.publisher.announce(version, version % 2))
        self.engine.commit(version)
        self.engine.take_swaps()

    def _batch(self, step: int) -> Batch:
        flow = self.config.flow
        first = step * flow.groups_per_step
        keys = [EpisodeKey(first + g, e) for g in range(flow.groups_per_step) for e in range(flow.group_size)]
        prompts = [self.prompts[self.order(key.group)] for key in keys]
        sampled = self._sample(keys, prompts)
        rewards = [small_digits(self._text(tokens)) for tokens in sampled]
        credit = self.config.algo.credit(
            Outcomes(
                rewards_E=np.array(rewards),
                groups_E=np.array([key.group for key in keys]),
                lengths_E=np.array([len(tokens) for tokens in sampled]),
            )
        )
        samples = [
            TrainSample(
                key=key,
                spans=(Tokens.concat([Tokens.observed(prompt), tokens]),),
                mask_T=np.arange(len(prompt) + len(tokens)) >= len(prompt),
                advantage=float(advantage),
            )
            for key, prompt, tokens, advantage in zip(keys, prompts, sampled, credit, strict=True)
        ]
        return Batch.collate(step, samples)

    def _sample(self, keys: list[EpisodeKey], prompts: list[np.ndarray]) -> list[Tokens]:
        for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
            sampling = Sampling(
                max_new_tokens=self.config.engine.max_new_tokens,
                temperature=self.config.engine.temperature,
                stop_ids=(self.tokenizer.eos_token_id,),
                seed=episode_seed(self.config.run.seed, key),
            )
            self.engine.add(GenerateRequest(request_id=number, prompt_ids_T=prompt, sampling=sampling))
        ended: dict[int, Tokens] = {}
        while self.engine.has_work():
            for chunk in self.engine.step():
                assert chunk.stop_reason is not None, "completions are shorter than a flush"
                ended[chunk.request_id] = chunk.tokens
        return [ended[number] for number in range(len(keys))]

    def _text(self, tokens: Tokens) -> str:
        ids = [token for token in tokens.ids_T.tolist() if token != self.tokenizer.eos_token_id]
        return str(self.tokenizer.decode(ids))
