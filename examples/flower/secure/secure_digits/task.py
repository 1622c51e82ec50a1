"""Shared by server and clients: the sites, their data, the model and the local training."""

from functools import cache

import torch
from flwr.app import Context

from fedheal import Experiment, data
from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation

DOMAINS = ("handwritten", "print", "street", "display")


def get_site_name(partition: int) -> str:
    """Return the site of a partition: first one site of each domain, then each domain's second site, and so on."""
    return f"{DOMAINS[partition % len(DOMAINS)]}-{partition // len(DOMAINS)}"


def describe_experiment(context: Context, partitions: int) -> Experiment:
    """Describe the experiment as for `fedheal run`, which gives the same model up to the quantisation of the sums."""
    config = context.run_config
    work = "steps" if int(config["steps"]) else "epochs"
    return Experiment(
        data="embedded",
        method=f"fedheal:tau={config['tau']},beta={config['beta']}",
        seed=int(config["seed"]),
        rounds=int(config["num-server-rounds"]),
        **{work: int(config[work])},
        clients_per_domain=-(-partitions // len(DOMAINS)),
        only=tuple(get_site_name(i) for i in range(partitions)),
        device="cpu",
    )


@cache
def load_federation(experiment: Experiment) -> Federation:
    """Build the experiment's parts, once a process: a simulation runs many clients in one."""
    torch.set_num_threads(experiment.threads)  # the number of threads changes sums
    return build_federation(experiment, data.load_dataset(experiment.data), torch.device("cpu"))
