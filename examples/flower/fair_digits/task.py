"""What both sides agree on: the sites, their data, the model and how they train."""

from functools import cache

import torch
from flwr.app import Context

from fedheal import Experiment, data
from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation

DOMAINS = ("handwritten", "print", "street", "display")


def site(partition: int) -> str:
    """The site of a partition: the domains in turn, then each domain's second site, and so on."""
    return f"{DOMAINS[partition % len(DOMAINS)]}-{partition // len(DOMAINS)}"


def experiment(context: Context, partitions: int) -> Experiment:
    """The same description as for `fedheal run`, so that a simulation there gives the same model."""
    config = context.run_config
    return Experiment(
        data="embedded",
        method=str(config["method"]),
        seed=int(config["seed"]),
        rounds=int(config["num-server-rounds"]),
        epochs=int(config["epochs"]),
        steps=int(config["steps"]) or None,
        validation=float(config["validation"]),
        clients_per_domain=-(-partitions // len(DOMAINS)),
        only=tuple(site(i) for i in range(partitions)),
        device="cpu",
    )


@cache
def federation(described: Experiment) -> Federation:
    """The experiment's parts; made once a process, since a simulation runs many clients in one."""
    torch.set_num_threads(described.threads)  # their number changes sums
    return build_federation(described, data.load(described.data), torch.device("cpu"))
