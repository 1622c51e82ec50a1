"""Digits: MNIST, USPS, SVHN and SYN, the first of the paper's two data sets; with MNIST-M, the usual five.

- MNIST: LeCun, Cortes, Burges. USPS: Hull 1994. SVHN, cropped: Netzer et al. 2011.
- SYN (Synthetic Digits) and MNIST-M: Ganin and Lempitsky 2015. Of SYN the paper's protocol has 10,000 / 2,000 images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedheal.data.readers import idx, libsvm, mat
from fedheal.data.specs import Description, FileLayout, FolderLayout, Hub, Source, Web
from fedheal.data.splits import Pixels, RawDomain

CLASSES = tuple(str(digit) for digit in range(10))
TEN = len(CLASSES)
CSIE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
STANFORD = "http://ufldl.stanford.edu/housenumbers"
GANIN = "http://yaroslav.ganin.net"


def _idx(name: str, paths: Sequence[Path]) -> RawDomain:
    train, train_labels, test, test_labels = paths
    return RawDomain(name, CLASSES, idx.images(train, train_labels, TEN), idx.images(test, test_labels, TEN))


def _two(read: Callable[[Path], Pixels], name: str, paths: Sequence[Path]) -> RawDomain:
    """A domain whose splits are one file each."""
    train, test = paths
    return RawDomain(name, CLASSES, read(train), read(test))


def _gzipped(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (f"{name}.gz", name, name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz") for name in names
    )


IDX = FileLayout(
    "idx",
    _gzipped("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    _idx,
)
LIBSVM = FileLayout(
    "LIBSVM text",
    (("usps.bz2", "usps"), ("usps.t.bz2", "usps.t")),
    partial(_two, partial(libsvm.images, classes=TEN)),
)
SVHN_MAT = FileLayout(
    "MATLAB",
    (("train_32x32.mat",), ("test_32x32.mat",)),
    partial(_two, partial(mat.images, classes=TEN, zero_is_ten=True)),
)
SYN_MAT = FileLayout(
    "MATLAB",
    (("synth_train_32x32.mat",), ("synth_test_32x32.mat",)),
    partial(_two, partial(mat.images, classes=TEN, zero_is_ten=False)),
)
BY_DIGIT = FolderLayout(CLASSES, "{train,val}/<digit>/*.png")

MNIST = Source(
    "mnist",
    60_000,
    10_000,
    ("digits/mnist", "mnist", "MNIST/raw", "digits/MNIST/raw"),
    (IDX,),
    "http://yann.lecun.com/exdb/mnist/",
    Hub("ylecun/mnist", ("mnist/*.parquet",)),
)
USPS = Source(
    "usps",
    7_291,
    2_007,
    ("digits/usps", "usps", "USPS", "digits", "."),
    (LIBSVM,),
    f"{CSIE}.html#usps",
    Hub("flwrlabs/usps"),
    (Web(f"{CSIE}/usps.bz2"), Web(f"{CSIE}/usps.t.bz2")),
)
SVHN = Source(
    "svhn",
    73_257,
    26_032,
    ("digits/svhn", "svhn", "SVHN", "digits", "."),
    (SVHN_MAT,),
    f"{STANFORD}/",
    Hub("ufldl-stanford/svhn", ("cropped_digits/train*.parquet", "cropped_digits/test*.parquet")),
    (Web(f"{STANFORD}/train_32x32.mat"), Web(f"{STANFORD}/test_32x32.mat")),
)
SYN_STANDIN = Source(
    "syn_standin",
    10_000,
    2_000,
    ("digits/syn_standin", "syn_standin"),
    (SYN_MAT, BY_DIGIT),
    "nowhere: it stands in for SYN where that is not at hand",
)
SYN = Source(
    "syn",
    10_000,
    2_000,
    ("digits/syn", "syn", "SYN", "digits/SynthDigits", "SynthDigits"),
    (SYN_MAT, BY_DIGIT),
    f"{GANIN}/",
    stand_in=SYN_STANDIN,
)
MNIST_M = Source(
    "mnist_m",
    60_000,
    10_000,
    ("digits/mnist_m", "mnist_m", "mnistm", "MNIST-M", "digits/mnistm"),
    (BY_DIGIT,),
    f"{GANIN}/",
    Hub("Mike0307/MNIST-M"),
)

# Section 4.1 of the paper; the authors' released code has the crop and no flip.
PROTOCOL = {"model": "resnet10", "rounds": 200, "epochs": 10, "batch_size": 64, "lr": 0.001, "augment": "crop"}

DIGITS = Description(
    "digits",
    "ten digits as MNIST, USPS, SVHN and SYN, the paper's protocol: 5 clients a domain, 1 % of the images each",
    (MNIST, USPS, SVHN, SYN),
    size=32,
    clients=5,
    fraction=0.01,
    classes=CLASSES,
    protocol=PROTOCOL,
)
DIGITS_FIVE = Description(
    "digits-five",
    "the same with MNIST-M as a fifth domain",
    (MNIST, USPS, SVHN, SYN, MNIST_M),
    size=32,
    clients=5,
    fraction=0.01,
    classes=CLASSES,
    protocol=PROTOCOL,
)
