"""A Flower deployment as processes on 127.0.0.1, in a network namespace of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flower.keys import write_certificates, write_node_key
from loopback import list_pids

TESTS = Path(__file__).parents[1]
APP = Path(__file__).parent / "fragile"
BIN = Path(sys.executable).parent


def make_environment(home: Path) -> dict[str, str]:
    source = str(Path(__import__("fedheal").__file__).parents[1])
    return os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": f"{source}:{TESTS}",
        "PYTHONWARNINGS": "default",
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


class Deployment:
    """A SuperLink, its SuperNodes by number, and runs of an app; `link`, `node` and `connection` are their TLS options."""

    def __init__(
        self,
        folder: Path,
        inside: Sequence[str],
        link: Sequence[str] = ("--insecure",),
        node: Callable[[int], Sequence[str]] = lambda number: ("--insecure",),
        connection: str = "insecure = true",
        app: Path = APP,
        node_config: Callable[[int], str] = lambda number: f"partition-id={number % 4} num-partitions=4",
    ) -> None:
        self.app, self.node_config = app, node_config
        self.folder, self.inside, self.link_words, self.node_words = folder, list(inside), link, node
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "dep"\n\n[superlink.dep]\naddress = "127.0.0.1:8000"\n{connection}\n'
        )
        self.env = make_environment(self.home)
        self.started: list[subprocess.Popen[bytes]] = []
        self.link: subprocess.Popen[bytes] | None = None
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.seconds_to_register = 0.0  # how busy the machine is

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.inside, *words], env=self.env, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            self.kill(process)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start_link(self) -> None:
        words = ["flower-superlink", *self.link_words, "--host", "127.0.0.1", "--port", "8000"]
        words += ["--database", str(self.folder / "state.db"), "--disable-runtime-dependency-installation"]
        link = self.link = self.start("link", words)
        wait_for(lambda: link.poll() is not None or is_listening(link.pid, 8000), 90, lambda: self.log("link"))
        assert link.poll() is None, self.log("link")

    def start_node(self, number: int, key: int | None = None) -> None:
        words = ["flower-supernode", *self.node_words(number if key is None else key), "--superlink", "127.0.0.1:8000"]
        words += ["--host", "127.0.0.1", "--port", str(9094 + number)]
        words += ["--node-config", self.node_config(number)]
        self.nodes[number] = self.start(f"node{number}", words)

    def kill(self, process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.wait(30)

    def run(self, folder: Path, **config: Any) -> subprocess.Popen[bytes]:
        settings = {"folder": str(folder), **config}
        values = " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in settings.items())
        return self.start(
            f"run-{folder.name}", ["flwr", "run", str(self.app), "dep", "--stream", "--run-config", values]
        )

    def processes(self, word: str) -> list[int]:
        """Return the processes of this deployment whose command line contains this word."""
        pids = []
        for pid in list_pids(self.inside):
            with suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    pids.append(pid)
        return pids


def start_secure_deployment(
    folder: Path, inside: Sequence[str], nodes: int, started: int | None = None, **keys: Any
) -> Deployment:
    """Start a SuperLink with TLS, register the keys `folder/key0`, ... and start the first SuperNodes, or all of them."""
    write_certificates(folder, "good")
    good = folder / "good"
    link = ["--ssl-ca-certfile", f"{good}.ca", "--ssl-certfile", f"{good}.crt", "--ssl-keyfile", f"{good}.key"]

    def secure_node(number: int) -> list[str]:
        return ["--root-certificates", f"{good}.ca", "--auth-supernode-private-key", f"{folder}/key{number}"]

    connection = f'root-certificates = "{good}.ca"'
    deployment = Deployment(folder / "d", inside, [*link, "--enable-supernode-auth"], secure_node, connection, **keys)
    deployment.start_link()
    registrations, began = [], time.monotonic()
    for number in range(nodes):
        write_node_key(folder / f"key{number}")
        words = ["flwr", "supernode", "register", f"{folder}/key{number}.pub", "dep", "--name", f"site-{number}"]
        registrations.append(deployment.start("register", words))
    for number, registration in enumerate(registrations):
        assert registration.wait(120) == 0, deployment.log("register")
        if started is None or number < started:
            deployment.start_node(number)
    deployment.seconds_to_register = time.monotonic() - began
    return deployment


def is_listening(pid: int, port: int) -> bool:
    """Return whether a process listens on this port of 127.0.0.1 in the namespace of process `pid`."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(line.split()[1] == f"0100007F:{port:04X}" and line.split()[3] == "0A" for line in lines)


def wait_for(what: Callable[[], Any], seconds: float, why: Callable[[], str] = lambda: "") -> Any:
    """Wait until the condition is true, and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.2)
    raise AssertionError(f"it did not happen within {seconds:g} s\n{why()}")
