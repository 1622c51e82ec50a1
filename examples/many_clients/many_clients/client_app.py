"""One of very many clients; its sign counts are in `context.state`."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedheal.flower import client
from many_clients.task import bench, domain, examples, name

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    mine = int(context.node_config["partition-id"])
    return client.train(message, context, bench(mine), name(mine), domain=domain(mine))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    mine = int(context.node_config["partition-id"])
    return client.evaluate(message, context, bench(mine), examples(mine, "test"), name(mine), domain=domain(mine))
