"""Who is asked: which nodes take part in a round, and how long the server waits for enough of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from flwr.serverapp import Grid

from fedheal.core.checks import check_count, check_not_negative, check_share

log = logging.getLogger("flwr.fedheal")


class NotEnoughNodes(RuntimeError):
    """Fewer nodes than the policy asks for, for longer than it waits."""


@dataclass(frozen=True)
class Attendance:
    """How many nodes take part. The names are those of Flower's strategies; waiting ends after `wait_seconds`."""

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    wait_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("fraction_train", "fraction_evaluate"):
            check_share(name, getattr(self, name))
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            check_count(name, getattr(self, name))
        check_not_negative("wait_seconds", self.wait_seconds)

    def awaited(self, grid: Grid, least: int, left: str) -> list[int]:
        """The connected nodes, once there are enough; Flower itself would wait for ever.

        `left`: what a run leaves behind that ends here, in words.
        """
        needed = max(1, least, self.min_available_nodes)
        deadline = time.monotonic() + self.wait_seconds
        said = False
        while len(there := list(grid.get_node_ids())) < needed:
            if time.monotonic() >= deadline:
                raise NotEnoughNodes(
                    f"{len(there)} of the {needed} nodes that min_available_nodes and the like ask for are connected "
                    f"after wait_seconds = {self.wait_seconds:g}; {left}"
                )
            if not said:
                log.info("waiting up to %g s for %d nodes (%d connected)", self.wait_seconds, needed, len(there))
                said = True
            time.sleep(min(1.0, max(0.05, deadline - time.monotonic())))
        return there


def chosen(
    there: Iterable[int], fraction: float, least: int, chance: torch.Generator, names: Mapping[int, str]
) -> list[int]:
    """A random part of the nodes, in the order of names: node ids differ from run to run, names do not.

    >>> chosen([5, 3, 4], 0.5, 1, torch.Generator().manual_seed(0), {3: "c", 4: "b", 5: "a"})
    [5, 3]
    """
    ordered = sorted(there, key=lambda node: (node not in names, names.get(node, ""), node))
    size = max(1, least, round(fraction * len(ordered)))
    if size >= len(ordered):
        return ordered
    order = torch.randperm(len(ordered), generator=chance)
    return [ordered[i] for i in sorted(order[:size].tolist())]
