"""A site's part in secure aggregation, as a mod: it keeps the trained model back and adds its update to a masked sum.

    app = ClientApp(mods=[SecureSumMod()])

The app itself is that of any federation with `fedheal.flower.client`. The training reply of a site with this mod holds no
model, only scalars. Then the server asks for the site's part in the sum, in the stages of SecAgg+. Such a site never sends a
model without masks, whatever strategy the server runs.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from cryptography.fernet import Fernet, InvalidToken
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from fedheal.core.errors import shorten_list
from fedheal.core.layout import Layout
from fedheal.flower import messages
from fedheal.flower.messages import MASK, RoundInstructions
from fedheal.flower.secure_masks import client_protocol
from fedheal.flower.secure_vector import CLIP, LEVELS, MAX_CLIENTS, MODULUS, SumOrder, encode_share

ORDER = "fedheal.sum"  # to clients: a `SumOrder`
COUNTERS = "fedheal.counters"  # from clients: the integer buffers, which are not summed
DISTANCE, BUFFER_NORM = "distance", "buffer-norm"  # metrics from clients
WITHHELD = "fedheal.withheld"  # in the client's own state: its update until it is asked for its part


class SecureSumMod:
    """Keep updates on the site, and send them by secure aggregation only.

    Args:
        layout: The model's layout; only needed if the strategy was given the module as `model`.
        key: The model's record in the messages.
    """

    def __init__(self, layout: Layout | None = None, key: str = "arrays") -> None:
        self.layout, self.key = layout, key

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message of the server."""
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        if RECORD_KEY_CONFIGS in message.content.config_records:
            check_request(message.content.config_records[RECORD_KEY_CONFIGS])
            return _take_stage(message, context)
        context.state.pop(WITHHELD, None)
        reply = call_next(message, context)
        return reply if reply.has_error() else self._withhold(message, reply, context)

    def _withhold(self, message: Message, reply: Message, context: Context) -> Message:
        """Replace the model in a training reply by what the server needs in the clear, and keep the update."""
        content, received = reply.content, message.content.array_records[self.key]
        if MASK not in content.array_records:
            remedy = "use fedheal.flower.secure.SecureFedHEAL on the server and fedheal.flower.client here"
            raise ValueError(
                f"the reply holds no mask, and this site sends its model by secure aggregation only: {remedy}"
            )
        layout = self.layout or messages.infer_layout(received)
        before = messages.record_to_model(layout, received)
        local = messages.record_to_model(layout, content.array_records[self.key])
        delta = (local.params - before.params).double().numpy()
        buffers = (local.buffers - before.buffers).double().numpy()
        if not (np.isfinite(delta).all() and np.isfinite(buffers).all()):
            raise ValueError("the update holds NaN or infinity")
        mask = content.array_records[MASK]
        messages.record_to_mask(mask, len(delta))  # its length
        arrays = {"delta": Array(delta), "buffers": Array(buffers), "bits": mask["bits"]}
        number = RoundInstructions.from_message(message).round
        context.state[WITHHELD] = ArrayRecord(arrays | {"round": Array(np.array(number))})
        for name in list(content.array_records):  # nothing else travels without a mask
            del content[name]
        scalars: dict[str, Any] = {DISTANCE: float(delta @ delta)}
        scalars |= {BUFFER_NORM: float(np.linalg.norm(buffers))} if len(buffers) else {}
        content["fedheal.sum"] = MetricRecord(scalars)
        if len(local.counters):
            content[COUNTERS] = ArrayRecord({"counters": Array(local.counters.numpy())})
        return reply


def _take_stage(message: Message, context: Context) -> Message:
    """Answer a stage of the protocol. Raise ValueError that names the nodes whose key shares cannot be decrypted."""
    try:
        reply: Message = client_protocol.secaggplus_mod(message, context, add_to_sum)
    except InvalidToken:
        senders = _find_bad_senders(message.content.config_records[RECORD_KEY_CONFIGS], context)
        named = shorten_list([f"node {node}" for node in senders])
        raise ValueError(f"it cannot decrypt the key shares that {named} sent it") from None
    return reply


def _find_bad_senders(config: Mapping[str, Any], context: Context) -> list[int]:
    """Return the nodes whose ciphertexts cannot be decrypted with the keys that this site shares with them."""
    state = client_protocol.SecAggPlusState(**context.state.config_records[RECORD_KEY_STATE])
    bad = []
    for node, ciphertext in zip(config[Key.SOURCE_LIST], config[Key.CIPHERTEXT_LIST], strict=True):
        try:
            Fernet(state.ss2_dict[node]).decrypt(ciphertext)
        except InvalidToken:
            bad.append(node)
    return bad


def add_to_sum(message: Message, context: Context) -> Message:
    """Return the part of the sum that Flower's mod then masks. An update is used once: two sums would show their difference."""
    order = SumOrder(**message.content.config_records[ORDER])  # type: ignore[arg-type]
    if WITHHELD not in context.state.array_records:
        raise ValueError("this site holds no update that has not been summed: it must train first")
    withheld = {name: messages.view_array(a) for name, a in context.state.array_records[WITHHELD].items()}
    del context.state[WITHHELD]
    if int(withheld["round"]) != order.round:
        raise ValueError(f"this site's update is of round {int(withheld['round'])}, not of round {order.round}")
    kept = np.unpackbits(withheld["bits"], count=len(withheld["delta"])).astype(bool)
    vector = encode_share(order, withheld["delta"], kept, withheld["buffers"])
    part = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), num_examples=1, metrics={})
    return Message(fitres_to_recorddict(part, keep_input=False), reply_to=message)


def check_request(config: Mapping[str, Any]) -> None:
    """Raise ValueError if a request of the protocol would lay this site's update open, or spoil the sum."""
    stage = config.get(Key.STAGE)
    if stage == Stage.SETUP:
        expected = {Key.CLIPPING_RANGE: CLIP, Key.TARGET_RANGE: LEVELS, Key.MOD_RANGE: MODULUS, Key.MAX_WEIGHT: 1.0}
        wrong = {key: config.get(key) for key, value in expected.items() if config.get(key) != value}
        if wrong:
            raise ValueError(f"the server asks for {wrong}, this site has {expected}: use one version of fedheal")
        num_clients, threshold = config[Key.SAMPLE_NUMBER], config[Key.THRESHOLD]
        if not (2 <= threshold <= num_clients <= MAX_CLIENTS):
            raise ValueError(f"a sum over {num_clients} clients with threshold {threshold}: at least 2 must stay in it")
    if stage == Stage.UNMASK and set(config[Key.ACTIVE_NODE_ID_LIST]) & set(config[Key.DEAD_NODE_ID_LIST]):
        raise ValueError("the server asks for both secrets of a client, which would lay its update open")


def order_to_record(order: SumOrder) -> RecordDict:
    """Return the records that carry an order to a client."""
    return RecordDict({ORDER: ConfigRecord(asdict(order))})
