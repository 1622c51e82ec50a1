"""A site of the tiny data set that can be told to fail."""

import math
import time

import torch
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp

from fedheal import data
from fedheal.data.domains import Split
from fedheal.flower import client
from fedheal.simulate.build import build_federation
from fragile.server_app import SITES, describe_experiment

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    here, name = _load_site(context)
    fault = _find_fault(context, name, int(message.content.config_records["config"]["server-round"]))
    if fault == "raise":
        raise RuntimeError("this site is out of order")
    if fault == "sleep":
        time.sleep(600)
    reply = client.train(
        message, context, here.local_training, name, domain=here.client_domains[name], folder=_get_state_folder(context)
    )
    if fault == "nan":
        arrays = reply.content.array_records["arrays"]
        first = next(iter(arrays))
        arrays[first] = Array(arrays[first].numpy() * math.nan)
    return reply


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    here, name = _load_site(context)
    domain = here.client_domains[name]
    sites = describe_experiment(context.run_config).only
    residents = [site for site in sites if here.client_domains[site] == domain]
    share = slice(residents.index(name), None, len(residents))
    test = Split(here.tests[domain].images[share], here.tests[domain].labels[share])
    return client.evaluate(
        message, context, here.local_training, test, name, domain=domain, folder=_get_state_folder(context)
    )


def _load_site(context):
    torch.set_num_threads(1)
    experiment = describe_experiment(context.run_config)
    here = build_federation(experiment, data.load_dataset(experiment.data), torch.device("cpu"))
    return here, SITES[int(context.node_config["partition-id"])]


def _get_state_folder(context: Context) -> str | None:
    return str(context.run_config["memory"]) or None


def _find_fault(context: Context, name: str, number: int) -> str | None:
    for words in str(context.run_config["faults"]).split(","):
        if words.split()[1:] == [name, str(number)]:
            return words.split()[0]
    return None
