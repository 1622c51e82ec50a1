"""A data set of one's own, from a function: what is wrong with it is said in a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedheal.data.domains import Domain, Domains, Split, check_domains

IMAGES, LABELS = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4) % 2
SPLIT = Split(IMAGES, LABELS)
OWN = Domains("mine", ("cat", "dog"), (Domain("photos", SPLIT, SPLIT),), (1,), (0,))


def test_what_fits_is_taken() -> None:
    check_domains(OWN, "mine:load")
    check_domains(replace(OWN, clients_per_domain=[np.int64(2)], classes=["cat", "dog"]), "mine:load")


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (None, " is of the kind NoneType; fedheal.data.domains.Split is needed"),
        ((IMAGES, LABELS), " is of the kind tuple; fedheal.data.domains.Split is needed"),
        (Split(IMAGES.numpy(), LABELS), ".images is of the kind numpy.ndarray; torch.Tensor is needed"),
        (Split(IMAGES, [0, 1, 0, 1]), ".labels is of the kind list; torch.Tensor is needed"),
        (
            Split(IMAGES.float(), LABELS),
            r"torch.float32 images of shape \(4, 3, 8, 8\); uint8 \[N, 3, H, W\] is needed",
        ),
        (Split(IMAGES, LABELS[:3]), r"torch.int64 labels of shape \(3,\); int64 \[4\] is needed"),
        (Split(IMAGES, LABELS + 1), "labels 1 to 2 for 2 classes"),
    ],
)
def test_a_split_that_is_none(train: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"data 'mine:load': photos/train.*{said}"):
        check_domains(replace(OWN, domains=(Domain("photos", train, SPLIT),)), "mine:load")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("clients_per_domain", ("3",), "clients_per_domain has the entry '3'; an int of 1 or more is needed"),
        ("clients_per_domain", (0,), "clients_per_domain has the entry 0; an int of 1 or more is needed"),
        ("clients_per_domain", (True,), "clients_per_domain has the entry True"),
        ("clients_per_domain", 3, "clients_per_domain is of the kind int; tuple is needed"),
        ("samples_per_client", (1.5,), "samples_per_client has the entry 1.5; an int of 0 or more is needed"),
        ("samples_per_client", (1, 2), "samples_per_client has 2 entries for 1 domains"),
        ("domains", None, "domains is of the kind NoneType; tuple is needed"),
        ("domains", ("photos",), r"domains\[0\] is of the kind str; fedheal.data.domains.Domain is needed"),
        ("domains", (), "at least one is needed"),
    ],
)
def test_fields_that_are_none(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"data 'mine:load': .*{said}"):
        check_domains(replace(OWN, **{field: value}), "mine:load")
