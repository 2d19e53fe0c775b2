"""The engines that a run has at present, by name, with the device of each. Engines of the policy are added and removed
during the run (:mod:`headrace.launch.resizing`); engines of agents and teachers stay."""

from __future__ import annotations

from itertools import count

from headrace.base.errors import ConfigError
from headrace.launch.engines import engine_names
from headrace.launch.order import LaunchOrder
from headrace.models.devices import Devices, device_for_one_more, num_gpus
from headrace.models.gpus import gpu_numbers

MAX_ENGINES = 64
"""Maximum number of engines of the policy. It is also the largest value of ``engine.count``."""


def teacher_role(name: str) -> str:
    """Return the name of the engine process of the teacher ``name``; the name is empty for a run's only teacher.

    >>> teacher_role(""), teacher_role("math")
    ('teacher', 'teacher-math')
    """
    return f"teacher-{name}" if name else "teacher"


def engine_name(number: int, at_start: int) -> str:
    """Return the name of the engine ``number`` in a run that began with ``at_start`` engines.

    >>> engine_name(0, 1), engine_name(1, 1), engine_name(0, 2)
    ('engine', 'engine-1', 'engine-0')
    """
    return engine_names(at_start)[0] if number == 0 else f"engine-{number}"


class EnginePlaces:
    """The engines of a run, by name: the engines of the policy, of the agents and of the teachers. Each engine has a
    device, and an index that stays the same when other engines are added or removed."""

    def __init__(self, order: LaunchOrder) -> None:
        """Start with the engines of ``order``."""
        self._order = order
        policy = engine_names(order.engine.count)
        frozen = (*(f"agent-{agent}" for agent in order.agents), *map(teacher_role, order.teachers))
        self._index = {name: index for index, name in enumerate((*policy, *frozen))}
        """The index of each engine, by name."""
        self._policy = dict.fromkeys(policy)
        """The names of the policy's engines, as the keys of a dictionary, in order."""
        self._devices = list(order.devices.engines)
        """The device of each engine, by its index. The GPUs of a removed engine stay here until an engine that is added
        takes them. Then the device is empty, as is that of a removed engine that computed on processors."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all engines: first the engines with which the run began, then the engines that were added."""
        return tuple(self._index)

    @property
    def policy(self) -> tuple[str, ...]:
        """The names of the policy's engines."""
        return tuple(self._policy)

    @property
    def devices(self) -> Devices:
        """The devices of all engines, by their indices, and of the learner."""
        return Devices(engines=tuple(self._devices), learner=self._order.devices.learner)

    def index(self, name: str) -> int:
        """Return the index of the engine ``name``."""
        return self._index[name]

    def device(self, name: str) -> str:
        """Return the device of the engine ``name``."""
        return self._devices[self._index[name]]

    def free_names(self, num: int) -> tuple[str, ...]:
        """Return the names that the next ``num`` added engines of the policy get: the first free names."""
        candidates = (engine_name(number, self._order.engine.count) for number in count())
        free = (name for name in candidates if name not in self._index)
        return tuple(next(free) for _ in range(num))

    def refuse_too_many(self, num: int) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the run would have too many engines of the policy with
        ``num`` more."""
        if len(self._policy) + num > MAX_ENGINES:
            raise ConfigError(
                f"the run has {len(self._policy)} engines, and {num} more would be more than {MAX_ENGINES}",
                remedy=f"add {max(0, MAX_ENGINES - len(self._policy))} at most",
            )

    def add(self, num: int) -> tuple[str, ...]:
        """Add ``num`` engines of the policy, and return their names, which are the next :meth:`free_names`. On GPUs,
        each takes those of a removed engine, or else GPUs that no part uses. Raises
        :class:`~headrace.base.errors.ConfigError` if the run would have too many engines or has too few devices; then
        no engine is added."""
        self.refuse_too_many(num)
        before, vacant = self._devices.copy(), self._find_vacant()
        try:
            for _ in range(num):
                self._devices.append(self._choose_device(vacant))
        except ConfigError:
            self._devices = before
            raise
        added = self.free_names(num)
        self._index.update(zip(added, range(len(before), len(self._devices)), strict=True))
        self._policy.update(dict.fromkeys(added))
        return added

    def remove(self, index: int) -> None:
        """Remove the engine with the index ``index``, whose process has ended, so that its name and its device are free
        again. Do nothing if the engine was removed before."""
        for name in [name for name, known_index in self._index.items() if known_index == index]:
            del self._index[name], self._policy[name]
            if not gpu_numbers(self._devices[index]):  # a GPU that several engines share keeps room for one more
                self._devices[index] = ""

    def _find_vacant(self) -> list[int]:
        """Return the indices of the engines that were removed and whose GPUs no engine has taken since. The GPUs with
        the fewest other engines come first."""
        used = [self._devices[index] for index in self._index.values()]
        removed = set(range(len(self._devices))).difference(self._index.values())
        vacant = [index for index in removed if self._devices[index]]
        return sorted(vacant, key=lambda index: used.count(self._devices[index]))

    def _choose_device(self, vacant: list[int]) -> str:
        """Return the device for one more engine: that of the first engine in ``vacant``, which is taken from it, or
        else GPUs that no part uses."""
        order = self._order
        if order.launch.remote:  # every engine sees only the devices that it has requested
            return order.devices.engines[0]
        if vacant:
            index = vacant.pop(0)
            device, self._devices[index] = self._devices[index], ""
            return device
        return device_for_one_more(
            order.engine.device,
            self.devices,
            gpus=num_gpus(),
            width=order.engine.width,
            only_cpu=order.model.deterministic,
        )
