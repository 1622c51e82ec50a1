"""A site: trains on its own digits, judges the model on its own test digits."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fair_digits.task import experiment, federation, site
from fedheal.data.domains import Split
from fedheal.flower import client

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    here = federation(experiment(context, int(context.node_config["num-partitions"])))
    name = site(int(context.node_config["partition-id"]))
    return client.train(
        message, context, here.local_training, name, domain=here.client_domains[name], folder=_folder(context)
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    here = federation(experiment(context, int(context.node_config["num-partitions"])))
    name = site(int(context.node_config["partition-id"]))
    domain = here.client_domains[name]
    # A site's test digits are its share of its domain's, dealt out in turn among the domain's sites.
    residents = sorted(resident for resident, home in here.client_domains.items() if home == domain)
    share = slice(residents.index(name), None, len(residents))
    test = Split(here.tests[domain].images[share], here.tests[domain].labels[share])
    return client.evaluate(message, context, here.local_training, test, name, domain=domain, folder=_folder(context))


def _folder(context: Context) -> str | None:
    return str(context.run_config["site-folder"]) or None
