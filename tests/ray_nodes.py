"""A Ray cluster of two nodes on one machine, and runs on it that lose a worker. Both are programs, for a network namespace.

python ray_nodes.py                       prints an address; the end of its input ends the cluster
python ray_nodes.py ADDRESS METHOD ...    runs each method there, kills a worker in round 2, and compares with the serial engine

With LOSE_NODE set, the second node is killed instead, with all its processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STORE = 80 << 20  # bytes of shared memory a node


def serve() -> None:
    """Start a cluster and wait."""
    folder = Path(os.environ["RAY_NODES_FOLDER"])
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir(exist_ok=True)  # Ray notes the address there, and fails on a machine without that folder

    from ray.cluster_utils import Cluster

    keys = {"num_cpus": 1, "object_store_memory": STORE}
    head = keys | {"include_dashboard": False, "temp_dir": str(folder)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**keys)
    say(cluster.address)
    sys.stdin.read()
    cluster.shutdown()


def lose_workers(address: str, methods: Sequence[str]) -> None:
    """Print for each method whether a run that lost a worker has the bits of one in this process."""
    import torch

    from fedheal.engine.ray_actors import ActorPool
    from fedheal.engine.ray_cluster import connect_to_cluster
    from fedheal.engine.serial import SerialEngine, Task
    from fedheal.simulate.build import build_federation
    from fedheal.simulate.federation import Federation
    from fedheal.simulate.round import initial_state, run_round
    from tiny_data import load, quick

    class Losing(ActorPool):
        """Kill a worker in round 2, when others are still at work."""

        killed = 0

        def _start(self) -> Any:
            actor = super()._start()
            if not self.killed:  # both nodes take part from the start; a node that is lost has no room for another
                self.ray.wait([actor.starting], timeout=200)
            return actor

        def _wait_for_result(self, work: Any) -> Any:
            result, first = super()._wait_for_result(work), work.jobs[0][0]
            if isinstance(first, Task) and first.round == 2 and not self.killed:
                busy = [actor.host.pid for actor in self.actors if actor.host and actor.jobs]
                if "LOSE_NODE" in os.environ:  # the process that starts the workers of the node that is not the head
                    busy = [raylet for raylet in map(find_parent, busy) if "--head" not in read_command(raylet)]
                for pid in busy[:1]:
                    self.killed = pid
                    os.kill(pid, signal.SIGKILL)
            return result

    def run_rounds(federation: Federation, engine: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        state, records = initial_state(federation), []
        for _ in range(3):
            state, record = run_round(federation, state, engine)
            records.append(record.model_dump(exclude={"seconds"}))
        return dict(state.to_arrays()[0]), records

    torch.set_num_threads(1)
    with connect_to_cluster(address) as ray:
        for method in methods:
            experiment = quick(method=method, model="tiny_data:slow", validation=0.25, lr=0.02)
            serial_federation, ray_federation = (
                build_federation(experiment, load(), torch.device("cpu")) for _ in range(2)
            )
            expected, records = run_rounds(serial_federation, SerialEngine(serial_federation.local_training))
            evaluated = [*ray_federation.tests.values(), *ray_federation.validation.values()]
            with Losing(ray, ray_federation.local_training, 0, 1, evaluated) as engine:
                arrays, same_records = run_rounds(ray_federation, engine)
            same = records == same_records and expected.keys() == arrays.keys()
            same = same and all(torch.equal(value, arrays[name]) for name, value in expected.items())
            say(f"{method} {'same' if same and engine.killed else 'DIFFERENT'}")


def find_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def read_command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:]:
        lose_workers(sys.argv[1], sys.argv[2:])
    else:
        serve()
