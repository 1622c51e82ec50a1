"""Takes the place of the example's `digits.py`: the same functions on data so small that a round takes milliseconds."""

from functools import cache

import torch
from torch import nn

from fedheal import Experiment, data
from fedheal.data.domains import Split
from fedheal.simulate.build import build_federation, build_module
from fedheal.simulate.federation import Federation
from tiny_data import CLASSES, quick

SITES = ("noisy-0", "plain-0")  # each is a process, which takes seconds to start


def describe_experiment(method: str = "fedheal", rounds: int = 5, steps: int | None = None) -> Experiment:
    return quick(method=method, rounds=rounds, steps=steps, only=SITES, model="tiny_data:flat_batchnorm")


def make_model() -> nn.Module:
    return build_module(describe_experiment(), classes=len(CLASSES), shape=(3, 8, 8))


@cache
def load_federation(experiment: Experiment) -> Federation:
    torch.set_num_threads(experiment.threads)
    return build_federation(experiment, data.load_dataset(experiment.data), torch.device("cpu"))


def get_test_digits(federation: Federation, site: str) -> Split:
    return federation.tests[federation.client_domains[site]]
