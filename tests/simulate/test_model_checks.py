"""A model that cannot be trained on the data is refused with a sentence, before there is a folder."""

from __future__ import annotations

import pytest
import torch

import fedheal
from fedheal.simulate import build
from tiny_data import Unpooled, load, quick, uneven


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("one_class_fewer", {}, r"model 'tiny_data:one_class_fewer' has 2 outputs, but the data set has 3 classes"),
        ("lazy", {}, r"model 'tiny_data:lazy' has lazy layers, whose sizes are not set"),
        ("frozen", {}, "model 'tiny_data:frozen' has no parameter to train"),
        ("empty", {}, "model 'tiny_data:empty' has no parameter to train"),
        ("wide", {}, r"model 'tiny_data:wide' does not fit images of shape \(3, 8, 8\)"),
        ("TwoOutputs", {}, r"model 'tiny_data:TwoOutputs' gives a tuple for one image, not a tensor of shape \(1, 3\)"),
        ("WithExtraState", {}, "model 'tiny_data:WithExtraState' cannot be averaged: .*extra_state.*is a dict"),
        (
            "AuxiliaryOutput",
            {},
            r"model 'tiny_data:AuxiliaryOutput' gives a tuple for 2 images in training, not a tensor of shape \(2, 3\)",
        ),
        (
            "Unpooled",
            {"method": "fedproto"},
            r"model 'tiny_data:Unpooled' does not fit images of shape \(3, 8, 8\) in training \(mat1 and mat2 shapes",
        ),
        (
            "PoolingHead",
            {"method": "moon"},
            r"`features` of model 'tiny_data:PoolingHead' give \(2, 4, 3, 3\) for 2 images, not a tensor of shape \(2, size\)",
        ),
        (
            "DetachedOutput",
            {},
            r"model 'tiny_data:DetachedOutput' does not fit .* in training \(element 0 of tensors does not require",
        ),
        ("LeavingModel", {}, r"model 'tiny_data:LeavingModel' does not fit images of .* \(SystemExit: 4\)$"),
        ("ViewsInput", {}, r"model 'tiny_data:ViewsInput' does not fit .* in training \(view size is not compatible"),
        ("flat_batchnorm", {"batch_size": 1}, "the last batch of client .* is a single image: use another batch_size"),
    ],
)
def test_what_does_not_fit_is_said_first(tmp_path, model, keys, message):
    with pytest.raises(ValueError, match=message):
        fedheal.run(quick(model=f"tiny_data:{model}", **keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_images_of_several_sizes_are_no_obstacle_to_a_model_that_takes_them():
    run = fedheal.run(quick(data="tiny_data:uneven", model="resnet10", width=2, rounds=1))
    assert set(run.domains) == {"plain", "noisy", "dark"}
    # Side by side in lanes, which a GPU is for, they would have to be one size.
    gpu, train = torch.device("cuda"), {domain.name: domain.train for domain in uneven().domains}
    with pytest.raises(ValueError, match=r"dark 16 x 16\), which only engine=serial supports"):
        build._check_image_sizes(quick(data="tiny_data:uneven"), train, gpu)
    build._check_image_sizes(quick(data="tiny_data:uneven", engine="serial"), train, gpu)
    build._check_image_sizes(quick(), {"plain": train["plain"], "noisy": train["noisy"]}, gpu)


def test_sizes_of_images_that_nobody_trains_with_do_not_matter():
    run = fedheal.run(quick(data="tiny_data:uneven", model="resnet10", width=2, rounds=1, pool=True, without=("dark",)))
    assert set(run.domains) == {"plain", "noisy", "dark"}


def test_a_model_whose_batches_are_large_enough_is_not_refused(tmp_path):
    run = fedheal.run(quick(model="tiny_data:flat_batchnorm", rounds=1, batch_size=8), tmp_path / "run")
    assert run.summary["rounds"] == 1


def test_a_single_image_that_no_step_reaches_is_no_obstacle():
    assert fedheal.run(quick(model="tiny_data:flat_batchnorm", rounds=1, batch_size=4, steps=3)).summary["rounds"] == 1


@pytest.mark.parametrize("model", ["Unpooled", "PoolingHead"])
def test_features_that_no_term_looks_at_may_be_anything(model):
    assert fedheal.run(quick(model=f"tiny_data:{model}", rounds=1)).summary["rounds"] == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_cannot_be_copied_is_not_refused_for_that():
    assert fedheal.run(quick(model="tiny_data:normalised_weights", rounds=1)).summary["rounds"] == 1


def test_trying_a_model_leaves_no_trace():
    """The check also tries single images, since the last batch of 13 images has one."""
    before = torch.random.get_rng_state()
    module = build.build_federation(
        quick(model="tiny_data:conv_batchnorm", batch_size=4), load(), torch.device("cpu")
    ).local_training.module
    build.build_federation(quick(model="tiny_data:dropout", batch_size=4), load(), torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    built = build.build_module(quick(model="tiny_data:conv_batchnorm"), 3)
    assert all(torch.equal(value, built.state_dict()[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert module.training


def test_a_gpu_without_memory_is_not_taken_for_a_model_that_does_not_fit(monkeypatch):
    def raise_out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Unpooled, "forward", raise_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fedheal.run(quick(model="tiny_data:Unpooled", rounds=1))
