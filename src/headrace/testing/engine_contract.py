"""The contract of every engine, as clauses that a test can check, for the engines of this library and of other
packages.

    for suite in SUITES.values():
        with native_rig(suite.requirements(directory, NATIVE.capabilities), scratch) as rig:
            for clause in suite.clauses:
                run_clause(clause, rig)

A *rig* is an engine under test with a learner that publishes weights to it. The *capabilities* of an engine (``can``)
say which optional functions it has. An engine without the capability for a clause must refuse such requests with an
error that names the reason. The first clause of a suite must be checked first, because it needs an engine without
weights; the order of the others does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.base.types.weights import Interrupt
from headrace.engine.capabilities import Capabilities
from headrace.models.config import LoraConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.testing import engine_checks as checks
from headrace.testing.engine_rig import MAX_CONTEXT, Rig, assert_refused
from headrace.wings.servers.client.launching import ServeRequirements


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One requirement of the contract of engines, with the function that checks it on a rig."""

    name: str
    """The requirement as a sentence."""
    check: Callable[[Rig], None]
    """The check, which raises ``AssertionError`` if the requirement is broken."""
    is_required: Callable[[Capabilities], bool] = lambda can: True
    """A function that returns whether an engine with these capabilities has to meet the requirement; otherwise
    ``check_refusal`` is called."""
    check_refusal: Callable[[Rig], None] | None = None
    """The check for an engine without the capability, which must refuse such requests; ``None`` if there is no such
    request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The clauses for engines that serve one kind of model (whole weights, adapters, or a mixture of experts), with the
    tiny model for their checks."""

    clauses: tuple[Clause, ...]
    """The clauses, in the order in which they are checked."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further settings of the model: see :class:`~headrace.models.tiny.TinySpec`."""
    kind: str = "qwen3"
    """The architecture of the tiny model."""
    lora: LoraConfig | None = None
    """Settings of the adapters that are trained; ``None`` if all weights are trained."""
    is_supported: Callable[[Capabilities], bool] = lambda can: True
    """A function that returns whether an engine with these capabilities supports such models; otherwise a run file with
    them is refused when it is loaded."""

    def requirements(self, directory: Path, can: Capabilities) -> ServeRequirements:
        """Write a tiny random model to ``directory``, and return the requirements with which an engine with the
        capabilities ``can`` has to be started to serve it. The head size is 32, which vLLM's attention on CPUs
        needs."""
        spec = TinySpec(
            vocab="0123456789+= abcdefgh", hidden_size=128, init_std=0.15, kind=self.kind, extra=self.extra
        )  # fmt: skip
        return ServeRequirements(
            path=str(make_tiny(directory, spec)),
            dtype="float32",
            max_context=MAX_CONTEXT,
            lora=self.lora,
            record_kept=can.kept_sets,
            record_routing=can.routing and "num_experts" in self.extra,
            sleeps=can.releases,
        )


def run_clause(clause: Clause, rig: Rig) -> str:
    """Check ``clause`` on the engine of ``rig``. Return ``yes`` if the engine meets the requirement; ``refused`` if it
    lacks the capability and refuses such requests; ``no`` if it lacks the capability and there is no request to refuse.
    Raises ``AssertionError`` or the engine's own error if the engine breaks the clause."""
    if clause.is_required(rig.capabilities):
        clause.check(rig)
        return "yes"
    if clause.check_refusal is None:
        return "no"
    clause.check_refusal(rig)
    return "refused"


def _interrupt_clause(mode: Interrupt) -> Clause:
    """Return the clause about commits of new weights with the interrupt mode ``mode``, which says what happens to
    running sequences."""
    return Clause(
        name=f"commits with `{mode.value}`, and each token has its version",
        check=lambda rig: checks.check_interrupt(rig, mode),
        is_required=lambda can: mode in can.interrupts,
        check_refusal=lambda rig: checks.check_interrupt_is_refused(rig, mode),
    )


