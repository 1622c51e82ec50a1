"""Measure how much of a result comes from the draw of the clients' images, and how much from the initial model.

    python benchmarks/noise.py --out runs/noise         prints a report with variance components; repeat it to resume

It runs FedAvg and FedHEAL on the embedded data with all combinations of draws and initial models. The model is a small
perceptron, which a CPU trains in seconds. `--model small_cnn` selects the demo's model. With other data and a GPU:

    python benchmarks/noise.py precision=bf16 --data digits --model resnet10 --device cuda --vary split=4,init=3 --rounds 15
"""

from __future__ import annotations

import argparse

from torch import nn

import fedheal
from arguments import exit_with_error, parse_positive
from fedheal.simulate.experiment import parse_overrides

HIDDEN = 64


def build_perceptron(classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build a network that halves the images and has one hidden layer."""
    channels, height, width = input_shape
    inputs = channels * (height // 2) * (width // 2)
    return nn.Sequential(
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that differ from the protocol")
    parser.add_argument("--out", default="runs/noise")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--data-root", default=None, help="the data directory, if not that of FEDHEAL_DATA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedheal"])
    parser.add_argument("--vary", default="split=5,init=3")
    parser.add_argument("--rounds", type=parse_positive, default=15)
    parser.add_argument("--model", default=None)
    options = parser.parse_intermixed_args()
    try:
        fields = parse_overrides(options.overrides) | {"device": options.device, "data_root": options.data_root}
        fields |= {"rounds": options.rounds, "model": options.model or build_perceptron}
        print(fedheal.compare(options.methods, options.data, out=options.out, vary=options.vary, **fields))
    except ValueError as error:
        exit_with_error(str(error))


if __name__ == "__main__":
    main()
