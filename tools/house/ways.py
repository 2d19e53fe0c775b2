"""The path of a token from its prompt to its gradient, and of a weight from the optimizer to the logits.

A path is a list of hops. A hop is a function of the package, the name by which it passes the token or weight on, and
the record that holds it there. Files and records are counted from the list, and :func:`find_broken_hops` compares every
hop with the source, so that a list that no longer describes the code fails the gate. A hop may be left out only if its
function neither holds the token or weight nor passes it on. Records that hold only a request, and no token, are not
counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.house.tree import PACKAGE, FunctionNode, Module, Tree


@dataclass(frozen=True, slots=True)
class Hop:
    """One function on a path."""

    file: str
    """Path below the package, without ``.py``."""
    function: str
    """Name of the function, preceded by its class and a dot if it is a method."""
    hands_to: str
    """Name in the function's body that is called, created or sent to pass the token or weight on."""
    record: str = ""
    """Class that holds the token or weight from here on, and that the file names; empty: the same as before."""


TOKEN = (
    # the prompt, to the engine
    Hop("control/loops/rollout", "RolloutLoop._run_together", "run_group"),
    Hop("rollout/siblings", "SiblingRunner.run", "generate_siblings"),
    Hop("engine/fleet/fleet", "Fleet._siblings_on", "generate_siblings"),
    Hop("launch/clients/engine", "EngineClient._flush", "send"),
    Hop("launch/channel", "ControllerChannel.send", "encode"),
    Hop("base/types/messages/codec", "MessageCodec.decode", "decode"),
    Hop("launch/hosts/engine", "EngineHost._add", "add"),
    Hop("engine/native/engine", "NativeEngine.add", "admit"),
    Hop("engine/native/intake", "Intake.admit", "_sequence"),
    Hop("engine/native/scheduler", "Scheduler._join", "add"),
    # the token, from the logits to the reader of the stream
    Hop("engine/native/engine", "NativeEngine._draw", "draw"),
    Hop("engine/native/controls", "Controls.draw", "sample"),
    Hop("engine/native/sampler", "sample", "_sample"),
    Hop("engine/native/rows", "Rows.record", "_logprobs_RC"),
    Hop("engine/native/rows", "Rows._tokens", "Tokens", "Tokens"),
    Hop("engine/native/rows", "Rows.flush", "TokenChunk", "TokenChunk"),
    Hop("engine/native/rows", "ChunkBuilder._flush", "flush"),
    Hop("launch/hosts/engine", "EngineHost._report", "send"),
    Hop("launch/channel", "ControllerChannel.receive", "_decode"),
    Hop("launch/clients/peer", "Peer._route", "handle"),
    Hop("launch/clients/engine", "EngineClient.handle", "put"),
    Hop("launch/clients/streams", "SiblingArrivals.add", "append"),
    Hop("engine/fleet/fleet", "Fleet._on_chunk", "on_chunk"),
    Hop("engine/fleet/routed", "RoutedRequest.on_chunk", "replace"),
    # the turn, to the batch
    Hop("rollout/siblings", "_Answer.turns", "Turn", "Turn"),
    Hop("rollout/siblings", "SiblingRunner._finish", "EpisodeGraph", "EpisodeGraph"),
    Hop("control/loops/rollout", "RolloutLoop._run_together", "put"),
    Hop("control/loops/scoring", "ScoringLoop._close_group", "close_group"),
    Hop("control/groups", "close_group", "ScoredGroup", "ScoredGroup"),
    Hop("flow/flow", "Flow.take", "GroupBatch", "GroupBatch"),
    Hop("control/loops/feeding", "Feeder._order", "make_outline"),
    Hop("flow/layout", "_group_outline", "GroupOutline", "GroupOutline"),
    # the outline, to the gradient
    Hop("launch/clients/learner", "LearnerClient.step", "_send_divided"),
    Hop("launch/hosts/batches", "read_outline", "lay_out"),
    Hop("flow/layout", "_samples", "TrainSample", "TrainSample"),
    Hop("base/types/batch", "Batch.collate", "concat", "Batch"),
    Hop("launch/hosts/learner", "LearnerHost._handle", "train"),
    Hop("learner/core", "LearnerCore._prepare", "StepWork", "StepWork"),
    Hop("learner/core", "LearnerCore._backward_micro", "inputs"),
    Hop("learner/work", "StepWork.inputs", "LossInputs", "LossInputs"),
    Hop("learner/forward", "Forward.__call__", "_token_logprobs"),
    Hop("algo/objective", "Objective.__call__", "LossOutput"),
)
"""The path of a token of a single-turn episode, in a training run whose engine and learner each have a process."""

WEIGHT = (
    Hop("learner/core", "LearnerCore._update", "step"),
    Hop("learner/parallel/optim", "ShardOptimizer.step", "publish"),
    Hop("control/loops/feeding", "Feeder._snapshot", "snapshot"),
    Hop("launch/clients/learner", "LearnerClient.snapshot", "Publish"),
    Hop("launch/hosts/learner", "LearnerHost._publish", "copy"),
    Hop("sync/publisher", "Publisher.announce", "_send"),
    Hop("sync/shm", "ShmOutbox.send", "Sent"),
    Hop("launch/hosts/learner", "LearnerHost._announce_to_engines", "send_to"),
    Hop("launch/hosts/engine", "EngineHost._stage_announced", "_stage_in_core"),
    Hop("engine/native/engine", "NativeEngine.stage", "stage"),
    Hop("engine/native/packing", "PackedWeightReceiver.stage", "stage"),
    Hop("sync/receiver", "Receiver._fetch_version", "view"),
    Hop("sync/shm", "ShmInbox.view", "_mapped"),
    Hop("launch/hosts/engine", "EngineHost._commit", "commit"),
    Hop("engine/native/engine", "NativeEngine.commit", "begin"),
    Hop("engine/native/swaps", "Swaps.begin", "commit_parts"),
    Hop("sync/receiver", "Receiver._exchange", "data"),
)
"""The path of a weight whose version goes through shared memory to one engine in its own process: the files that hold
it, and those that order and describe its transfer. The channels that carry these orders are counted with the token."""


def count_files(way: Sequence[Hop]) -> int:
    """Return the number of files on the path ``way``."""
    return len({hop.file for hop in way})


def count_records(way: Sequence[Hop]) -> int:
    """Return the number of classes on the path ``way`` that hold the token or weight one after another."""
    return len({hop.record for hop in way if hop.record})


def find_broken_hops(tree: Tree, way: Sequence[Hop]) -> list[str]:
    """Return a description of each hop of ``way`` that the source in ``tree`` does not confirm."""
    modules = {str(module.path.relative_to(PACKAGE).with_suffix("")): module for module in tree.modules if module.name}
    return [problem for hop in way if (problem := _problem(hop, modules.get(hop.file)))]


def _problem(hop: Hop, module: Module | None) -> str:
    if module is None:
        return f"{hop.file}.py is not there"
    function = dict(_functions(module.tree)).get(hop.function)
    if function is None:
        return f"{hop.file}.py has no {hop.function}"
    if hop.hands_to not in _names(function):
        return f"{hop.file}.py: {hop.function} does not name {hop.hands_to}"
    if hop.record and hop.record not in _names(module.tree):
        return f"{hop.file}.py does not name {hop.record}"
    return ""


def _functions(tree: ast.Module) -> Iterator[tuple[str, FunctionNode]]:
    for node in tree.body:
        if isinstance(node, FunctionNode):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, FunctionNode))


def _names(tree: ast.AST) -> set[str]:
    """Return all names and attributes in ``tree``, and the classes that it defines."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
