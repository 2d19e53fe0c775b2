"""The processes of a run: engines, a learner, scoring and environment workers, all supervised. An engine that dies is
started again; the death of another process reaches the user with its cause.

controller ──orders──▶ engine     makes steps                ◀─┐
    │                  engine-n   with several engines         │
    │      ──orders──▶ agent-x    an engine with fixed weights of its own, for an agent of the environment
    │      ──orders──▶ teacher-x  an engine with fixed weights of its own, which scores sampled tokens
    │      ──orders──▶ learner    trains, fills the buffers  ──┘ two weight buffers, by default in shared memory
    │                  learner-n  its other ranks, which get the orders from it
    │      ──orders──▶ scorer-n   calls the reward function
    │      ──orders──▶ rollout-n  runs episodes, with ``launch.rollouts``
    └── holds a pipe to each process: when the controller dies, they die
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from headrace.base.clock import RealClock
from headrace.base.errors import ComponentDied, DeadlineError, LearnerLost
from headrace.base.types.observation import Event, Recovery
from headrace.control import Components, Serving
from headrace.control.credit import credit, segment_starts_of
from headrace.control.teaching import TeacherClient, Teachers
from headrace.engine.remote import RemoteEngine
from headrace.launch.child import LAST_WORDS_S, Child, Rendezvous
from headrace.launch.clients import EngineClient, EnvPool, ScoringStage
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.config import INVITATION_FILE, LAUNCHERS
from headrace.launch.engines import Engines
from headrace.launch.environments import JOINING, JoinServer, environment_pool, environment_start, episode_limits
from headrace.launch.order import LaunchedRun, LaunchOrder
from headrace.launch.processes import Processes, open_directories
from headrace.launch.resizing import FleetResizer
from headrace.launch.supervision import REMEDY, Supervisor
from headrace.launch.vitals import Vitals
from headrace.models.settings import read_config
from headrace.rollout.agents import Agents
from headrace.rollout.environments import SingleTurn

START_REPORT_S = 3.0
"""The interval, in seconds, between two reports of what a run that starts is waiting for."""


@asynccontextmanager
async def local_world(order: LaunchOrder) -> AsyncIterator[LaunchedRun]:
    """Start every process of the run that ``order`` describes, and yield the launched run when all are ready. When the
    context ends, all processes are ended.

    Raises :class:`~headrace.base.errors.ConfigError` for a model that the learner's ranks cannot share or an optimizer
    that is not installed, and the error that a part reports if it cannot start. Inside the context, the death of a part
    cancels the body and raises :class:`~headrace.base.errors.ComponentDied`.
    """
    order.learner.parallel.refuse_settings(order.model)
    order.learner.optimizer.refuse_missing()
    if order.learner.parallel.world > 1:
        order.learner.parallel.refuse_model(order.model.path, read_config(order.model.path))
    async with _launched(order) as processes, _open_to_others(order, processes.site) as join_server:
        processes.refuse_little_room()
        pool, envs = _scorers(processes), environment_pool(processes)
        own_envs = envs if order.eval_tasks or not order.launch.rollouts else None  # shards have workers of their own
        engines, agents, teachers = processes.engines(), processes.agents(), processes.teachers()
        rollouts = processes.rollouts(engines)
        serving = [engines, *agents.values(), *teachers.values()]
        supervised: list[Supervisor] = [*serving, *([] if rollouts is None else [rollouts])]
        for each in supervised:
            await each.start()
        learner_client = await processes.start_learner()
        learner_client.receivers, learner_client.lacking = engines.addresses, engines.lacking
        learner_client.engines_in_step = engines.in_step
        learner_client.commit_when_staged = partial(engines.commit_when_staged, order.sync.interrupt)
        vitals = _vitals(processes)
        async with _watched(processes, supervised, pool, own_envs, join_server, vitals=vitals):
            parts = Components(
                **_serving(order, engines, agents, pool, envs),
                shards=rollouts,
                work_signs=lambda: vitals.num_work_signs,
                standstills=vitals.standstills,
                teachers=_teachers(order, teachers),
                engine_set=engines.fleet,
                learner=learner_client,
                tasks=order.tasks,
                advantages=partial(credit, order.algo, branch_weight=order.branch_weight),
                run_dir=order.run_dir,
                interrupt=order.sync.interrupt,
            )
            yield LaunchedRun(
                parts=parts,
                components=lambda: processes.components(_restarts(supervised)),
                send_warnings_to=partial(_send_warnings, pool, envs),
                send_signs_to=vitals.send_messages_to,
                send_recoveries_to=partial(_send_recoveries, supervised),
                facts=processes.facts,
                changes=FleetResizer(processes, engines),
                private=processes.site.directory,
            )


@asynccontextmanager
async def local_serving(order: LaunchOrder, remote: RemoteEngine | None = None) -> AsyncIterator[Serving]:
    """Start the processes that an evaluation without training needs, and yield them as the controller uses them:
    scoring and environment workers, and an engine with the weights of its model directory or, in its place, the client
    of a ``remote`` one. When the context ends, all processes are ended."""
    async with _launched(order) as processes, _open_to_others(order, processes.site) as join_server:
        pool, envs = _scorers(processes), environment_pool(processes)
        engines, agents = processes.engines(own_weights=True), processes.agents()
        started = [*([engines] if remote is None else []), *agents.values()]
        for each in started:
            await each.start()
        vitals = _vitals(processes)
        async with _watched(processes, started, pool, envs, join_server, vitals=vitals):
            serving = _serving(order, engines, agents, pool, envs)
            yield Serving(
                **(serving if remote is None else {**serving, "engine": remote}), standstills=vitals.standstills
            )


def _open_to_others(order: LaunchOrder, site: Rendezvous) -> AbstractAsyncContextManager[JoinServer | None]:
    """Return the context of the server at which other machines join the run with workers for environments; it yields
    ``None`` in a run without ``launch.join``."""
    return JOINING.load("machines")(order, site) if order.launch.join else nullcontext()


@asynccontextmanager
async def _launched(order: LaunchOrder) -> AsyncIterator[Processes]:
    """Make the directories of a run and open its launcher, and yield the object that starts its processes. None of them
    outlives this context: they are ordered to end, or killed at once if the context ends with an error."""
    with ExitStack() as leases:
        site, weights = open_directories(order, leases)
        async with LAUNCHERS.load(order.launch.kind).starting(order) as starter:
            processes = Processes(site=site, starter=starter, order=order, weights=weights)
            try:
                yield processes
            except BaseException:
                await asyncio.gather(*(child.kill() for child in processes.children))
                raise
            finally:
                await processes.end()


@asynccontextmanager
async def _watched(
    processes: Processes,
    supervised: Sequence[Supervisor],
    pool: ScoringStage,
    envs: EnvPool | None,
    join_server: JoinServer | None,
    *,
    vitals: Vitals,
) -> AsyncIterator[None]:
    """Supervise the processes of a run: wait until all of them are ready, then run the body of the ``with`` statement.
    The death of the learner, an engine that is lost for good, or workers that cannot be kept running cancel the body,
    and the error is raised. Engines, shards and workers that die may be started again, while the body continues.

    ``supervised`` has the supervisors of the policy's engines, of the engines of agents and teachers, and of the
    shards. ``pool`` and ``envs`` have the scoring and the environment workers, and ``vitals`` warns of processes that
    make no progress. ``envs`` is ``None`` for an environment without workers, ``join_server`` for a run that other
    machines cannot join.
    """
    watched = [child for child in processes.children if not isinstance(child.peer, EngineClient | RolloutClient)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(child.peer.listen()) for child in watched]
        ranks = [child for child in watched if child.role.startswith("learner")]
        others = [[child] for child in watched if child not in ranks]
        tasks += [group.create_task(_watch(part)) for part in (*others, ranks) if part]
        tasks += [group.create_task(each.run()) for each in supervised] + [group.create_task(pool.run())]
        tasks.append(group.create_task(vitals.watch()))
        if envs is not None:
            tasks.append(group.create_task(envs.keep()))
            if join_server is not None:
                start = environment_start(processes.order.env)
                tasks.append(group.create_task(join_server.admit(envs, start, processes.start_environment)))
        on_event = processes.order.on_event
        starting = group.create_task(
            report_start(lambda: processes.children, lambda text: on_event(Event(wall_s=0.0, text=text)))
        )
        await _all_ready(watched, pool, processes.order.launch.start_timeout_s)
        if envs is not None:
            await _environments_ready(envs, processes.order)
        for each in supervised:
            # an engine joins its fleet as soon as it is ready; weights go only to engines that have joined
            await each.wait_until_complete()
        starting.cancel()
        yield
        for task in tasks:
            task.cancel()


async def report_start(children: Callable[[], Sequence[Child]], on_progress: Callable[[str], None]) -> None:
    """Call ``on_progress`` every :data:`START_REPORT_S` with a text that says which processes have not started, and
    what they do; this ends only by cancellation. ``children`` returns the processes of the run."""
    waited_s = 0.0
    while True:
        await asyncio.sleep(START_REPORT_S)
        waited_s += START_REPORT_S
        late = [child for child in children() if child.state not in ("ready", "ended")]
        starting = [child.role for child in late if not child.peer.halted]
        workers = [role for role in starting if role.startswith(("scorer-", "environment-"))]
        models = [role for role in starting if role not in workers]
        doing = [f"{child.role} (pid {child.pid}) {child.peer.halted}" for child in late if child.peer.halted]
        doing += [f"{', '.join(models)}: load the model"] if models else []
        doing += [f"{', '.join(workers)}: import your code"] if workers else []
        on_progress(f"starting for {waited_s:.0f} s; {'; '.join(doing) or 'the engines get ready to take weights'}")


def _vitals(processes: Processes) -> Vitals:
    """Return the supervision that warns of the run's processes that are stopped or hang. Until the run has started, its
    warnings become events for the user."""
    order = processes.order

    def warn(text: str, *, kind: str, over: bool = False) -> None:
        """Report a warning, or the news that its cause has passed (``over``), as an event for the user."""
        del kind  # every warning of the start is shown
        order.on_event(Event(wall_s=0.0, text=text, level="info" if over else "warning"))

    return Vitals(
        children=lambda: processes.children,
        timeout_s=order.stall_timeout_s,
        start_timeout_s=order.launch.start_timeout_s,
        clock=RealClock(),
        warn=warn,
        on_span=lambda span: order.on_spans([span]),
        others=lambda: {} if order.forks is None or order.forks.lost else {"fork server": order.forks.pid},
    )


def _restarts(supervised: Sequence[Supervisor]) -> Counter[str]:
    """Return the number of times that each engine and shard was started again, by its name."""
    return sum((each.restarts for each in supervised), Counter[str]())


def _send_recoveries(supervised: Sequence[Supervisor], on_recovery: Callable[[Recovery], None]) -> None:
    """Let all supervisors report later deaths and recoveries to ``on_recovery``."""
    for each in supervised:
        each.send_recoveries_to(on_recovery)


def _send_warnings(pool: ScoringStage, envs: EnvPool | None, warn: Callable[[str], None]) -> None:
    """Let all pools of workers send later warnings for users to ``warn``."""
    pool.send_warnings_to(warn)
    if envs is not None:
        envs.send_warnings_to(warn)


def _scorers(processes: Processes) -> ScoringStage:
    """Return the scoring stage of a run: a pool for each component of the reward. Its workers are not started yet."""
    order = processes.order
    return ScoringStage(
        order.env.components,
        processes.start_scorer,
        start_timeout_s=order.launch.start_timeout_s,
        warn=lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning")),
        on_span=lambda span: order.on_spans([span]),
    )


def _serving(
    order: LaunchOrder, engines: Engines, agents: Mapping[str, Engines], pool: ScoringStage, envs: EnvPool | None
) -> dict[str, Any]:
    """Return the components that answer and score episodes, by the names of their fields in
    :class:`~headrace.control.parts.Serving`."""
    return {
        "engine": engines.fleet,
        "agents": Agents(
            known=order.agent_names,
            engines={name: each.fleet for name, each in agents.items()},
            adapters=order.model.adapter_agents,
        ),
        "scorer": pool.rubric,
        "turn_scorer": pool.rubric if pool.rubric.by_turn else None,
        "env": SingleTurn() if envs is None else envs,
        "clock": RealClock(),
        "eval_tasks": order.eval_tasks,
        "sampling": order.sampling,
        "max_context": order.max_context,
        "decode": order.decode,
        "chat": order.chat,
        "limits": episode_limits(order),
        "episode_timeout_s": order.env.timeout_s,
        "episode_retries": order.env.retries,
        "segments": segment_starts_of(order.algo),
    }


def _teachers(order: LaunchOrder, engines: Mapping[str, Engines]) -> Teachers | None:
    """Return the clients of the teachers that have engines of their own; ``None`` if there are none. ``engines`` has
    the supervisor of each, by the teacher's name."""
    if not engines:
        return None
    return Teachers(
        by_name={
            name: TeacherClient(engine=each.fleet, name=name, config=order.teachers[name].config)
            for name, each in engines.items()
        },
        column=order.learner.teacher_column,
        temperature=order.sampling.temperature,
    )  # fmt: skip


