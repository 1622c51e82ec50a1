"""A site: trains on its own digits and evaluates the model on its own test digits."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fair_digits.task import describe_experiment, get_site_name, load_federation
from fedheal.data.domains import Split
from fedheal.flower import client
from fedheal.simulate.federation import Federation

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    federation, name = _load_site(context)
    domain, folder = federation.client_domains[name], _get_folder(context)
    return client.train(message, context, federation.local_training, name, domain=domain, folder=folder)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    federation, name = _load_site(context)
    domain, folder = federation.client_domains[name], _get_folder(context)
    # Each site of a domain gets every k-th of the domain's test digits.
    residents = sorted(site for site, home in federation.client_domains.items() if home == domain)
    share = slice(residents.index(name), None, len(residents))
    test = Split(federation.tests[domain].images[share], federation.tests[domain].labels[share])
    return client.evaluate(message, context, federation.local_training, test, name, domain=domain, folder=folder)


def _load_site(context: Context) -> tuple[Federation, str]:
    experiment = describe_experiment(context, int(context.node_config["num-partitions"]))
    return load_federation(experiment), get_site_name(int(context.node_config["partition-id"]))


def _get_folder(context: Context) -> str | None:
    return str(context.run_config["site-folder"]) or None
