"""What travels in NVFLARE's messages: models and metrics in `FLModel`s, as the stock workflows and client scripts use them.

Arrays are numpy's, which is what `ScriptRunner` sends and expects by default. NVFLARE itself names the sender of a reply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from torch import Tensor

from fedheal.core.errors import add_article
from fedheal.core.layout import Layout, Packed
from fedheal.federation.model_arrays import match_bfloat16, widen_bfloat16
from fedheal.federation.replies import EvaluateReply, RejectedReply, ReplyRequirements, TrainReply
from fedheal.federation.reply_checks import (
    ACCURACY,
    check_metrics,
    find_accuracy,
    match_arrays,
    take_num_examples,
    to_float,
)
from fedheal.federation.reply_limits import find_bad_name

EXAMPLES: str = FLMetaKey.NUM_STEPS_CURRENT_ROUND  # the weight of a reply in the stock workflows
TEST_EXAMPLES = "fedheal.test_examples"
DOMAIN = "fedheal.domain"
CLIENT: str = "client_name"  # set by the workflow, from the connection that the reply came on
ADVICE = "send it in the metrics of the training reply"
EXAMPLES_REMEDY = "put it into the meta of the FLModel"


@dataclass(frozen=True)
class SiteReply:
    """A site's reply as it arrived, and the model it answers."""

    client: str
    content: FLModel
    sent: Packed


def state_dict_to_params(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return a `state_dict` as arrays that do not share its memory; bfloat16 becomes float32."""
    return {name: np.array(widen_bfloat16(tensor.detach().cpu()).numpy()) for name, tensor in tensors.items()}


def params_to_state_dict(params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return arrays or tensors as a `state_dict`. Raise ValueError if one is neither."""
    tensors = {}
    for name, value in params.items():
        try:
            tensors[name] = (
                value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(view(value)))
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"'{name}' cannot be read: {error}") from None
    return tensors


def pack_params(layout: Layout, params: Mapping[str, Any]) -> Packed:
    """Return the model of these parameters as vectors."""
    return layout.pack(match_bfloat16(layout, params_to_state_dict(params)))


def view(value: object) -> NDArray[Any]:
    """View a parameter as an array. Raise ValueError if it holds no numbers."""
    if isinstance(value, Tensor):
        try:
            value = widen_bfloat16(value.detach().cpu()).resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # float8, or a tensor without storage
            raise ValueError(f"it is a tensor of {value.dtype}, which numpy cannot hold: {error}") from None
    if not isinstance(value, np.ndarray | np.generic):  # a difference of arrays without dimensions is no array
        raise ValueError(f"it is {add_article(type(value).__name__)}, not an array")
    array = np.asarray(value)
    if array.dtype.kind not in "fiubc":
        raise ValueError(f"it holds {array.dtype}, not numbers")
    return array


def read_site_reply(reply: SiteReply, layout: Layout, requirements: ReplyRequirements) -> TrainReply:
    """Read a training reply and check all but its parameters' values. Raise RejectedReply if it cannot count."""
    content = reply.content
    if not isinstance(content.params, dict) or not all(isinstance(name, str) for name in content.params):
        raise RejectedReply("it sends no parameters by name")
    metrics = _read_numbers(content.metrics, {*requirements.needs, "train_loss"})
    metrics |= _read_numbers(content.meta, {requirements.examples_key})
    num_examples = take_num_examples(metrics, requirements, EXAMPLES_REMEDY)
    check_metrics(metrics, requirements.needs, ADVICE)
    arrays = match_arrays(content.params, view, layout)
    is_difference = content.params_type == ParamsType.DIFF
    if is_difference:
        arrays |= _add_to_model(layout, reply.sent, arrays)
    domain = read_domain(reply)
    return TrainReply(reply.client, domain, arrays, num_examples, metrics, is_difference=is_difference)


def read_site_evaluation(reply: SiteReply, max_examples: float) -> EvaluateReply:
    """Read the accuracy in a reply and how many examples it was measured on. Raise RejectedReply if it cannot count."""
    requirements = ReplyRequirements(examples_key=TEST_EXAMPLES, max_examples=max_examples)
    num_examples = take_num_examples(_read_numbers(reply.content.meta, {TEST_EXAMPLES}), requirements, EXAMPLES_REMEDY)
    accuracy = find_accuracy(_read_numbers(reply.content.metrics, set(ACCURACY)))
    return EvaluateReply(reply.client, read_domain(reply), num_examples, accuracy)


def has_accuracy(content: FLModel) -> bool:
    """Return whether a reply holds an accuracy."""
    return isinstance(content.metrics, dict) and not content.metrics.keys().isdisjoint(ACCURACY)


def read_domain(reply: SiteReply) -> str:
    """Return the site's domain, by default its name. Raise RejectedReply if it cannot be shown."""
    domain = (reply.content.meta or {}).get(DOMAIN)
    if domain is None:
        return reply.client
    if not isinstance(domain, str) or not domain:
        raise RejectedReply(f"its domain is {add_article(type(domain).__name__)}, not a name")
    if (problem := find_bad_name("domain", domain)) is not None:
        raise RejectedReply(problem)
    return domain


def _read_numbers(values: object, names: set[str]) -> dict[str, float]:
    """Return those of the named values that are single numbers."""
    given = values if isinstance(values, dict) else {}
    numbers = {name: given[name] for name in sorted(names) if name in given}
    kinds = (int, float, np.integer, np.floating)
    return {k: to_float(v) for k, v in numbers.items() if isinstance(v, kinds) and not isinstance(v, bool)}


def _add_to_model(layout: Layout, sent: Packed, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the local buffers and counters of a reply that holds differences."""
    received, local = state_dict_to_params(layout.unpack(sent)), {}
    with np.errstate(over="ignore", invalid="ignore"):  # the aggregator names updates that are not finite
        for entry in layout.entries:
            if entry.kind != "param":
                local[entry.name] = np.asarray(received[entry.name] + arrays[entry.name])
    return local
