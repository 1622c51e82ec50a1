"""Run the Digits protocol, written once more from its description alone. No line of code is shared with the package.

python tools/second_version.py prepare DATA second.npz
python tools/second_version.py run second.npz --weights uniform --rounds 60 --out results/second-version

DATA is the folder with digits/. This program has its own file reader, split, network, training loop and average. Where it
agrees with the package, neither is likely wrong. It is one plain loop. On a GPU its steps are captured, or it would take hours.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import scipy.io
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

Arrays = dict[str, npt.NDArray[np.generic]]
Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
Examples = tuple[Tensor, Tensor]

CLIENTS = 5  # a domain
SIZES = {"mnist": 600, "usps": 72, "svhn": 732, "syn_standin": 100}  # images a client: 1 % of the whole training sets
SIZE, PAD, BATCH, LR, MOMENTUM, DECAY = 32, 4, 64, 1e-3, 0.9, 1e-5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def prepare(options: argparse.Namespace) -> None:
    """Draw the clients' images and store them with the test images, 32 x 32, as bytes."""
    if not options.file.parent.is_dir():
        raise ValueError(f"{options.file}: there is no folder {options.file.parent}")
    files: dict[str, tuple[Callable[[Path], Pair], str, str]] = {
        "mnist": (_read_idx, "train", "t10k"),
        "usps": (_read_libsvm, "usps.bz2", "usps.t.bz2"),
        "svhn": (_read_mat, "train_32x32.mat", "test_32x32.mat"),
        "syn_standin": (_read_mat, "synth_train_32x32.mat", "synth_test_32x32.mat"),
    }
    generator = np.random.default_rng(options.split)
    arrays: Arrays = {"split": np.array(options.split)}
    for domain, size in SIZES.items():
        read, *names = files[domain]
        try:
            (images, labels), (test_images, test_labels) = (read(options.data / "digits" / domain / n) for n in names)
        except FileNotFoundError:
            raise
        except Exception as error:  # readers of damaged files raise all kinds of errors
            raise ValueError(f"{domain}: its files cannot be read ({type(error).__name__}: {error})") from error
        if len(images) < CLIENTS * size:
            raise ValueError(f"{domain}: {len(images)} training images, but the clients need {CLIENTS * size}")
        chosen = generator.permutation(len(images))[: CLIENTS * size]
        arrays |= {f"{domain}_x": _resize(images[chosen]), f"{domain}_y": labels[chosen]}
        arrays |= {f"{domain}_test_x": _resize(test_images), f"{domain}_test_y": test_labels}
        print(f"{domain}: {len(chosen)} of {len(images)} training images, {len(test_images)} test images")
    np.savez_compressed(options.file, **arrays)  # type: ignore[arg-type]


def _read_idx(part: Path) -> Pair:
    def read(name: str) -> npt.NDArray[np.uint8]:
        raw = gzip.decompress(part.with_name(f"{part.name}-{name}-ubyte.gz").read_bytes())
        axes = raw[3]
        shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)

    return read("images-idx3"), read("labels-idx1").astype(np.int64)


def _read_libsvm(path: Path) -> Pair:
    images, labels = [], []
    for line in bz2.decompress(path.read_bytes()).decode().splitlines():
        label, *pixels = line.split()
        values = np.full(256, -1.0)
        for pixel in pixels:
            index, value = pixel.split(":")
            values[int(index) - 1] = float(value)
        images.append(np.clip(np.round((values.reshape(16, 16) + 1) * 127.5), 0, 255))
        labels.append(int(label) - 1)
    return np.array(images).astype(np.uint8), np.array(labels, np.int64)


def _read_mat(path: Path) -> Pair:
    content = scipy.io.loadmat(path)
    return content["X"].transpose(3, 0, 1, 2), content["y"].ravel().astype(np.int64) % 10  # SVHN writes a zero as 10


