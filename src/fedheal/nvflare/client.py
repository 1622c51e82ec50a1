"""The site's side: what a client script sends so that fair aggregation knows its examples, domain and accuracy.

With a training loop of your own, answer with `make_reply` and `make_evaluation`. `train_site` and `evaluate_site` do the whole
work with fedheal's own engine::

    flare.init()
    while flare.is_running():
        received = flare.receive()
        answer = evaluate_site if flare.is_evaluate() else train_site
        ...
"""

from collections.abc import Mapping
from dataclasses import replace

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from torch import Tensor

from fedheal.core.arrays import as_tensor
from fedheal.core.layout import Packed
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.serial import LocalTraining, Task
from fedheal.nvflare.exchange import DOMAIN, EXAMPLES, TEST_EXAMPLES, pack_params

__all__ = ["evaluate_site", "make_evaluation", "make_reply", "train_site"]


def make_reply(
    model: Mapping[str, Tensor],
    num_examples: float,
    metrics: Mapping[str, float] | None = None,
    *,
    domain: str | None = None,
    is_difference: bool = False,
) -> FLModel:
    """Return the answer to a training task.

    Args:
        model: The trained model, as a `state_dict`, or its difference to the received one.
        num_examples: The number of training examples.
        metrics: Metrics to send. AFL, q-FFL and FedFV need the `loss` of the *received* model, q-FFL also `reach`.
        domain: The site's domain, which a report groups by; by default the site's name.
        is_difference: Whether `model` is the difference.
    """
    meta = {EXAMPLES: num_examples} | ({} if domain is None else {DOMAIN: domain})
    kind = ParamsType.DIFF if is_difference else ParamsType.FULL
    params = {name: tensor.detach().cpu() for name, tensor in model.items()}
    return FLModel(params=params, params_type=kind, metrics=dict(metrics or {}), meta=meta)


def make_evaluation(num_examples: float, accuracy: float, *, domain: str | None = None) -> FLModel:
    """Return the answer to an evaluation task.

    Args:
        num_examples: The number of test examples.
        accuracy: The accuracy of the received model, from 0 to 1.
        domain: As for `make_reply`.
    """
    meta = {TEST_EXAMPLES: num_examples} | ({} if domain is None else {DOMAIN: domain})
    return FLModel(metrics={"accuracy": accuracy}, meta=meta)


def train_site(received: FLModel, local_training: LocalTraining, client: str, *, domain: str | None = None) -> FLModel:
    """Train from the received model with fedheal's engine, and return the answer.

    Random numbers derive from (the seed of `local_training`, the round, the client), so results are those of a simulation.

    Args:
        received: The task, as `flare.receive()` gives it.
        local_training: How to train; it holds the site's examples.
        client: The site's name there.
        domain: As for `make_reply`.

    Returns:
        The answer, for `flare.send`.

    Raises:
        ValueError: `local_training` has local terms.
    """
    if local_training.terms:
        raise ValueError(
            "local_training has local terms, whose state NVFLARE does not carry: use a method without them"
        )
    model = pack_params(local_training.layout, received.params)
    rounds = received.total_rounds or local_training.rounds
    task = Task(client, (received.current_round or 0) + 1, ())  # NVFLARE counts rounds from 0
    reply = serial.train_client(replace(local_training, rounds=rounds), model, (), task).reply
    local = Packed(
        model.params + as_tensor(reply.delta, "delta"),
        model.buffers if reply.buffers is None else as_tensor(reply.buffers, "buffers"),
        model.counters if reply.counters is None else as_tensor(reply.counters, "counters"),
    )
    metrics = {name: float(value) for name, value in reply.metrics.items()}
    return make_reply(local_training.layout.unpack(local), reply.num_examples, metrics, domain=domain)


def evaluate_site(
    received: FLModel, local_training: LocalTraining, test: Split, *, domain: str | None = None
) -> FLModel:
    """Evaluate the received model on the site's own test examples, and return the answer.

    Args:
        received: The task, as `flare.receive()` gives it.
        local_training: As for `train_site`.
        test: The site's test examples.
        domain: As for `make_reply`.

    Returns:
        The answer, for `flare.send`.
    """
    model = pack_params(local_training.layout, received.params)
    _, accuracy = serial.evaluate_split(local_training, model, test)
    return make_evaluation(len(test), accuracy, domain=domain)
