"""The files of a deployment: those of the example are what the planner writes, every one of them is held against the
rules of the program that reads it, and bad input is refused before anything is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.run.cli.app import app
from headrace.run.session import load_config
from headrace.wings.plan import ClusterFile, load_cluster, make_site
from headrace.wings.plan.cluster_map import ClusterMap, make_cluster_map
from headrace.wings.plan.deploy import FILES, deploy_overrides, make_deployment, write_deployment
from headrace.wings.plan.planning import make_sizing_request

DEPLOY = Path(__file__).parents[2] / "deploy"
CRD: dict[str, Any] = json.loads((Path(__file__).parent / "kuberay_crd.json").read_text())["schema"]
"""KubeRay's own schema of a RayJob, without descriptions and pod templates."""
SLURM = """ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
CredType=cred/none
MessageTimeout=1
NodeName=n[1-8] CPUs=64 Gres=gpu:8
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES
"""


def made(
    file: ClusterFile, *overrides: str, folder: str = "deploy", **sections: dict[str, Any]
) -> tuple[dict[str, str], ClusterMap]:
    needed = deploy_overrides(load_config(DEPLOY / "run.toml", overrides))
    config = load_config(DEPLOY / "run.toml", [*overrides, *needed])
    site = make_site(make_sizing_request(config), file)
    run_map = make_cluster_map(config, site)
    return make_deployment([*overrides, *needed], site, run_map, file.deploy, folder), run_map


def cluster(**changes: Any) -> ClusterFile:
    tree = load_cluster(DEPLOY / "cluster.toml").model_dump(exclude_unset=True)
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return ClusterFile.model_validate(tree)


LARGE = [
    "engine.kind=vllm",
    "engine.tensor=4",
    "launch.ray.engine.gpus=4",
    "engine.count=4",
    "learner.parallel.data=16",
]


def other_cluster() -> ClusterFile:
    return cluster(
        cluster={"count": 32},
        deploy={
            "name": "other-run",
            "shared": "/mnt/all",
            "run_dir": "/mnt/all/r",
            "addresses": [f"n{k}" for k in range(9)],
        },
    )


def test_files_of_the_example_are_those_that_the_planner_writes() -> None:
    files, _ = made(cluster())
    assert set(files) == set(FILES)
    for name, text in files.items():
        assert (DEPLOY / name).read_text() == text, f"remove deploy/{name}, and run the command in deploy/cluster.toml"
        assert os.access(DEPLOY / name, os.X_OK) == name.endswith(".sh")


@pytest.fixture(params=["example", "other"])
def files(request: pytest.FixtureRequest) -> tuple[dict[str, str], ClusterMap]:
    return made(cluster()) if request.param == "example" else made(other_cluster(), *LARGE, folder="my files")