def _resize(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if images.shape[1:3] == (SIZE, SIZE):
        return images
    new = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for image in images]
    return np.stack([np.asarray(image) for image in new])


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(inner + self.around(x))


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        steps = [(1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)]
        self.blocks = nn.Sequential(*(Block(a * width, b * width, stride) for a, b, stride in steps))
        self.linear = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.linear(F.adaptive_avg_pool2d(maps, 1).flatten(1))  # type: ignore[no-any-return]


class Trainer:
    """A network and its optimiser. On a GPU its steps are captured, once per batch size."""

    def __init__(self, width: int, device: str) -> None:
        self.device = device
        self.network = Network(width).to(device)
        self.params = list(self.network.parameters())
        self.momentum = [torch.zeros_like(p) for p in self.params]
        # All that is averaged: parameters and the running statistics of the normalisation.
        self.floats = [value for value in self.network.state_dict().values() if value.is_floating_point()]
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def start_from(self, model: Sequence[Tensor]) -> None:
        _copy(self.floats, model)
        _copy(self.momentum, [torch.zeros_like(m) for m in self.momentum])

    def step(self, x: Tensor, y: Tensor) -> None:
        if self.device == "cpu":
            self._step(x, y)
            return
        if len(y) not in self.captured:
            self.captured[len(y)] = self._capture(x.clone(), y.clone())
        graph, graph_x, graph_y = self.captured[len(y)]
        graph_x.copy_(x)
        graph_y.copy_(y)
        graph.replay()

    def _step(self, x: Tensor, y: Tensor) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.network(x)
        gradients = torch.autograd.grad(F.cross_entropy(logits.float(), y), self.params)
        with torch.no_grad():
            for p, m, g in zip(self.params, self.momentum, gradients, strict=True):
                m.mul_(MOMENTUM).add_(g).add_(p, alpha=DECAY)
                p.sub_(m, alpha=LR)

    def _capture(self, x: Tensor, y: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        before = [[value.clone() for value in values] for values in (self.floats, self.momentum)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # the libraries' first choices and allocations must not be captured
                self._step(x, y)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(x, y)
        for values, old in zip((self.floats, self.momentum), before, strict=True):
            _copy(values, old)
        return graph, x, y


@torch.no_grad()
def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(into, values, strict=True):
        target.copy_(value)


def _scale(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def _make_batches(x: Tensor, y: Tensor, epochs: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches, each image shifted by up to four pixels with black around it."""
    framed, span = F.pad(x, [PAD] * 4), torch.arange(SIZE, device=x.device)
    for _ in range(epochs):
        order = torch.randperm(len(y), generator=generator).to(x.device)
        shifts = torch.randint(0, 2 * PAD + 1, (2, len(y)), generator=generator).to(x.device)
        rows, columns = (shift[:, None] + span for shift in shifts)
        shifted = framed[order[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        inputs, labels = _scale(shifted), y[order]
        for start in range(0, len(y), BATCH):
            yield inputs[start : start + BATCH], labels[start : start + BATCH]


def run(options: argparse.Namespace) -> None:
    """Train, average and evaluate; write a record with the accuracies of every round."""
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = cuda: no GPU is available; use cpu, which takes hours")
    for name in ("rounds", "epochs", "width"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} = {getattr(options, name)}: use 1 or more")
    if not options.seconds > 0:
        raise ValueError(f"seconds = {options.seconds:g}: use a positive number, or leave it out for no limit")
    path = options.out / f"{options.weights}-seed{options.seed}.json"
    if path.exists():
        raise ValueError(f"{path} is there already: remove it, or name another folder with --out")
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed + 1)
    trainer = Trainer(options.width, device)
    split, clients, tests = _load(options.file, device)
    sizes = np.array([len(y) for _, y in clients], np.float64)
    weights = sizes / sizes.sum() if options.weights == "size" else np.full(len(clients), 1 / len(clients))
    model = [value.clone() for value in trainer.floats]
    rounds: list[dict[str, float]] = []
    record = {
        "weights": options.weights,
        "seed": options.seed,
        "split": split,
        "width": options.width,
        "epochs": options.epochs,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "rounds": rounds,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    while len(rounds) < options.rounds and time.monotonic() - start < options.seconds:
        trainer.network.train()
        total = [torch.zeros_like(value, dtype=torch.float64) for value in model]
        for (x, y), weight in zip(clients, weights, strict=True):
            trainer.start_from(model)
            for inputs, labels in _make_batches(x, y, options.epochs, generator):
                trainer.step(inputs, labels)
            for sums, value in zip(total, trainer.floats, strict=True):
                sums.add_(value.double(), alpha=float(weight))
        model = [sums.float() for sums in total]
        trainer.start_from(model)
        rounds.append({domain: _evaluate(trainer, x, y) for domain, (x, y) in tests.items()})
        line = "  ".join(f"{domain} {accuracy:.1f}" for domain, accuracy in rounds[-1].items())
        print(f"{options.weights}, seed {options.seed}, round {len(rounds)}: {line}", flush=True)
        path.with_suffix(".tmp").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".tmp").replace(path)
    print(path)


def _load(file: Path, device: str) -> tuple[int, list[Examples], dict[str, Examples]]:
    """Return the seed of the split, the clients' examples and the test sets."""
    try:
        with np.load(file) as stored:
            arrays = dict(stored)
    except (ValueError, EOFError, zlib.error, zipfile.BadZipFile):
        raise ValueError(f"{file} is not what prepare makes") from None
    expected = {"split", *(f"{d}{end}" for d in SIZES for end in ("_x", "_y", "_test_x", "_test_y"))}
    if missing := sorted(expected - {*arrays}):
        raise ValueError(f"{file} is not what prepare makes: it has no {', '.join(missing)}")
    clients: list[Examples] = []
    tests: dict[str, Examples] = {}
    for domain, size in SIZES.items():
        number = CLIENTS * size
        if not len(arrays[f"{domain}_x"]) == len(arrays[f"{domain}_y"]) == number:
            raise ValueError(f"{file} is not what prepare makes: {domain} has not {number} images and labels")
        x, y = _to_tensor(arrays[f"{domain}_x"], device), torch.from_numpy(arrays[f"{domain}_y"]).to(device)
        clients += [(x[i : i + size], y[i : i + size]) for i in range(0, number, size)]
        test_y = torch.from_numpy(arrays[f"{domain}_test_y"]).to(device)
        tests[domain] = _to_tensor(arrays[f"{domain}_test_x"], device), test_y
    return int(arrays["split"]), clients, tests


def _to_tensor(images: npt.NDArray[np.generic], device: str) -> Tensor:
    pixels = torch.from_numpy(images)
    pixels = pixels[:, None].expand(-1, 3, -1, -1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return pixels.contiguous().to(device)


@torch.no_grad()
def _evaluate(trainer: Trainer, x: Tensor, y: Tensor) -> float:
    trainer.network.eval()
    correct = 0
    for start in range(0, len(y), 1000):
        with torch.autocast(trainer.device, torch.bfloat16):
            logits = trainer.network(_scale(x[start : start + 1000]))
        correct += int((logits.argmax(1) == y[start : start + 1000]).sum())
    return 100 * correct / len(y)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    preparing = commands.add_parser("prepare", help="read the files, draw the clients' images")
    preparing.add_argument("data", type=Path, help="the folder that holds digits/")
    preparing.add_argument("file", type=Path, help="where the images go (.npz)")
    preparing.add_argument("--split", type=int, default=7, help="seed of the draw")
    preparing.set_defaults(do=prepare)
    running = commands.add_parser("run", help="train and evaluate")
    running.add_argument("file", type=Path, help="what prepare made")
    running.add_argument("--weights", choices=["size", "uniform"], default="size", help="FedAvg's, or all alike")
    running.add_argument("--rounds", type=int, default=200)
    running.add_argument("--epochs", type=int, default=10)
    running.add_argument("--width", type=int, default=64, help="channels of the first layer")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--seconds", type=float, default=float("inf"), help="stop between rounds after so many")
    running.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--out", type=Path, default=Path("results/second-version"))
    running.set_defaults(do=run)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(words)
    try:
        options.do(options)
        return 0
    except OSError as error:
        problem = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    except ValueError as error:
        problem = str(error)
    print(f"second_version: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
