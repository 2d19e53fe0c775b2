"""The cluster file of ``headrace plan --cluster``: its tables ``[cluster]`` (accelerators and machines), ``[workload]``
and ``[deploy]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import msgspec
from pydantic import Field, PositiveFloat, StringConstraints, model_validator

from headrace.base import __version__
from headrace.base.config import Section, load_toml, validate
from headrace.base.errors import ConfigError
from headrace.wings.plan.catalogue import DEFAULT_HOST, Accelerator, HostFigures, accelerator, accelerators, hosts
from headrace.wings.plan.workload import Workload

CORES = "CPU-core"
"""Name in the catalogue of one core of a processor."""


class HostSettings(Section):
    """The table ``[cluster.host]``: what one machine can do for a version of the weights. What is unset is that of the
    accelerator's machine in the catalogue; rates are in 10⁹ bytes per second."""

    cores: int | None = Field(default=None, ge=1)
    """Number of cores."""
    memory_gb: PositiveFloat | None = None
    """Memory in 10⁹ bytes."""
    memory_gb_s: PositiveFloat | None = None
    """Rate at which all cores together read and write memory."""
    links: int | None = Field(default=None, ge=1)
    """Number of links of the network among which the connections of the weights are spread, each with
    ``cluster.network_gb_s``. The process groups of ``sync.transport = "group"`` bind to one address, so that more than
    one need a bonded interface."""
    stream_gb_s: PositiveFloat | None = None
    """Rate of one connection, of which each end is one thread."""
    hash_gb_s: PositiveFloat | None = None
    """Rate at which one thread hashes (xxh3)."""
    copy_gb_s: PositiveFloat | None = None
    """Rate at which one thread copies memory."""
    down_gb_s: PositiveFloat | None = None
    """Rate of a copy from one accelerator into memory of its machine that is not page-locked."""
    up_gb_s: PositiveFloat | None = None
    """Rate of a copy from such memory to one accelerator."""
    load_gb_s: PositiveFloat | None = None
    """Rate at which a server of models (``engine.kind = "vllm"``) loads weights from files, for each of its
    accelerators."""
    load_most_gb_s: PositiveFloat | None = None
    """The largest rate at which the servers of one machine load weights from files."""


