"""Which images are public: those that no client holds, or those of another data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedheal.data.domains import Domain, Domains, Split
from fedheal.simulate.build import build_federation, partition_clients
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.public_images import select_public_images
from tiny_data import load, quick

CPU = torch.device("cpu")


def select(**keys: Any) -> Tensor | None:
    experiment, domains = quick(**{"method": "fccl"} | keys), load()
    return select_public_images(experiment, domains, partition_clients(experiment, domains), CPU)


def load_inverted() -> Domains:
    """Load the data with inverted training images."""
    return replace_training_images(lambda domain: Split(255 - domain.train.images, domain.train.labels))


def load_test_images() -> Domains:
    """Load the data with its test images for training."""
    return replace_training_images(lambda domain: domain.test)


def replace_training_images(make: Callable[[Domain], Split]) -> Domains:
    data = load()
    return replace(data, name="other", domains=tuple(replace(domain, train=make(domain)) for domain in data.domains))


def list_images(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_no_client_holds_a_public_image() -> None:
    """120 training images, of which five clients hold 93; the others are public, in an order set by the seed."""
    fed = build_federation(quick(method="fccl", validation=0.25), load(), CPU)
    public = list_images(fed.local_training.public)
    client_splits = [*fed.local_training.examples.values(), *fed.validation.values()]
    assert len(set(public)) == 27
    assert not set(public) & {image for split in client_splits for image in list_images(split.images)}
    assert not set(public) & {image for domain in load().domains for image in list_images(domain.test.images)}
    assert list_images(select()) == public != list_images(select(split_seed=1))
    assert list_images(select(public_images=5)) == public[:5]


def test_clients_left_out_of_training_keep_their_images() -> None:
    assert list_images(select(without=["plain-0"])) == list_images(select())


def test_other_methods_have_no_public_images() -> None:
    assert select(method="fedheal") is None
    assert build_federation(quick(public="tiny_data:load"), load(), CPU).local_training.public is None


def test_another_data_set_is_used_whole() -> None:
    """All its training images may be drawn, if they have the shape of the clients' images."""
    with pytest.raises(ValueError, match=r"of 'many' has the shape \(3, 32, 32\), but the clients' .* \(3, 8, 8\)"):
        select(public="tiny_data:load_many_clients")
    with pytest.raises(ValueError, match="public = 'embeded': there is no data set 'embeded'"):
        select(public="embeded")
    assert len(select(public=f"{__name__}:load_inverted")) == 120
    assert len(select(public="tiny_data:load")) == 27  # the same data: what clients hold is not public


def test_images_of_another_data_set_that_clients_use_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images under another name: clients hold 93 of 120. Images for testing are never public."""
    monkeypatch.setenv("TINY_DATA_LOG", str(tmp_path / "log"))
    assert sorted(list_images(select(public="tiny_data:load_and_log"))) == sorted(list_images(select()))
    with pytest.raises(ValueError, match="42 training images, and clients hold or are tested on at least 41 of them"):
        select(public=f"{__name__}:load_test_images")


def test_clients_that_hold_everything_leave_no_public_images() -> None:
    keys = {"clients_per_domain": 1, "samples_per_client": "plain=60 noisy=40 dark=20"}
    with pytest.raises(ValueError, match=r"clients hold all 120 training images of 'tiny': .* or give public=DATA"):
        select(**keys)


def test_a_folder_becomes_an_absolute_path() -> None:
    assert Experiment(public="folder:photos").public.startswith("folder:/")
    assert "public" not in Experiment().to_dict()
