"""Which runs are small enough to share a GPU."""

from __future__ import annotations

import pytest
import torch

from fedheal import data
from fedheal.campaign.gpu_estimate import is_small_run
from fedheal.data.embedded.scenes import SIZE as EMBEDDED_SIZE
from fedheal.simulate.experiment import Experiment
from tiny_data import quick


@pytest.mark.parametrize("name", data.SPECS)
def test_runs_of_the_papers_protocols_are_large_without_any_file_on_disk(name):
    assert not is_small_run(Experiment(data=name, data_root="/nowhere"))


@pytest.mark.parametrize(
    ("fields", "small"),
    [
        ({"data": "digits", "model": "small_cnn"}, True),
        ({"data": "digits", "model": "small_cnn", "width": 256}, False),
        ({"data": "digits", "model": "resnet10", "width": 8}, True),
        ({"data": "digits", "model": "resnet10", "width": 8, "image_size": 224}, False),
        ({"data": "digits", "model": "resnet10", "width": 8, "batch_size": 1024}, False),
        ({"data": "embedded"}, True),
        ({"data": "tiny_data:load", "model": "tiny_data:linear"}, True),
    ],
    ids=str,
)
def test_parameters_pixels_and_batch_size_count(fields, small):
    assert is_small_run(Experiment(**fields)) == small


@pytest.mark.parametrize(
    "fields", [{"model": "tiny_data:unable"}, {"model": "tiny_data:lazy"}, {"data": "tiny_data:absent"}], ids=str
)
def test_a_run_that_cannot_be_inspected_is_not_small(fields):
    assert not is_small_run(quick(**fields))


@pytest.mark.slow
def test_the_size_of_embedded_images_is_known():
    assert data.load_dataset("embedded").domains[0].test.images.shape[-2:] == (EMBEDDED_SIZE, EMBEDDED_SIZE)


def test_random_numbers_of_the_process_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    is_small_run(quick(model="tiny_data:conv_batchnorm", width=7))
    assert torch.rand(1) == expected
