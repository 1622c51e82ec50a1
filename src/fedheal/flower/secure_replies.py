"""Check a node's reply in a stage of a secure sum, as far as the server can see what is in it.

A key share is encrypted for its receiver, and one share of a secret looks like another. So the server cannot tell who
sent a wrong ciphertext or a wrong share of the right length. Then the sum fails. Sites that cannot decrypt a ciphertext
say whose it is, which the server cannot check.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import Array, ConfigRecord, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import recorddict_to_fitres

from fedheal.federation.reply_limits import escape_text
from fedheal.flower.messages import view_array

# What a reply must hold in each stage.
REPLIES: dict[str, dict[str, type]] = {
    Stage.SETUP: {Key.PUBLIC_KEY_1: bytes, Key.PUBLIC_KEY_2: bytes},
    Stage.SHARE_KEYS: {Key.DESTINATION_LIST: list, Key.CIPHERTEXT_LIST: list},
    Stage.COLLECT_MASKED_VECTORS: {Key.MASKED_PARAMETERS: list},
    Stage.UNMASK: {Key.NODE_ID_LIST: list, Key.SHARE_LIST: list},
}
MAX_KEY_BYTES = 2**14  # of a reply beside its vector, per client in the sum
INDEX_BYTES, BLOCK_BYTES = 4, 16  # a share is its index and a block for each block of the padded secret
SEED_SHARE_BYTES = INDEX_BYTES + 3 * BLOCK_BYTES  # of a seed of 32 bytes, which padding makes 48


@dataclass(frozen=True)
class ExpectedReply:
    """What the server expects of a node in a stage.

    Attributes:
        stage: The stage of the protocol.
        node: The node.
        asked: All nodes that are asked in this stage.
        request: What the node is sent.
        length: The length of a client's vector.
    """

    stage: str
    node: int
    asked: Collection[int]
    request: ConfigRecord
    length: int

    def find_problem(self, content: RecordDict) -> str | None:
        """Return why a reply cannot be used, or None."""
        config: Any = content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        for key, kind in REPLIES[self.stage].items():
            if not isinstance(config.get(key), kind):
                return f"its reply has no {kind.__name__} '{key}'"
        is_vector = self.stage == Stage.COLLECT_MASKED_VECTORS
        limit = MAX_KEY_BYTES * len(self.asked) + 8 * self.length * is_vector
        if count_reply_bytes(content) > limit:
            return f"its reply has {count_reply_bytes(content)} bytes, more than {limit}"
        if self.stage == Stage.SETUP:
            return _find_bad_key(config)
        if self.stage == Stage.SHARE_KEYS:
            return self._find_bad_ciphertexts(config)
        return self._find_bad_vector(content, config) if is_vector else self._find_bad_shares(config)

    def _find_bad_ciphertexts(self, config: Any) -> str | None:
        destinations, ciphertexts = config[Key.DESTINATION_LIST], config[Key.CIPHERTEXT_LIST]
        if sorted(destinations, key=str) != sorted(set(self.asked) - {self.node}, key=str):
            return "its key shares are not for each of the other nodes, once"
        if len(ciphertexts) != len(destinations) or not all(isinstance(item, bytes) for item in ciphertexts):
            return f"it sends {len(ciphertexts)} key shares for {len(destinations)} nodes"
        return None

    def _find_bad_shares(self, config: Any) -> str | None:
        present, gone = (cast(list[int], self.request[key]) for key in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST))
        nodes, shares = config[Key.NODE_ID_LIST], config[Key.SHARE_LIST]
        if sorted(nodes, key=str) != sorted([*present, *gone], key=str):
            return "its shares are not those that it was asked for"
        if len(shares) != len(nodes) or not all(isinstance(share, bytes) for share in shares):
            return f"it sends {len(shares)} shares of {len(nodes)} secrets"
        for node, share in zip(nodes, shares, strict=True):
            blocks, rest = divmod(len(share) - INDEX_BYTES, BLOCK_BYTES)
            if rest or blocks < 1 or (node in present and len(share) != SEED_SHARE_BYTES):
                return f"its share for node {node} has {len(share)} bytes, which no share has"
        return None

    def _find_bad_vector(self, content: RecordDict, config: Any) -> str | None:
        try:
            recorddict_to_fitres(content, keep_input=True)
            arrays = [view_array(Array("", (), "numpy.ndarray", data)) for data in config[Key.MASKED_PARAMETERS]]
        except Exception as error:  # a client's bytes may raise anything
            return f"its vector cannot be read ({escape_text(error)})"
        if [(a.shape, a.dtype) for a in arrays] != [((size,), np.dtype(np.int64)) for size in (1, self.length)]:
            return f"its vector has shapes {[a.shape for a in arrays]}, not {[(1,), (self.length,)]} of int64"
        return None


def _find_bad_key(config: Any) -> str | None:
    """Return why a node's public keys cannot be used: another node's mask would fail, and that node would drop out."""
    for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
        try:
            key = load_pem_public_key(config[name])
        except Exception as error:  # a client's bytes may raise anything
            return f"its key '{name}' cannot be read ({escape_text(error)})"
        if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
            return f"its key '{name}' is not of the curve SECP384R1"
    return None


def count_reply_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's arrays, and of texts and bytes in its configs."""
    values = [value for record in content.config_records.values() for value in record.values()]
    listed = [item for value in values for item in (value if isinstance(value, list) else [value])]
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    return arrays + sum(len(item) for item in listed if isinstance(item, str | bytes))