def strict(schema: Any) -> Any:
    """The schema without leave for fields that it does not name, which Kubernetes drops silently."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if schema.get("type") == "object" and "properties" in schema else {}
    free = {key: value for key, value in schema.items() if key != "x-kubernetes-int-or-string"}
    return {**{key: strict(value) for key, value in free.items()}, **closed}


def manifests(text: str) -> list[dict[str, Any]]:
    return list(pytest.importorskip("yaml").safe_load_all(text))


def test_ray_job_follows_the_schema_of_kuberay_and_its_pods_that_of_kubernetes(
    files: tuple[dict[str, str], ClusterMap],
) -> None:
    jsonschema, kubernetes = pytest.importorskip("jsonschema"), pytest.importorskip("kubernetes_validate")
    job, policy = manifests(files[0]["kuberay.yaml"])
    schema = strict(CRD)
    schema["properties"]["metadata"].pop("additionalProperties", None)
    jsonschema.validate(job, schema)
    spec = job["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)
    kubernetes.validate(policy, kubernetes.latest_version(), strict=True)
    # the checks can fail
    with pytest.raises(jsonschema.ValidationError, match="rayClusterSpecs"):
        jsonschema.validate({**job, "spec": {**job["spec"], "rayClusterSpecs": {}}}, schema)
    with pytest.raises(jsonschema.ValidationError, match="'two'"):
        jsonschema.validate({**job, "spec": {**job["spec"], "backoffLimit": "two"}}, schema)
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes.ValidationError, match="volumeMount"):
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def test_cluster_of_ray_is_accepted_by_its_launcher(files: tuple[dict[str, str], ClusterMap]) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    jsonschema = pytest.importorskip("jsonschema")
    (config,) = manifests(files[0]["ray.yaml"])
    prepared = util.prepare_config(config)
    util.validate_config(prepared)
    machines = [config["provider"]["head_ip"], *config["provider"]["worker_ips"]]
    assert len(machines) == len(set(machines)) == files[1].machines
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        util.validate_config({**prepared, "max_worker": 3})


def test_job_of_slurm_is_sound_shell_and_asks_for_what_the_map_needs(
    files: tuple[dict[str, str], ClusterMap], tmp_path: Path
) -> None:
    texts, run_map = files
    for name in ("slurm.sh", "train.sh"):
        subprocess.run(["bash", "-n"], input=texts[name], text=True, check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", texts["slurm.sh"], re.MULTILINE))
    known = {
        "job-name": r"[a-z-]+", "nodes": str(run_map.machines), "ntasks-per-node": "1", "cpus-per-task": r"\d+",
        "gpus-per-node": r"\d+", "time": r"[\d:-]+", "signal": r"B:USR1@600", "requeue": "", "open-mode": "append",
        "output": r"[a-z-]+-%j\.log",
    }  # fmt: skip
    assert options.keys() == known.keys()
    for name, value in options.items():
        assert re.fullmatch(known[name], value), name
    gpus, cores = Counter[int](), Counter[int]()
    for part in run_map.parts:
        gpus[part.machine or 0] += len(part.gpus)
        cores[part.machine or 0] += int(part.cpus)
    assert int(options["gpus-per-node"]) == max(gpus.values())
    assert int(options["cpus-per-task"]) > max(cores.values())
    if shutil.which("sbatch") is None:
        return
    (tmp_path / "slurm.conf").write_text(SLURM)
    script = tmp_path / "slurm.sh"
    for option, said in (("--requeue", "Unable to contact"), ("--rq", "unrecognized option '--rq'")):
        script.write_text(texts["slurm.sh"].replace("--requeue", option))
        done = subprocess.run(
            ["sbatch", "--test-only", script], capture_output=True, text=True, check=False, timeout=60,
            env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
        )  # fmt: skip
        assert said in done.stderr


def test_all_files_ask_for_the_same_machines_and_start_the_same_run(files: tuple[dict[str, str], ClusterMap]) -> None:
    texts, run_map = files
    job, _ = manifests(texts["kuberay.yaml"])
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == run_map.machines
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    (config,) = manifests(texts["ray.yaml"])
    for command in (config["head_start_ray_commands"][1], config["worker_start_ray_commands"][1]):
        assert f"--num-cpus={limits['cpu']} --num-gpus={limits['nvidia.com/gpu']}" in command
    asked = f"#SBATCH --cpus-per-task={limits['cpu']}\n#SBATCH --gpus-per-node={limits['nvidia.com/gpu']}\n"
    assert asked in texts["slurm.sh"]
    width = max(len(part.gpus) for part in run_map.parts)
    settings = f"--set launch.kind=ray --set launch.ray.engine.gpus={width} --set launch.ray.learner.gpus=1"
    for text in (job["spec"]["entrypoint"], texts["ray.yaml"], texts["slurm.sh"]):
        assert settings in text
    assert not re.search(r"@[A-Z_]+@", "".join(texts.values()))


def test_memory_of_a_pod_holds_the_versions_of_its_parts() -> None:
    few, many = (made(cluster(), *more)[0]["kuberay.yaml"] for more in ((), ("engine.kind=vllm",)))
    asked = [int(value) for text in (few, many) for value in re.findall(r"requests: .*memory: (\d+)Gi", text)[1:]]
    params = 8.2e9
    assert asked[0] * 2**30 > 8 * 2 * 2 * params
    assert (asked[1] - asked[0]) * 2**30 == pytest.approx(8 * 2 * 2 * params, rel=0.1)  # files of two versions
    with pytest.raises(ConfigError, match=r"has 200 GB \(cluster\.host\.memory_gb\)") as refused:
        made(cluster(cluster={"host": {"memory_gb": 200}}))
    assert "fewer engines" in refused.value.remedy


@pytest.mark.parametrize(
    ("changes", "overrides", "problem"),
    [
        ({"deploy": {"addresses": ["a"]}}, [], r"deploy\.addresses has 1 machines, and the run needs 2"),
        ({"deploy": {"run_dir": "/elsewhere/run"}}, [], r"does not lie in deploy\.shared='/shared'"),
        ({}, ["learner.parallel.data=1", "engine.count=2"], r"would fail: Does not fit: each rank of the learner"),
        ({}, ["sync.transport=shm"], r"sync\.transport='shm' is memory of one machine"),
        ({}, ["engine.count=9"], r"asks for 17 accelerators"),
    ],
)
def test_deployment_that_could_not_run_is_refused(changes: dict[str, Any], overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        made(cluster(**changes), *overrides)


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "A run"}, {"image": "x; rm -rf /"}, {"shared": "relative"}, {"run_dir": "/shared/$(id)"},
        {"addresses": ["10.0.0.1 --x"]}, {"user": "root;"}, {"time_limit": "a day"}, {"claim": "{}"},
    ],
)  # fmt: skip
def test_words_that_a_shell_or_yaml_would_read_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    file = tmp_path / "cluster.toml"
    (name, value), *_ = bad.items()
    file.write_text(f"[cluster]\naccelerator = 'H100'\ncount = 16\n[deploy]\n{name} = {json.dumps(value)}\n")
    with pytest.raises(ConfigError, match=rf"deploy\.{name}"):
        load_cluster(file)


def test_files_of_others_are_never_overwritten(tmp_path: Path) -> None:
    texts, _ = made(cluster())
    write_deployment(texts, tmp_path / "d")
    write_deployment(texts, tmp_path / "d")
    (tmp_path / "d" / "slurm.sh").write_text("mine")
    with pytest.raises(ConfigError, match=r"slurm\.sh is there"):
        write_deployment(texts, tmp_path / "d")
    assert (tmp_path / "d" / "slurm.sh").read_text() == "mine"


def test_program_writes_the_files_of_a_deployment(tmp_path: Path) -> None:
    given = tmp_path / "cluster.toml"
    given.write_text((DEPLOY / "cluster.toml").read_text() + "[workload]\nanswer_tokens = 20\nprompt_tokens = 10\n")
    arguments = ["--set", "flow.groups_per_step=2", "--generation", "8", "--deploy", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["plan", str(DEPLOY / "run.toml"), "--cluster", str(given), *arguments])
    assert done.exit_code == 0, done.output
    assert {file.name for file in (tmp_path / "out").iterdir()} == set(FILES)
    assert "--set flow.groups_per_step=2 --set launch.kind=ray" in (tmp_path / "out" / "slurm.sh").read_text()
