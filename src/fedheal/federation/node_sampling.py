"""Which nodes take part in a round, and how long the server waits for enough of them."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping

import torch

log = logging.getLogger("flwr.fedheal")


class NotEnoughNodes(RuntimeError):
    """Too few nodes were connected, or answered, for longer than `wait_seconds`."""


class TooManyEmptyRounds(RuntimeError):
    """The model stayed as it was in `max_empty_rounds` rounds in a row."""


def wait_for_nodes(list_nodes: Callable[[], list[int]], needed: int, wait_seconds: float, advice: str) -> list[int]:
    """Return the nodes that `list_nodes` gives, once there are enough; Flower itself would wait for ever.

    `advice` ends the message of the NotEnoughNodes that is raised if they do not come.
    """
    deadline = time.monotonic() + wait_seconds
    is_announced = False
    while len(connected := list_nodes()) < needed:
        if time.monotonic() >= deadline:
            required = f"only {len(connected)} of the {needed} nodes required by min_available_nodes and the like"
            raise NotEnoughNodes(f"{required} are connected and answer after wait_seconds = {wait_seconds:g}; {advice}")
        if not is_announced:
            log.info(
                "waiting up to %g s for %d nodes (%d are connected and answer)", wait_seconds, needed, len(connected)
            )
            is_announced = True
        time.sleep(min(1.0, max(0.05, deadline - time.monotonic())))
    return connected


def sample_nodes(
    connected: Iterable[int], fraction: float, min_nodes: int, rng: torch.Generator, names: Mapping[int, str]
) -> list[int]:
    """Draw a random part of the nodes, ordered by client name: node ids differ from run to run, names do not.

    >>> sample_nodes([5, 3, 4], 0.5, 1, torch.Generator().manual_seed(0), {3: "c", 4: "b", 5: "a"})
    [5, 3]
    """
    ordered = sorted(connected, key=lambda node: (node not in names, names.get(node, ""), node))
    size = max(1, min_nodes, round(fraction * len(ordered)))
    if size >= len(ordered):
        return ordered
    order = torch.randperm(len(ordered), generator=rng)
    return [ordered[i] for i in sorted(order[:size].tolist())]
