"""A client's data, and the model."""

import torch
from torch import nn

from fedheal import Layout
from fedheal.core.rng import generator
from fedheal.data.domains import Split
from fedheal.engine.serial import LocalTraining, Training, use_seed

CLASSES, SIDE, EXAMPLES = 4, 8, 24
CPU = torch.device("cpu")


def get_name(partition: int) -> str:
    return f"client-{partition:05d}"


def get_domain(partition: int) -> str:
    """Return the domain: one client in ten has dimmer images."""
    return "dim" if partition % 10 == 0 else "bright"


def make_module() -> nn.Module:
    with use_seed(0, CPU):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_examples(partition: int, purpose: str) -> Split:
    """Make noisy images in which two rows are brighter; the class says which."""
    labels = torch.arange(EXAMPLES) % CLASSES
    images = 0.8 * torch.rand(EXAMPLES, 3, SIDE, SIDE, generator=generator(0, purpose, partition))
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 2 * label : 2 * label + 2] += 0.15
    if get_domain(partition) == "dim":
        images = 0.4 * images
    return Split((255 * images.clamp(0, 1)).to(torch.uint8), labels)


def make_local_training(partition: int) -> LocalTraining:
    torch.set_num_threads(1)
    net = make_module()
    return LocalTraining(
        module=net,
        layout=Layout.of(net),
        training=Training(lr=0.05, batch_size=8),
        seed=0,
        device=CPU,
        examples={get_name(partition): make_examples(partition, "train")},
        classes=CLASSES,
    )
