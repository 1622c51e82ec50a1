"""Checks of a user's data set: each error names the field, what it must be and what it is."""

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


def test_valid_data_pass() -> None:
    check_domains(OWN, "mine:load")
    check_domains(replace(OWN, clients_per_domain=[np.int64(2)], classes=["cat", "dog"]), "mine:load")
    check_domains(replace(OWN, classes=("night\u3000scan", "夜")), "mine:load")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, " must be fedheal.data.domains.Split, got NoneType"),
        ((IMAGES, LABELS), " must be fedheal.data.domains.Split, got tuple"),
        (Split(IMAGES.numpy(), LABELS), ".images must be torch.Tensor, got numpy.ndarray"),
        (Split(IMAGES, [0, 1, 0, 1]), ".labels must be torch.Tensor, got list"),
        (
            Split(IMAGES.float(), LABELS),
            r"images must be uint8 \[N, 3, H, W\], got torch.float32 of shape \(4, 3, 8, 8\)",
        ),
        (Split(IMAGES, LABELS[:3]), r"labels must be int64 \[4\], got torch.int64 of shape \(3,\)"),
        (Split(IMAGES, LABELS + 1), "labels must be 0 to 1, got 1 to 2"),
    ],
)
def test_invalid_splits(train: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"data 'mine:load': photos/train.*{message}"):
        check_domains(replace(OWN, domains=(Domain("photos", train, SPLIT),)), "mine:load")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "clients_per_domain",
            ("3",),
            "the entries of clients_per_domain must be whole numbers of at least 1, got '3'",
        ),
        ("clients_per_domain", (0,), "the entries of clients_per_domain must be whole numbers of at least 1, got 0"),
        (
            "clients_per_domain",
            (True,),
            "the entries of clients_per_domain must be whole numbers of at least 1, got True",
        ),
        ("clients_per_domain", 3, "clients_per_domain must be tuple, got int"),
        (
            "samples_per_client",
            (1.5,),
            "the entries of samples_per_client must be whole numbers of at least 0, got 1.5",
        ),
        ("samples_per_client", (1, 2), "samples_per_client has 2 entries for 1 domains"),
        ("domains", None, "domains must be tuple, got NoneType"),
        ("domains", ("photos",), r"domains\[0\] must be fedheal.data.domains.Domain, got str"),
        ("domains", (), "at least one is needed"),
        ("domains", (Domain(3, SPLIT, SPLIT),), r"domains\[0\].name = 3 must be text, got int: give it as a string"),
        ("domains", (Domain(" ", SPLIT, SPLIT),), r"domains\[0\].name = ' ': give a name that is not empty"),
        ("domains", (Domain("a\x1b[2J", SPLIT, SPLIT),), r"domains\[0\].name = .* has no control characters"),
        ("domains", (Domain("\udc80", SPLIT, SPLIT),), r"domains\[0\].name = .* has no control characters"),
        ("classes", (0, 1), r"classes\[0\] = 0 must be text, got int"),
        ("classes", ("cat", ""), r"classes\[1\] = '': give a name that is not empty"),
        ("classes", ("cat", "cat"), "two classes are called 'cat': give each a name of its own"),
        ("name", "", "name = '': give a name that is not empty"),
        ("name", 3, "name = 3 must be text, got int"),
    ],
)
def test_invalid_fields(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"data 'mine:load': .*{message}"):
        check_domains(replace(OWN, **{field: value}), "mine:load")


def test_names_may_have_letters_without_width() -> None:
    check_domains(replace(OWN, classes=("\u0645\u06cc\u200c\u0631\u0648\u0645", "dog")), "mine:load")


def test_images_of_a_domain_have_one_size() -> None:
    wide = Split(torch.zeros(4, 3, 8, 9, dtype=torch.uint8), LABELS)
    message = "data 'mine:load': photos: the training images are 8 x 9 and the test images 8 x 8 pixels: bring them to"
    with pytest.raises(ValueError, match=message):
        check_domains(replace(OWN, domains=(Domain("photos", wide, SPLIT),)), "mine:load")
