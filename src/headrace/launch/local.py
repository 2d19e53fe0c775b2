"""The launch of a run: it starts the engines, the learner, and the scoring and environment workers, and supervises
them. An engine that dies is started again. The death of the learner is raised to the user with its cause.

controller ──orders──▶ engine     makes steps                ◀─┐
    │                  engine-n   with several engines         │
    │      ──orders──▶ agent-x    an engine with fixed weights of its own, for an agent of the environment
    │      ──orders──▶ teacher-x  an engine with fixed weights of its own, which scores sampled tokens
    │      ──orders──▶ learner    trains, fills the buffers  ──┘ two weight buffers, by default in shared memory
    │                  learner-n  its other ranks, which receive the orders from it
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
from headrace.control.credit import credit, make_segmenter
from headrace.control.teaching import TeacherClient, Teachers
from headrace.engine.remote import RemoteEngine
from headrace.launch.child import LAST_REPORT_S, Child, Rendezvous
from headrace.launch.clients import EngineClient, EnvPool, ScoringStage
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.config import INVITATION_FILE, LAUNCHERS
from headrace.launch.engines import Engines
from headrace.launch.environments import JOINING, JoinServer, make_environment_pool, make_environment_start
from headrace.launch.order import LaunchedRun, LaunchOrder
from headrace.launch.processes import Processes, open_directories, shard_workers
from headrace.launch.resizing import FleetResizer
from headrace.launch.supervision import REMEDY, Supervisor
from headrace.launch.vitals import Vitals
from headrace.models.settings import read_config
from headrace.rollout.agents import Agents
from headrace.rollout.environments import SingleTurn

START_REPORT_S = 3.0
"""The interval, in seconds, between two reports about the processes for which the start of a run is waiting."""


@asynccontextmanager
async def launch_run(order: LaunchOrder) -> AsyncIterator[LaunchedRun]:
    """Start all processes of the run that ``order`` describes, and yield the launched run when all of them are ready.
    All processes are ended with the context.

    Raises :class:`~headrace.base.errors.ConfigError` for a model that the learner's ranks cannot share, and for an
    optimizer that is not installed. If a part cannot start, the error that it reports is raised. Inside the context,
    the death of a part that cannot be replaced cancels the body and raises
    :class:`~headrace.base.errors.ComponentDied`.
    """
    order.learner.parallel.refuse_settings(order.model)
    order.learner.optimizer.refuse_missing()
    if order.learner.parallel.world > 1:
        order.learner.parallel.refuse_model(order.model.path, read_config(order.model.path))
    async with _open_processes(order) as processes, _open_join_server(order, processes.site) as join_server:
        processes.refuse_little_room()
        pool, envs = _make_scoring_stage(processes), make_environment_pool(processes)
        own_envs = envs if order.eval_tasks or not order.launch.rollouts else None  # shards have workers of their own
        engines, agents = processes.make_engines(), processes.make_agent_engines()
        teachers = processes.make_teacher_engines()
        rollouts = processes.make_shards(engines)
        changes = FleetResizer(processes, engines)
        serving = [engines, *agents.values(), *teachers.values()]
        supervised: list[Supervisor] = [*serving, *([] if rollouts is None else [rollouts])]
        for each in supervised:
            await each.start()
        learner_client = await processes.start_learner()
        learner_client.receivers, learner_client.addresses_without = engines.addresses, engines.addresses_without
        learner_client.engines_in_step = engines.engines_in_step
        learner_client.commit_when_staged = partial(engines.commit_when_staged, order.sync.interrupt)
        vitals = _make_vitals(processes)
        engines.learner_owes = lambda: learner_client.awaits_answer
        async with _supervise(processes, supervised, pool, own_envs, join_server, vitals=vitals):
            parts = Components(
                **_make_serving_parts(order, engines, agents, pool, envs),
                shards=rollouts,
                work_signs=lambda: vitals.num_work_signs,
                standstills=vitals.standstills,
                teachers=_make_teacher_clients(order, teachers),
                engine_set=engines.fleet,
                learner=learner_client,
                tasks=order.tasks,
                advantages=partial(credit, order.algo, branch_weight=order.branch_weight),
                run_dir=order.run_dir,
                columns_shared=not order.launch.remote,
                interrupt=order.sync.interrupt,
            )
            yield LaunchedRun(
                parts=parts,
                components=lambda: processes.describe_components(_count_restarts(supervised), vitals.stopped()),
                send_warnings_to=partial(_send_warnings, pool, envs),
                send_signs_to=vitals.send_messages_to,
                send_recoveries_to=partial(_send_recoveries, supervised),
                facts=processes.get_facts,
                changes=changes,
                private=processes.site.directory,
            )


@asynccontextmanager
async def launch_serving(order: LaunchOrder, remote: RemoteEngine | None = None) -> AsyncIterator[Serving]:
    """Start the processes that an evaluation without training needs, and yield them as the controller uses them:
    scoring and environment workers, and an engine with the weights of its model directory. If ``remote`` is given, this
    client of a remote engine takes the place of the engine. All processes are ended with the context."""
    async with _open_processes(order) as processes, _open_join_server(order, processes.site) as join_server:
        pool, envs = _make_scoring_stage(processes), make_environment_pool(processes)
        engines, agents = processes.make_engines(own_weights=True), processes.make_agent_engines()
        supervisors = [*([engines] if remote is None else []), *agents.values()]
        for each in supervisors:
            await each.start()
        vitals = _make_vitals(processes)
        async with _supervise(processes, supervisors, pool, envs, join_server, vitals=vitals):
            serving = _make_serving_parts(order, engines, agents, pool, envs)
            yield Serving(
                **(serving if remote is None else {**serving, "engine": remote}), standstills=vitals.standstills
            )


def _open_join_server(order: LaunchOrder, site: Rendezvous) -> AbstractAsyncContextManager[JoinServer | None]:
    """Return the context of the server through which other machines join the run with environment workers. The context
    yields ``None`` for a run without ``launch.join``."""
    return JOINING.load("machines")(order, site) if order.launch.join else nullcontext()


@asynccontextmanager
async def _open_processes(order: LaunchOrder) -> AsyncIterator[Processes]:
    """Create the directories of a run and open its launcher, and yield the object that starts the processes of the run.
    When the context ends, all processes are ordered to shut down. If it ends with an error, they are killed at once."""
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
async def _supervise(
    processes: Processes,
    supervised: Sequence[Supervisor],
    pool: ScoringStage,
    envs: EnvPool | None,
    join_server: JoinServer | None,
    *,
    vitals: Vitals,
) -> AsyncIterator[None]:
    """Supervise the processes of a run within this context: wait until all of them are ready, then run the body. The
    body is cancelled and the error raised if the learner dies, if an engine cannot be restarted, or if workers cannot
    be kept running. Other engines, shards and workers that die are started again while the body continues.

    ``supervised`` contains the supervisors of the policy's engines, of the engines of agents and teachers, and of the
    shards. ``pool`` and ``envs`` are the pools of scoring and environment workers. ``vitals`` warns about processes
    that make no progress. ``envs`` is ``None`` for an environment without workers, and ``join_server`` is ``None`` for
    a run that other machines cannot join.
    """
    unsupervised = [child for child in processes.children if not isinstance(child.peer, EngineClient | RolloutClient)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(child.peer.listen()) for child in unsupervised]
        ranks = [child for child in unsupervised if child.role.startswith("learner")]
        others = [[child] for child in unsupervised if child not in ranks]
        tasks += [group.create_task(_raise_on_death(part)) for part in (*others, ranks) if part]
        tasks += [group.create_task(each.run()) for each in supervised] + [group.create_task(pool.run())]
        tasks.append(group.create_task(vitals.watch()))
        if envs is not None:
            tasks.append(group.create_task(envs.keep()))
            if join_server is not None:
                start = make_environment_start(processes.order.env)
                tasks.append(group.create_task(join_server.admit(envs, start, processes.start_environment)))
        on_event = processes.order.on_event
        starting = group.create_task(
            report_start(lambda: processes.children, lambda text: on_event(Event(wall_s=0.0, text=text)))
        )
        await _wait_until_ready(unsupervised, pool, processes.order.launch.start_timeout_s)
        if envs is not None:
            await _wait_for_environments(envs, processes.order)
        for each in supervised:
            # an engine joins its fleet as soon as it is ready; weights go only to engines that have joined
            await each.wait_until_complete()
        starting.cancel()
        yield
        for task in tasks:
            task.cancel()


async def report_start(children: Callable[[], Sequence[Child]], on_progress: Callable[[str], None]) -> None:
    """Call ``on_progress`` every :data:`START_REPORT_S` seconds with a text that names the processes that are not ready
    yet, and what they are doing. This ends only by cancellation. ``children`` returns the processes of the run."""
    waited_s = 0.0
    while True:
        await asyncio.sleep(START_REPORT_S)
        waited_s += START_REPORT_S
        late = [child for child in children() if child.state not in ("ready", "ended")]
        starting = [child.role for child in late if not child.peer.halted]
        workers = [role for role in starting if role.startswith(("scorer-", "environment-"))]
        models = [role for role in starting if role not in workers]
        states = [f"{child.role} (pid {child.pid}) {child.peer.halted}" for child in late if child.peer.halted]
        states += [f"{', '.join(models)}: load the model"] if models else []
        states += [f"{', '.join(workers)}: import your code"] if workers else []
        on_progress(f"starting for {waited_s:.0f} s; {'; '.join(states) or 'the engines get ready to take weights'}")


def _make_vitals(processes: Processes) -> Vitals:
    """Return the supervision that warns about processes of the run that are stopped or hang. Its warnings become events
    for the user until the run has started."""
    order = processes.order

    def warn(text: str, *, kind: str, over: bool = False) -> None:
        """Report ``text`` as an event for the user: a warning or, with ``over``, the message that the cause of a
        warning has ended."""
        del kind  # all warnings during the start are shown, also repeated ones
        order.on_event(Event(wall_s=0.0, text=text, level="info" if over else "warning"))

    def get_other_pids() -> dict[str, int]:
        """Return the pids of the fork server and of the workers of rollout shards that have not ended, by name."""
        shards = [child for child in processes.children if child.state != "ended"]
        workers = [worker for shard in shards for worker in shard_workers(shard)]
        pids = {worker.name: worker.pid for worker in workers if worker.state != "ended"}
        return pids if order.forks is None or order.forks.lost else {"fork server": order.forks.pid, **pids}

    return Vitals(
        children=lambda: processes.children,
        timeout_s=order.stall_timeout_s,
        start_timeout_s=order.launch.start_timeout_s,
        clock=RealClock(),
        warn=warn,
        on_span=lambda span: order.on_spans([span]),
        other_pids=get_other_pids,
    )


def _count_restarts(supervised: Sequence[Supervisor]) -> Counter[str]:
    """Return how many times each engine and each shard was started again, by name."""
    return sum((each.restarts for each in supervised), Counter[str]())


def _send_recoveries(supervised: Sequence[Supervisor], on_recovery: Callable[[Recovery], None]) -> None:
    """Make all supervisors report later deaths and recoveries to ``on_recovery``."""
    for each in supervised:
        each.send_recoveries_to(on_recovery)


def _send_warnings(pool: ScoringStage, envs: EnvPool | None, warn: Callable[[str], None]) -> None:
    """Make all pools of workers send later warnings for users to ``warn``."""
    pool.send_warnings_to(warn)
    if envs is not None:
        envs.send_warnings_to(warn)


def _make_scoring_stage(processes: Processes) -> ScoringStage:
    """Return the scoring stage of a run, with one pool of workers for each component of the reward. The workers are not
    started yet."""
    order = processes.order
    return ScoringStage(
        order.env.components,
        processes.start_scorer,
        start_timeout_s=order.launch.start_timeout_s,
        warn=lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning")),
        on_span=lambda span: order.on_spans([span]),
    )


def _make_serving_parts(
    order: LaunchOrder, engines: Engines, agents: Mapping[str, Engines], pool: ScoringStage, envs: EnvPool | None
) -> dict[str, Any]:
    """Return the components that sample and score episodes of the run ``order``, as keyword arguments of
    :class:`~headrace.control.parts.Serving`. ``engines`` are the policy's engines, ``agents`` the engines of other
    agents, ``pool`` the scoring workers, and ``envs`` the environment workers, if there are any."""
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
        "limits": order.episode_limits,
        "episode_timeout_s": order.env.timeout_s,
        "episode_retries": order.env.retries,
        "segments": make_segmenter(order.algo),
    }


def _make_teacher_clients(order: LaunchOrder, engines: Mapping[str, Engines]) -> Teachers | None:
    """Return the clients of the teachers that have engines in this run; ``None`` if there are none. ``engines``
    contains the supervisor of each teacher's engine, by the teacher's name."""
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


async def _raise_on_death(part: Sequence[Child]) -> None:
    """Wait until a process of a part dies, and raise the cause. A part is one process, or all ranks of the learner.
    When one rank dies, the other ranks end too; the error of the rank that died first is raised."""
    async with asyncio.TaskGroup() as group:
        deaths = {group.create_task(child.wait_for_death()): child for child in part}
        await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPORT_S):
                await _wait_for_cause(deaths)
        ended_tasks = [death for death in deaths if death.done()]
        for death in deaths:
            death.cancel()
    first_death = min(ended_tasks, key=lambda death: deaths[death].ended_with_another_rank)
    if error := deaths[first_death].peer.reported_error:
        raise error
    kind = LearnerLost if part[0].role == "learner" else ComponentDied
    raise kind(first_death.result(), remedy=REMEDY)


async def _wait_for_cause(deaths: Mapping[asyncio.Task[str], Child]) -> None:
    """Wait until a process in ``deaths`` has ended for its own cause, and not because another rank was lost, or until
    all processes have ended. The keys of ``deaths`` are the tasks that wait for the ends of the processes."""
    while (alive := [death for death in deaths if not death.done()]) and all(
        child.ended_with_another_rank for death, child in deaths.items() if death.done()
    ):
        await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)


async def _wait_for_environments(envs: EnvPool, order: LaunchOrder) -> None:
    """Wait until the environment workers of this machine are ready. If this machine has none, wait until a worker on a
    machine that joins is ready. Raises :class:`~headrace.base.errors.DeadlineError` after
    ``launch.start_timeout_s``."""
    timeout_s = order.launch.start_timeout_s
    invitation = order.run_dir / INVITATION_FILE
    if not envs.has_local_workers:
        text = f"env.workers=0: waits for a machine to join at {order.launch.join} (headrace join {invitation})"
        order.on_event(Event(wall_s=0.0, text=text))
    try:
        async with asyncio.timeout(timeout_s):
            await envs.wait_until_started()
    except TimeoutError:
        if envs.has_local_workers:
            raise DeadlineError(
                f"the environment workers did not start within {timeout_s:g} s",
                remedy="look at their logs in the run directory; raise launch.start_timeout_s",
            ) from None
        raise DeadlineError(
            f"no machine has joined at {order.launch.join} within {timeout_s:g} s, and env.workers=0 keeps no "
            "environment on this one",
            remedy=f"run headrace join there, with {invitation}; raise launch.start_timeout_s, or set env.workers >= 1",
        ) from None


def _describe_stopped(children: list[Child]) -> str:
    """Return a description of all stopped processes among ``children``, in words that follow an error text; empty if no
    process is stopped."""
    return "".join(f"; {child.role} (pid {child.pid}) {child.peer.halted}" for child in children if child.peer.halted)


async def _wait_until_ready(children: list[Child], pool: ScoringStage, timeout_s: float) -> None:
    """Wait until the processes ``children``, which are the ranks of the learner, and all scoring workers are ready.
    Raises :class:`~headrace.base.errors.DeadlineError` after ``timeout_s`` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            if children:
                await asyncio.wait([child.peer.ready for child in children])  # gather would cancel them
            await pool.wait_until_started()
    except TimeoutError:
        late = [child.role for child in children if not child.peer.ready.done()] or ["scorer"]
        raise DeadlineError(
            f"{', '.join(late)} did not start within {timeout_s:g} s{_describe_stopped(children)}",
            remedy="look at its log in the run directory; raise launch.start_timeout_s for a large model",
        ) from None
