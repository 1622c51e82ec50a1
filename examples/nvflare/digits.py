"""Shared by server and sites: the sites, their data, the model and the local training."""

from functools import cache

import torch
from torch import nn

from fedheal import Experiment, data
from fedheal.data.domains import Split
from fedheal.simulate.build import build_federation, build_module
from fedheal.simulate.federation import Federation

SITES = ("handwritten-0", "print-0", "street-0", "display-0")  # one of each domain


def describe_experiment(method: str = "fedheal", rounds: int = 5, steps: int | None = None) -> Experiment:
    """Describe the experiment as for `fedheal run`, which gives the same model."""
    return Experiment(
        data="embedded", method=method, rounds=rounds, steps=steps, clients_per_domain=1, only=SITES, device="cpu"
    )


def make_model() -> nn.Module:
    """Make the initial model, the same wherever it is made."""
    return build_module(describe_experiment(), classes=10)


@cache
def load_federation(experiment: Experiment) -> Federation:
    """Build the experiment's parts, once a process."""
    torch.set_num_threads(experiment.threads)  # the number of threads changes sums
    return build_federation(experiment, data.load_dataset(experiment.data), torch.device("cpu"))


def get_test_digits(federation: Federation, site: str) -> Split:
    """Return the test digits of the site's domain: it is the only site there."""
    return federation.tests[federation.client_domains[site]]