class Cluster(Section):
    """The table ``[cluster]``: identical accelerators, and the fraction of their peak that software reaches."""

    accelerator: str = Field(min_length=1)
    """Name of the accelerator in the catalogue; for another one set ``peak_tflops``, ``bandwidth_gb_s`` and
    ``memory_gb``."""
    count: int = Field(ge=1)
    """Number of accelerators."""
    per_node: int = Field(default=8, ge=1)
    """Number of accelerators in one machine; an engine does not span machines."""
    network_gb_s: PositiveFloat = 50.0
    """Bandwidth between learner and engines, over which new weights travel, in 10⁹ bytes per second: that of one link
    of a machine, in each direction."""
    host: HostSettings = HostSettings()
    """The figures of one machine, for the time of a publication by ``sync.transport = "group"``."""
    peak_tflops: PositiveFloat | None = None
    """Peak rate in 10¹² dense operations per second in the model's number format; unset: the catalogue's."""
    bandwidth_gb_s: PositiveFloat | None = None
    """Memory bandwidth in 10⁹ bytes per second; unset: the catalogue's."""
    memory_gb: PositiveFloat | None = None
    """Memory in 10⁹ bytes; unset: the catalogue's."""
    decode_share: float = Field(default=0.6, gt=0, le=1)
    """Fraction of the roofline that an engine reaches; 1 is the physical limit."""
    train_share: float = Field(default=0.4, gt=0, le=1)
    """Fraction of the peak rate that the learner reaches."""
    generation_tok_s: PositiveFloat | None = None
    """Tokens per second of one generating accelerator at any batch size; with ``training_tok_s``, constant rates
    replace the roofline. Unset: the roofline."""
    training_tok_s: PositiveFloat | None = None
    """Tokens per second of one training accelerator; set together with ``generation_tok_s``."""
    mtbf_h: PositiveFloat | None = None
    """Mean time between failures of one accelerator, in hours; unset: none fails."""
    restart_s: PositiveFloat = 300.0
    """Time from a failure until the failed part works again, in seconds."""

    @model_validator(mode="after")
    def _refuse_single_rate(self) -> Self:
        """Refuse a constant rate of generation without a constant rate of training, and the reverse."""
        if (self.generation_tok_s is None) != (self.training_tok_s is None):
            given = "training_tok_s" if self.generation_tok_s is None else "generation_tok_s"
            other = "generation_tok_s" if self.generation_tok_s is None else "training_tok_s"
            raise ConfigError(
                f"cluster.{given}={getattr(self, given)!r} has no effect without cluster.{other}: constant rates are "
                "of both sides",
                remedy=f"set cluster.{other} too, or leave cluster.{given} out",
            )
        return self

    @property
    def device(self) -> Accelerator:
        """Return the figures of one accelerator: the values of the file, and the catalogue's values where the file has
        none."""
        own = {
            key: value
            for key in ("peak_tflops", "bandwidth_gb_s", "memory_gb")
            if (value := getattr(self, key)) is not None
        }
        if len(own) == 3:
            return Accelerator(name=self.accelerator, **own)
        return msgspec.structs.replace(accelerator(self.accelerator), **own)

    @property
    def machine(self) -> HostFigures:
        """Return the figures of one machine: the values of the file, and the catalogue's values where the file has
        none."""
        named = {each.casefold(): each for each in accelerators()}.get(self.accelerator.casefold())
        listed = hosts()[DEFAULT_HOST if named is None else accelerators()[named].host]
        own = {key: value for key, value in self.host.model_dump().items() if value is not None}
        cores = listed.cores or self.per_node
        return msgspec.structs.replace(listed, **{"cores": cores, "link_gb_s": self.network_gb_s, **own})

    @property
    def of_cores(self) -> bool:
        """Return whether the accelerators of this cluster are processor cores, which compute in host memory."""
        return self.accelerator.casefold() == CORES.casefold()

    @property
    def num_machines(self) -> int:
        """Return the number of machines; the last one may have fewer accelerators than ``per_node``."""
        return -(-self.count // self.per_node)

    @property
    def constant(self) -> bool:
        """Return whether the plan uses the constant rates of the file instead of the roofline."""
        return self.generation_tok_s is not None and self.training_tok_s is not None

    def __str__(self) -> str:
        """Return the number and the name of the accelerators, such as ``8 × H100``."""
        return f"{self.count} × {self.accelerator}"


FolderName = Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9._/-]+$")]
"""An absolute path that no shell and no YAML file reads as anything else."""


class DeploySettings(Section):
    """The table ``[deploy]`` of a cluster file: what the files of ``headrace plan --deploy`` need besides the map."""

    name: str = Field(default="headrace", pattern=r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$")
    """Name of the job and of the cluster: small letters, digits and dashes."""
    image: str = Field(default=f"headrace:{__version__}", pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")
    """The image of the pods."""
    claim: str = Field(default="headrace-shared", pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """The volume claim that every pod mounts at ``shared``."""
    shared: FolderName = "/shared"
    """A folder that every machine sees under this path."""
    run_dir: FolderName = "/shared/runs/first"
    """The run directory, below ``shared``."""
    addresses: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*$")], ...] = ()
    """The addresses of the machines for Ray's cluster launcher, that of the controller first; empty: no ``ray.yaml`` is
    written."""
    user: str = Field(default="ray", pattern=r"^[a-z_][a-z0-9_-]*$")
    """The user that ssh logs in as on these machines."""
    time_limit: str = Field(default="24:00:00", pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")
    """The time limit of a Slurm job."""
    head_cpus: int = Field(default=4, ge=1)
    """Number of cores of the pod in which the controller runs."""
    head_memory_gb: int = Field(default=16, ge=1)
    """Memory of that pod in GiB."""


class ClusterFile(Section):
    """The content of a cluster file."""

    cluster: Cluster
    """The accelerators."""
    deploy: DeploySettings = DeploySettings()
    """What the files of a deployment need besides the map; only ``headrace plan --deploy`` reads it."""
    workload: Workload | None = None
    """Lengths and times of the work; unset: those of the calibration run, or, without one, prompts of 256 tokens and
    answers with lognormal lengths whose mean is a quarter of ``engine.max_new_tokens``."""


def load_cluster(path: Path) -> ClusterFile:
    """Read and validate the cluster file (TOML) at ``path``. Raises :class:`~headrace.base.errors.ConfigError` for
    invalid settings."""
    return validate(ClusterFile, load_toml(path, "cluster file"))