async def _watch(part: Sequence[Child]) -> None:
    """Wait until one of the processes of a part (one process, or all ranks of the learner) dies, and raise the cause.
    The other ranks of a learner die with the first one, so the error is that of the process that died by itself."""
    async with asyncio.TaskGroup() as group:
        deaths = {group.create_task(child.died()): child for child in part}
        await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await _cause_known(deaths)
        ended = [death for death in deaths if death.done()]
        for death in deaths:
            death.cancel()
    first = min(ended, key=lambda death: deaths[death].ended_with_another_rank)
    if words := deaths[first].peer.reported_error:
        raise words
    kind = LearnerLost if part[0].role == "learner" else ComponentDied
    raise kind(first.result(), remedy=REMEDY)


async def _cause_known(deaths: Mapping[asyncio.Task[str], Child]) -> None:
    """Wait until a process of ``deaths`` has ended for a cause of its own, and not because another rank was lost, or
    all have ended. The keys are the tasks that wait for the ends."""
    while (alive := [death for death in deaths if not death.done()]) and all(
        child.ended_with_another_rank for death, child in deaths.items() if death.done()
    ):
        await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)


async def _environments_ready(envs: EnvPool, order: LaunchOrder) -> None:
    """Wait until the environment workers of this machine are ready or, if there are none, one of a machine that joins.
    Raises :class:`~headrace.base.errors.DeadlineError` after ``launch.start_timeout_s``."""
    timeout_s = order.launch.start_timeout_s
    invitation = order.run_dir / INVITATION_FILE
    if not envs.keeps_some_here:
        words = f"env.workers=0: waits for a machine to join at {order.launch.join} (headrace join {invitation})"
        order.on_event(Event(wall_s=0.0, text=words))
    try:
        async with asyncio.timeout(timeout_s):
            await envs.started()
    except TimeoutError:
        if envs.keeps_some_here:
            raise DeadlineError(
                f"the environment workers did not start within {timeout_s:g} s",
                remedy="look at their logs in the run directory; raise launch.start_timeout_s",
            ) from None
        raise DeadlineError(
            f"no machine has joined at {order.launch.join} within {timeout_s:g} s, and env.workers=0 keeps no "
            "environment on this one",
            remedy=f"run headrace join there, with {invitation}; raise launch.start_timeout_s, or set env.workers >= 1",
        ) from None


def _stopped_in_words(children: list[Child]) -> str:
    """Return a description of the processes that are stopped, in words that follow an error text; empty if there are
    none."""
    return "".join(f"; {child.role} (pid {child.pid}) {child.peer.halted}" for child in children if child.peer.halted)


async def _all_ready(children: list[Child], pool: ScoringStage, timeout_s: float) -> None:
    """Wait until the processes ``children`` (the ranks of the learner) and all scoring workers are ready. Raises
    :class:`~headrace.base.errors.DeadlineError` after ``timeout_s`` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            if children:
                await asyncio.wait([child.peer.ready for child in children])  # unlike gather, it cancels none of them
            await pool.started()
    except TimeoutError:
        late = [child.role for child in children if not child.peer.ready.done()] or ["scorer"]
        raise DeadlineError(
            f"{', '.join(late)} did not start within {timeout_s:g} s{_stopped_in_words(children)}",
            remedy="look at its log in the run directory; raise launch.start_timeout_s for a large model",
        ) from None
