"""One of very many clients; its sign counts are in `context.state`."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedheal.flower import client
from many_clients.task import get_domain, get_name, make_examples, make_local_training

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    name, domain = get_name(partition), get_domain(partition)
    return client.train(message, context, make_local_training(partition), name, domain=domain)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    name, domain, test = get_name(partition), get_domain(partition), make_examples(partition, "test")
    return client.evaluate(message, context, make_local_training(partition), test, name, domain=domain)
