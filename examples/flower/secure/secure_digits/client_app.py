"""A site: trains on its own digits, and sends its update by secure aggregation only."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedheal.data.domains import Split
from fedheal.flower import client
from fedheal.flower.secure import SecureSumMod
from fedheal.simulate.federation import Federation
from secure_digits.task import describe_experiment, get_site_name, load_federation

app = ClientApp(mods=[SecureSumMod()])  # the only line that differs from a site without secure aggregation


@app.train()
def train(message: Message, context: Context) -> Message:
    federation, name = _load_site(context)
    domain, folder = federation.client_domains[name], str(context.run_config["site-folder"]) or None
    return client.train(message, context, federation.local_training, name, domain=domain, folder=folder)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    federation, name = _load_site(context)
    domain = federation.client_domains[name]
    # Each site of a domain gets every k-th of the domain's test digits.
    residents = sorted(site for site, home in federation.client_domains.items() if home == domain)
    share = slice(residents.index(name), None, len(residents))
    test = Split(federation.tests[domain].images[share], federation.tests[domain].labels[share])
    return client.evaluate(message, context, federation.local_training, test, name, domain=domain)


def _load_site(context: Context) -> tuple[Federation, str]:
    experiment = describe_experiment(context, int(context.node_config["num-partitions"]))
    return load_federation(experiment), get_site_name(int(context.node_config["partition-id"]))
