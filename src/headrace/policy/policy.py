"""A policy that one process samples and trains: a language model with an engine that samples, in a thread, and a
learner that trains. To *publish* is to make the engine use the learner's newest weights; the *version* of weights is
the number of optimizer steps that made them."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

import msgspec
import numpy as np
import torch

from headrace.algo.objective import Objective, usable
from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, DataError, RunError
from headrace.base.tasks import run_together
from headrace.base.types.batch import Batch
from headrace.base.types.messages.engine import ForkRequest, StaleFork
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import FloatColumn, Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.engine import RequestOptions
from headrace.engine.native import NativeEngine
from headrace.launch.inprocess import LocalEngine, LocalEngineConfig
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore, Update
from headrace.learner.disk import verify
from headrace.learner.packing import MicroBatch
from headrace.learner.work import Gradient, StepWork
from headrace.models import context_length, load_model, load_tokenizer
from headrace.models.devices import use_device
from headrace.models.endings import stop_ids
from headrace.models.heads import wanted_head
from headrace.models.hub import change_models, pinned_path
from headrace.models.mixtures import is_mixture, routes
from headrace.models.paged.base import BLOCK
from headrace.models.settings import read_config
from headrace.models.weights import count_vocabulary, weight_tensors
from headrace.policy import objective, store
from headrace.policy.comparing import ProbeSettings, probe_batch, probe_tokens, refuse_mismatch
from headrace.policy.config import PolicyConfig, PolicySettings, resolve, with_local_models
from headrace.policy.credit import compute_advantages
from headrace.policy.objective import (
    Choice,
    Formula,
    ReplaceableObjective,
    compute_slopes,
    refuse_uncorrected,
    resolve_algo,
)
from headrace.policy.sample import Sample, SampleRequirements, Samples, make_batch
from headrace.policy.sampler import PolicySampler, Prompt, SampleOptions
from headrace.policy.slots import Slots


class Policy:
    """A language model that a user's Python program samples and trains with method calls.

    Sampling is asynchronous, and the policy must be open (``async with policy``, or :meth:`start`). Training is
    synchronous and works without opening the policy. Only one thread at a time may use the learner; ``await
    asyncio.to_thread(policy.forward_backward, ...)`` trains while this event loop continues to sample.

    >>> import asyncio, tempfile
    >>> from pathlib import Path
    >>> from headrace.models.tiny import TinySpec, make_tiny
    >>> model = make_tiny(Path(tempfile.mkdtemp()) / "model", TinySpec(vocab="ab", hidden_size=16, num_layers=1))
    >>> async def one_step():
    ...     async with Policy.load(model, lr=1e-3, loss="grpo") as policy:
    ...         groups = await policy.sample(["ab", "ba"], n=4, max_new_tokens=3)
    ...         rewards = [[sample.text.count("a") for sample in group] for group in groups]
    ...         policy.forward_backward(groups, policy.advantages("grpo", rewards))
    ...         policy.optim_step()
    ...         swap = await policy.publish()
    ...         return swap.version, policy.version
    >>> asyncio.run(one_step())
    (1, 1)
    """

    def __init__(self, config: PolicyConfig, *, num_prompts: int = 0) -> None:
        """Load the model and create the engine and the learner; see :meth:`load`. ``num_prompts`` is the number of
        prompts sampled before the policy was saved."""
        config = with_local_models(config)
        path = config.model.path
        device = str(use_device("device", config.device, only_cpu=config.model.deterministic))
        self.config = config
        self.tokenizer = tokenizer = load_tokenizer(path)
        self._clock = RealClock()
        self._objective = ReplaceableObjective(Objective.build(resolve_algo(config.algo)))
        model, engine_model = load_model(config.model, device), load_model(config.model, device)
        self._learner = LearnerCore(
            model,
            config.learner,
            self._objective,
            LearnerContext(
                temperature=config.engine.temperature,
                total_steps=config.total_steps or 1,
                model_dir=Path(path),
                clock=self._clock,
            ),
        )
        self._entropy_gradient = "entropy" in self._objective.columns
        """Whether the learner computes entropies with a gradient, which an entropy bonus needs."""
        self._max_context = config.engine.max_context or context_length(path)
        self._slots = Slots(weight_tensors(model), weight_tensors(engine_model))
        self._core = NativeEngine(
            engine_model,
            config.engine,
            max_context=self._max_context,
            receiver=self._slots,
            clock=self._clock,
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            head=wanted_head(config.engine.speculation, config.model, engine_model),
        )
        if "fallback" in (facts := self._core.facts()):
            warnings.warn(str(facts["fallback"]), RuntimeWarning, stacklevel=3)
        self._sampler = PolicySampler(
            tokenizer,
            _default_sampling(config, tokenizer.eos_token_id),
            seed=config.seed,
            num_prompts=num_prompts,
            keep_mask=config.learner.keep_sampling_mask,
        )
        self._vocab_size = count_vocabulary(model)
        self._engine: LocalEngine | None = None  # the thread of the engine while the policy is open
        self._loop: asyncio.AbstractEventLoop | None = None  # the event loop in which the policy was opened
        self._publishing = asyncio.Lock()  # held during a publication, so that publications run one at a time
        self._learner_lock = threading.Lock()  # held while a thread uses the learner; a second thread gets an error
        self._learner_user = ""  # the name of the method that uses the learner, for this error
        self._call_lock = threading.Lock()  # held by each call of the learner, and by the comparison in start()
        self._weights_lock = threading.Lock()  # held while the learner's weights are copied, changed or replaced

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        lr: float | None = None,
        loss: str | Mapping[str, Any] | None = None,
        **settings: Unpack[PolicySettings],
    ) -> Self:
        """Load a policy from ``directory``: a Hugging Face causal language model, or a directory that :meth:`save` has
        written, from which training continues exactly.

        ``lr`` is short for ``learner={"lr": ...}`` and ``loss`` for ``algo={"loss": ...}``. ``settings`` are fields of
        :class:`~headrace.policy.config.PolicyConfig` and override saved settings. Raises
        :class:`~headrace.base.errors.ConfigError`, :class:`~headrace.base.errors.ModelError`,
        :class:`~headrace.base.errors.CheckpointError`, and :class:`~headrace.base.errors.DataError` for a file that has
        changed since it was saved.
        """
        directory = Path(directory).expanduser()
        verify(directory)
        state = store.read_state(directory)
        base = {} if state is None else state.config
        # an adapter is saved without its base model, whose path is in the saved settings
        if base.get("model", {}).get("lora") is None:
            base = {**base, "model": {**base.get("model", {}), "path": str(directory)}}
        config = resolve(base, dict(settings), lr, loss)
        if state is None:
            return cls(config)
        policy = cls(config, num_prompts=state.num_prompts)
        policy._learner.restore(directory)
        return policy

    @property
    def version(self) -> int:
        """The version of the learner's weights, which is the number of optimizer steps that made them."""
        return self._learner.version

    @property
    def engine_version(self) -> int:
        """The version of the weights that the engine samples with; -1 before the policy is open."""
        return self._slots.committed

    @property
    def facts(self) -> Mapping[str, str | int | float]:
        """Facts about the engine by name: the implementations with which it computes the model, and its use of
        memory."""
        return self._core.facts()

    @property
    def engine(self) -> LocalEngine:
        """The engine of the open policy, for example to serve the policy. Raises
        :class:`~headrace.base.errors.RunError` if the policy is not open."""
        return self._get_open_engine("engine")

    # -- sampling ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the policy: start the engine in this event loop, publish the learner's weights to it, and compare engine
        and learner. A policy can be opened only once.

        Raises :class:`~headrace.base.errors.RunError` if engine and learner compute log-probabilities of a few random
        tokens that differ more than rounding explains, or differ at all with ``model.deterministic``.
        """
        if self._loop is not None:
            raise RunError("the policy was opened before", remedy="open it once; load it again for another loop")
        self._loop = asyncio.get_running_loop()
        limits = LocalEngineConfig(max_requests=self.config.engine.max_waiting)
        self._engine = await LocalEngine(self._core, clock=self._clock, config=limits).__aenter__()
        try:
            await self.publish()
            await self._compare()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop the engine. Calls that wait for samples raise an error. The learner can still be used and saved."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.__aexit__()

    async def __aenter__(self) -> Self:
        """Open the policy; see :meth:`start`."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the policy; see :meth:`close`."""
        await self.close()

    async def sample(
        self, prompts: Sequence[Prompt], n: int = 1, *, seed: int | None = None, **options: Unpack[SampleOptions]
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt: a list for each prompt, in order.

        A prompt is text, chat messages, token ids, or :class:`~headrace.base.types.tokens.Tokens`. ``options`` override
        the sampling settings of the policy; samples with another temperature cannot be trained. With ``seed``, the same
        call with the same weights returns the same answers; without it, each call uses new random numbers. Weights that
        are published during the call are used from then on, and every token records the version that sampled it.

        Raises :class:`~headrace.base.errors.DataError` for an invalid prompt,
        :class:`~headrace.base.errors.ConfigError` for an invalid setting and
        :class:`~headrace.base.errors.RequestError` for a request that the engine cannot serve. After an error, no
        answer is returned.
        """
        engine = self._get_open_engine("sample")
        return await self._sampler.sample(engine, self._sampler.plan(self._sampler.encode(prompts), n, seed, options))

    async def fork(
        self,
        sample: Sample,
        at: int,
        n: int = 1,
        *,
        seed: int | None = None,
        stale: StaleFork = StaleFork.RECOMPUTE,
        **options: Unpack[SampleOptions],
    ) -> list[Sample]:
        """Return ``n`` other answers that begin with the first ``at`` tokens of ``sample``'s answer. The engine
        computes the common tokens only once where it can.

        The common tokens become part of the prompts of the new samples: they carry no loss there, and are trained with
        ``sample``. The engine stores the last ``engine.fork_memory`` sequences; the tokens of an older sequence can be
        passed to :meth:`sample` as a prompt. ``stale`` says what happens if newer weights were published since
        ``sample`` was sampled. ``seed`` and ``options`` are those of :meth:`sample`.
        """
        engine = self._get_open_engine("fork")
        if sample.engine != self._sampler.name:
            raise DataError(
                "the sample to fork was not sampled by this policy since it was loaded",
                remedy="fork what its sample() returned, or give the first tokens to sample() as a prompt",
            )
        common = Tokens.observed(sample.full.ids_T[: len(sample.prompt) + at])
        request_options = RequestOptions(fork=ForkRequest(parent=sample.request_id, at=at, stale=stale))
        (group,) = self._sampler.plan([common], n, seed, options)
        requests = [replace(request, group=sample.group, options=request_options) for request in group]
        (forked,) = await self._sampler.sample(engine, [requests])
        return forked

    async def score(self, samples: Sequence[Sample | Tokens], *, temperature: float | None = None) -> list[FloatColumn]:
        """Return the log-probability of each token of ``samples`` (prompt and answer) under the weights that the engine
        uses; 0 for the first token.

        The result has a column ``[F]`` for each sample. Recorded kept-sets and routing are applied. The default
        ``temperature`` is the policy's.
        """
        engine = self._get_open_engine("score")
        divisor = self.config.engine.temperature if temperature is None else temperature
        for sample in samples:
            if not isinstance(sample, Sample | Tokens):
                raise DataError(
                    f"score() got a {type(sample).__name__} in place of a sample",
                    remedy="give a flat list of samples or of Tokens: [sample for group in groups for sample in group]",
                )
        sequences = [sample.full if isinstance(sample, Sample) else sample for sample in samples]
        return await run_together([engine.score(tokens, temperature=divisor) for tokens in sequences])

    async def publish(self, mode: Interrupt | str = Interrupt.INFLIGHT) -> SwapReport:
        """Make the engine use the learner's weights from the next engine step on, and return the report on the commit.
        ``mode`` says how running sequences continue. Training waits while the weights are copied once.

        Raises :class:`~headrace.base.errors.RunError` if the engine already uses these weights.
        """
        engine = self._get_open_engine("publish")
        if mode not in tuple(Interrupt):
            raise ConfigError(f"mode={mode!r} does not exist", remedy=f"one of: {', '.join(Interrupt)}")
        async with self._publishing:
            with self._weights_lock:
                update = self._slots.copy(self.version)
            await engine.stage(update)
            return await engine.commit(update.version, Interrupt(mode))

    # -- training ---------------------------------------------------------------------------------------------------

    def advantages(
        self, name: str | None, rewards: Sequence[Any], groups: Sequence[Any] | None = None, **options: Any
    ) -> list[Any]:
        """Return the advantage of each reward, computed by the formula ``name``; ``None``: the formula of
        ``config.algo``.

        ``rewards`` are nested like samples, a list for each prompt; or they are one flat list, for which ``groups``
        contains the group of each reward. Rewards of one group share a baseline. The result is nested like ``rewards``.
        ``options`` are the options of :func:`headrace.algo.advantage`.
        """
        return compute_advantages(name, rewards, groups, options, self.config.algo)

    def forward_backward(self, samples: Samples, advantages: Sequence[Any], *, loss: Choice | None = None) -> Gradient:
        """Add the gradient of a loss over ``samples`` to the gradient that the next :meth:`optim_step` uses.

        ``advantages`` are nested like the samples: a number for each sample, or a number for each token of its answer.
        ``loss`` is a name, or a table or record of ``[algo]``; the default is the policy's loss. The denominator of the
        loss covers the samples of this call only, and the gradients of several calls are added. π_old is the learner's
        policy at the time of the call; for several updates on the same samples set ``algo.old = "engine"``.

        Raises :class:`~headrace.base.errors.DataError`, :class:`~headrace.base.errors.ConfigError` and
        :class:`~headrace.base.errors.RunError` before any change. If the computation itself fails, the whole gradient
        is discarded, including the gradients of earlier calls.
        """
        with self._reserve_learner("forward_backward"):
            algo = self.config.algo if loss is None else resolve_algo(loss)
            chosen = Objective.build(algo)
            if "entropy" in chosen.columns and not self._entropy_gradient:
                raise ConfigError(
                    f"loss={algo.loss.kind!r} has an entropy bonus, and the policy's own loss has none, so the learner "
                    "gives entropies without gradient",
                    remedy="give Policy.load an algo whose loss has entropy_coef > 0",
                )
            batch = make_batch(samples, advantages, self._requirements())
            refuse_uncorrected(batch, algo)
            self._objective.choose(chosen)
            with self._weights_locked():
                return self._learner.forward_backward(batch)

    def forward_backward_custom(
        self, samples: Samples, fn: Formula, *, advantages: Sequence[Any] | None = None
    ) -> Gradient:
        """Add the gradient of a user's differentiable function of the log-probabilities of all samples to the gradient
        that the next :meth:`optim_step` uses.

        ``samples`` and ``advantages`` are those of :meth:`forward_backward`; without ``advantages``, they are 0. ``fn``
        receives :class:`~headrace.algo.base.LossInputs` with all tokens of prompts and answers, in the order of the
        samples, and returns the loss, or the loss and a dict of metrics. It is called once for the whole batch, so it
        may combine samples; this needs a second forward pass. ``log_old_N`` is log π_old according to
        ``config.algo.old``, and ``log_ref_N`` the log-probability under ``config.learner.reference``. ``log_pi_N`` is 0
        outside ``mask_N``, and a gradient there has no effect. The loss is not normalised, unless ``fn`` does it.

        Raises :class:`~headrace.base.errors.DataError` for a function that returns no loss or has no finite gradient.
        """
        with self._reserve_learner("forward_backward_custom"):
            batch = make_batch(samples, advantages, self._requirements())
            self._objective.choose(objective.LINEAR)
            slopes_N, reported = compute_slopes(fn, self._inputs(batch))
            linear = msgspec.structs.replace(batch, advantages_N=slopes_N.cpu().numpy().astype(np.float32))
            with self._weights_locked():
                gradient = self._learner.forward_backward(linear)
            return replace(gradient, metrics={**gradient.metrics, **reported})

    def optim_step(self) -> Update:
        """Make one optimizer step with the accumulated gradient, increase :attr:`version` by one, and return the report
        on the step.

        Raises :class:`~headrace.base.errors.RunError` if there is no gradient or it is not finite. After an error, the
        weights are unchanged.
        """
        with self._reserve_learner("optim_step"), self._weights_lock:
            return self._learner.optim_step()

    def demonstrations(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Sample]:
        """Return samples of the texts ``answers``, one for each prompt, for supervised training with ``loss="ce"`` and
        advantages of 1. The tokenizer's end-of-sequence token is appended to each answer."""
        encoded = self._sampler.encode(prompts)
        if len(encoded) != len(answers):
            raise DataError(f"{len(encoded)} prompts and {len(answers)} answers", remedy="give an answer to each")
        for answer in answers:
            if not isinstance(answer, str):
                raise DataError(f"an answer is a {type(answer).__name__}", remedy="give answers as text")
        return [self._sampler.demonstration(*pair) for pair in zip(encoded, answers, strict=True)]

    def save(self, directory: str | Path) -> None:
        """Write model, tokenizer, optimizer, version and settings to ``directory``, which must be new or empty.
        Training after :meth:`load` continues bit for bit, and any Hugging Face program can read the model.

        Raises :class:`~headrace.base.errors.CheckpointError` if the files cannot be written, and
        :class:`~headrace.base.errors.RunError` between ``forward_backward`` and ``optim_step``.
        """
        with self._reserve_learner("save"):
            if self._learner.has_gradient:
                raise RunError(
                    "there is a gradient that no step has used, and it would not be saved",
                    remedy="call optim_step before save",
                )
            settings = change_models(self.config.model_dump(mode="json"), lambda _, path: pinned_path(path))
            state = store.PolicyState(config=settings, num_prompts=self._sampler.num_prompts)
            store.save(Path(directory).expanduser().absolute(), self._learner, state)

    # -- private ----------------------------------------------------------------------------------------------------

    async def _compare(self) -> None:
        """Raise :class:`~headrace.base.errors.RunError` if the logprobs of engine and learner for a few random
        sequences differ more than rounding explains."""
        config, cache_tokens = self.config, self._core.stats().cache_blocks * BLOCK
        longest = min(self._max_context, cache_tokens, config.learner.tokens_per_microbatch)
        sequences = probe_tokens(self._vocab_size, longest)
        batch = probe_batch(self.version, sequences)
        version, scored, log_pi_N = NOT_SAMPLED, list[FloatColumn](), np.zeros(0, np.float32)
        while version != self.engine_version:  # another thread may have made an optimizer step since the publication
            if version != NOT_SAMPLED:
                await self.publish()
            scored = await self.score(sequences)
            version, log_pi_N = await asyncio.to_thread(self._learner_logprobs, batch)
        rerouted = is_mixture(self._learner.model.config)
        settings = ProbeSettings(model=config.model, temperature=config.engine.temperature, rerouted=rerouted)
        refuse_mismatch(batch, np.concatenate(scored), log_pi_N, settings)

    def _learner_logprobs(self, batch: Batch) -> tuple[int, FloatColumn]:
        """Wait until the learner's current call has ended. Then return the version of the learner's weights, and log π
        of each token of ``batch``. :meth:`_compare` calls this in a thread."""
        with self._call_lock:
            return self.version, self._learner.logprobs(batch)

    def _requirements(self) -> SampleRequirements:
        """Return the properties that samples must have to be trained with the current weights."""
        return SampleRequirements(
            step=self.version, temperature=self.config.engine.temperature, vocab_size=self._vocab_size
        )

    def _inputs(self, batch: Batch) -> Any:
        """Return the inputs of a user's loss function for the whole batch: all columns, including the columns of
        auxiliary models. The function is differentiated with respect to the tensor ``log_pi_N`` among them."""
        mask_N, _ = usable(torch.tensor(batch.mask_N), torch.tensor(batch.logprobs_N))
        work = StepWork(batch=batch, mask_N=mask_N.numpy(), weights_N=torch.zeros(0), old=self.config.algo.old)
        log_pi_N = torch.from_numpy(self._learner.logprobs(batch)).to(self._learner.model.device).requires_grad_()
        with self._weights_locked():
            work = self._learner.add_columns(work)
        inputs = work.inputs(MicroBatch.whole(batch.lengths_S), log_pi_N)
        groups_S = torch.from_numpy(batch.groups_S.astype(np.int64)).to(log_pi_N.device)
        return replace(inputs, groups_S=groups_S)

    def _weights_locked(self) -> AbstractContextManager[Any]:
        """Return a context manager for calls in which the learner may temporarily replace the weights of its model (by
        a reference's or a teacher's). Publishing waits until the context is left. If the learner never replaces
        weights, the context manager does nothing."""
        return self._weights_lock if self._learner.swaps_weights else nullcontext()

    def _get_open_engine(self, method: str) -> LocalEngine:
        """Return the engine of the open policy. Raises :class:`~headrace.base.errors.RunError` if the policy is not
        open in this event loop; ``method`` is the name of the caller's method for the message."""
        if self._engine is None:
            state = "has been closed" if self._loop is not None else "is not open"
            raise RunError(f"{method}: the policy {state}", remedy="call it inside `async with policy:`")
        if asyncio.get_running_loop() is not self._loop:
            raise RunError(
                f"{method}: the policy was opened in another event loop",
                remedy="sample and publish in the loop that opened it; any thread may train",
            )
        return self._engine

    @contextmanager
    def _reserve_learner(self, method: str) -> Iterator[None]:
        """Reserve the learner for this thread while the body runs. ``method`` is the name of the caller's method for
        the message. Raises :class:`~headrace.base.errors.RunError` if another thread is using the learner."""
        if not self._learner_lock.acquire(blocking=False):
            raise RunError(
                f"{method} was called while another thread is inside {self._learner_user}",
                remedy="use the learner from one thread at a time: await one asyncio.to_thread before the next",
            )
        try:
            self._learner_user = method
            with self._call_lock:
                yield
        finally:
            self._learner_lock.release()


def _default_sampling(config: PolicyConfig, eos_id: int) -> Sampling:
    """Return the default sampling parameters of :meth:`Policy.sample`, from the settings of the policy. ``eos_id`` is
    the id of the tokenizer's end-of-sequence token, which ends an answer like the model's own stop ids."""
    path = config.model.path
    return Sampling(
        max_new_tokens=config.engine.max_new_tokens,
        temperature=config.engine.temperature,
        stop_ids=stop_ids(path, eos_id),
        record_routing=config.learner.keep_routing and routes(read_config(path)),
    )
