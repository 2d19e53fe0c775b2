"""A stand-in for the command line of docker, as far as the driver uses it: ``python fake_docker.py STORE ARGUMENT...``.

Containers are processes in namespaces of their own on overlays of directories; images are lists of directories. An
option that docker does not have is refused as docker does. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

SET_UP = """
set -e
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$PLACE/upper,workdir=$PLACE/work" "$PLACE/root"
cd "$PLACE/root"
mount -t proc proc proc
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/shm
mount -t tmpfs -o "size=$SHM,mode=1777" tmpfs dev/shm
for name in null zero full random urandom; do : > dev/$name; mount --bind /dev/$name dev/$name; done
for name in fd:/proc/self/fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do ln -s "${name#*:}" "dev/${name%%:*}"; done
ulimit -n "$FILES"
exec chroot . /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root HOSTNAME="$HOST" "$@"
"""


class FakeDocker:
    """The images and containers in one folder."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def image(self, name: str) -> Path:
        return self.store / "images" / (name if ":" in name else f"{name}:latest").replace("/", "+")

    def container(self, name: str) -> Path:
        return self.store / "containers" / name

    def run(self, words: list[str]) -> int:
        parser = Parser(prog="run")
        for flag in ("--rm", "--interactive"):
            parser.add_argument(flag, action="store_true", required=True)
        for option in ("name", "label", "pull", "network", "hostname", "workdir", "log-driver", "pids-limit", "memory"):
            parser.add_argument(f"--{option}", required=True)
        for option in ("cap-drop", "cap-add", "security-opt", "ulimit", "storage-opt", "volume"):
            parser.add_argument(f"--{option}", action="append", default=[])
        for option in ("shm-size", "entrypoint"):
            parser.add_argument(f"--{option}", required=True)
        parser.add_argument("--cpus")
        parser.add_argument("image")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        order = parser.parse_args(words)
        image = self.image(order.image)
        if not image.exists():
            fail(125, f"Unable to find image '{order.image}' locally\npull access denied for {order.image}")
        directory = self.container(order.name)
        for name in ("upper", "work", "root"):
            (directory / name).mkdir(parents=True)
        if order.storage_opt:
            size = order.storage_opt[0].removeprefix("size=")
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=True)
            for name in ("upper", "work", "root"):
                (directory / name).mkdir()
        return self._run(order, directory, json.loads(image.read_text()))

    def _run(self, order: Any, directory: Path, image: dict[str, Any]) -> int:
        limits = dict(each.split("=") for each in order.ulimit)
        environment = {
            "PATH": os.environ["PATH"], "LOWER": ":".join(image["layers"]), "PLACE": str(directory),
            "HOST": order.hostname, "SHM": order.shm_size, "FILES": limits["nofile"].split(":")[1],
        }  # fmt: skip
        spaces = ["--mount", "--pid", "--ipc", "--uts", "--fork", "--propagation", "private"]
        spaces += ["--net"] if order.network == "none" else []
        rights = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        assert order.cap_drop == ["ALL"]
        assert order.security_opt == ["no-new-privileges"]
        command = ["unshare", *spaces, "bash", "-c", SET_UP, "set-up", *rights, order.entrypoint, *order.arguments]
        process = subprocess.Popen(command, env=environment, stdin=0)
        (pid,) = self._children(process.pid)
        label, _, value = order.label.partition("=")
        record = {"pid": int(pid), "client": os.getpid(), "image": order.image, "labels": {label: value}}
        record_path = self.store / "containers" / f"{order.name}.json"
        record_path.write_text(json.dumps(record))
        code = process.wait()
        record_path.unlink(missing_ok=True)
        subprocess.run(["umount", "-l", directory], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(directory, ignore_errors=True)
        return code if code >= 0 else 128 - code

    @staticmethod
    def _children(pid: int) -> list[str]:
        """The first process of the new namespace, as soon as there is one."""
        while not (found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            os.sched_yield()
        return found

    def _record(self, name: str) -> dict[str, Any]:
        path = self.store / "containers" / f"{name}.json"
        if not path.exists():
            fail(1, f"Error response from daemon: No such container: {name}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def kill(self, words: list[str]) -> int:
        assert words[:2] == ["--signal", "KILL"]
        os.kill(self._record(words[2])["pid"], signal.SIGKILL)
        return 0

    def rm(self, words: list[str]) -> int:
        assert words[0] == "--force"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._record(words[1])["pid"], signal.SIGKILL)
        self._remove(words[1])
        return 0

    def _remove(self, name: str) -> None:
        (self.store / "containers" / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(self.container(name), ignore_errors=True)

    def ps(self, words: list[str]) -> int:
        assert words[:2] == ["--all", "--filter"]
        assert words[3:] == ["--format", "{{.Names}}"]
        label = words[2].removeprefix("label=")
        for path in (self.store / "containers").glob("*.json"):
            record = json.loads(path.read_text())
            if not Path(f"/proc/{record['pid']}").exists():  # the service removes it, whatever became of its client
                self._remove(path.stem)
            elif label in record["labels"]:
                print(path.stem)
        return 0

    def images(self, words: list[str]) -> int:
        assert words[0] == "--filter"
        assert words[2:] == ["--format", "{{.Repository}}:{{.Tag}}"]
        label = words[1].removeprefix("label=")
        for path in (self.store / "images").iterdir():
            if label in json.loads(path.read_text())["labels"]:
                print(path.name.replace("+", "/"))
        return 0

    def commit(self, words: list[str]) -> int:
        assert words[0] == "--change"
        label, _, value = words[1].removeprefix("LABEL ").partition("=")
        record = self._record(words[2])
        layer = self.store / "layers" / words[3].replace("/", "+").replace(":", "+")
        upper = f"/proc/{record['client']}/root{self.container(words[2])}/upper"
        subprocess.run(["cp", "-a", upper, layer], check=True)
        below = json.loads(self.image(record["image"]).read_text())["layers"]
        self.image(words[3]).write_text(json.dumps({"layers": [str(layer), *below], "labels": {label: value}}))
        return 0

    def rmi(self, words: list[str]) -> int:
        path = self.image(words[0])
        if not path.exists():
            fail(1, f"Error response from daemon: No such image: {words[0]}")
        for each in (self.store / "containers").glob("*.json"):
            if self.image(json.loads(each.read_text())["image"]) == path:
                fail(1, f"conflict: unable to remove {words[0]}: container {each.stem} is using it")
        path.unlink()
        return 0


class Parser(argparse.ArgumentParser):
    """A parser that refuses as docker does."""

    def error(self, message: str) -> NoReturn:
        fail(125, f"unknown flag or missing argument: {message}")


def fail(code: int, words: str) -> NoReturn:
    print(words, file=sys.stderr)
    raise SystemExit(code)


def write_client(store: Path, layers: list[Path], program: Path) -> None:
    """Make a store with one image, ``tree:base``, and the client of it as ``program``."""
    for name in ("images", "containers", "layers"):
        (store / name).mkdir(parents=True)
    record = {"layers": [str(layer) for layer in layers], "labels": {}}
    (store / "images" / "tree:base").write_text(json.dumps(record))
    program.write_text(
        f'#!/bin/bash\nexec unshare --mount --propagation private {sys.executable} -I -S {__file__} {store} "$@"\n'
    )
    program.chmod(0o755)


if __name__ == "__main__":
    verb = sys.argv[2]
    if verb not in ("run", "kill", "rm", "ps", "images", "commit", "rmi"):
        fail(1, f"docker: '{verb}' is not a docker command")
    raise SystemExit(getattr(FakeDocker(Path(sys.argv[1])), verb)(sys.argv[3:]))