CLAUSES: tuple[Clause, ...] = (
    Clause(name="nothing is sampled before the first weights", check=checks.check_first_weights),
    Clause(name="logprobs are those of what was drawn from, at any temperature", check=checks.check_logprobs),
    Clause(
        name="the same under top-k, top-p, min-p",
        check=checks.check_truncated_sampling,
        is_required=lambda can: can.truncates,
        check_refusal=lambda rig: rig.assert_request_refused("top_k", top_k=3),
    ),
    Clause(name="temperature 0 takes the likeliest token", check=checks.check_greedy_sampling),
    Clause(name="a stop id ends an answer, and is kept", check=checks.check_stop_ids),
    Clause(name="tokens are streamed while an answer grows", check=checks.check_streaming),
    Clause(name="a bad request is refused, and the others continue", check=checks.check_bad_requests),
    Clause(name="a withdrawn request gives what it has", check=checks.check_cancellation),
    Clause(name="a request ends at its deadline", check=checks.check_deadline),
    Clause(name="an answer continues that was begun elsewhere", check=checks.check_continuation),
    Clause(name="it stands still, and continues", check=checks.check_pause),
    Clause(name="siblings are drawn apart", check=checks.check_siblings_differ),
    Clause(name="it counts what it does", check=checks.check_counts),
    *(_interrupt_clause(mode) for mode in Interrupt),
    Clause(name="what old weights have cached is not used under new ones", check=checks.check_prefix_cache),
    Clause(name="an update that is not newer, or not staged, changes nothing", check=checks.check_updates),
    Clause(
        name="scores given tokens, with the likeliest entries",
        check=checks.check_scores,
        is_required=lambda can: can.scores,
    ),
    Clause(
        name="scores at any temperature, under kept-sets and experts",
        check=checks.check_exact_scores,
        is_required=lambda can: can.exact_scores,
        check_refusal=checks.check_exact_scores_are_refused,
    ),
    Clause(name="forks an earlier answer", check=checks.check_forks, is_required=lambda can: can.forks),
    Clause(
        name="forks on the cache of older weights",
        check=checks.check_stale_cache_is_reused,
        is_required=lambda c: c.reuses_stale,
        check_refusal=checks.check_stale_cache_is_refused,
    ),
    Clause(
        name="records kept-sets",
        check=checks.check_kept_sets,
        is_required=lambda can: can.kept_sets,
        check_refusal=lambda rig: rig.assert_request_refused("kept-sets", top_k=3, record_kept=True),
    ),
    Clause(
        name="records entropies",
        check=checks.check_entropies,
        is_required=lambda can: can.entropies,
        check_refusal=lambda rig: rig.assert_request_refused("entropies", record_entropy=True),
    ),
    Clause(
        name="keeps a sequence under its weights",
        check=checks.check_pinning,
        is_required=lambda can: can.pins,
        check_refusal=lambda rig: rig.assert_request_refused("pinned", pinned=True),
    ),
    Clause(name="a seed fixes the draws", check=checks.check_seeds, is_required=lambda can: can.seeds),
    Clause(
        name="gives its memory back while it stands still",
        check=checks.check_memory_is_released,
        is_required=lambda can: can.releases,
        check_refusal=lambda rig: assert_refused(lambda: rig.core.pause(release=True), "memory"),
    ),
)
"""The clauses for models of which all weights are trained."""
SUITES: Mapping[str, Suite] = {
    "model": Suite(clauses=CLAUSES),
    "adapters": Suite(
        lora=LoraConfig(rank=4, agents=(checks.AGENT,)),
        is_supported=lambda can: can.adapters,
        clauses=(
            Clause(name="takes adapters alone (LoRA)", check=checks.check_adapters),
            Clause(name="answers with the adapters of agents, beside the policy's", check=checks.check_agents),
        ),
    ),
    "mixture": Suite(
        kind="qwen3_moe",
        extra={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        clauses=(
            Clause(name="takes the weights of a mixture of experts", check=checks.check_mixtures),
            Clause(
                name="records the experts of each token",
                check=checks.check_experts,
                is_required=lambda can: can.routing,
                check_refusal=lambda rig: rig.assert_request_refused("experts", record_routing=True),
            ),
        ),
    ),
}
"""All suites, by the kind of model that they check."""
