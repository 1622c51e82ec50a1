"""Digits: MNIST, USPS, SVHN and SYN, the first of the paper's two data sets; with MNIST-M, the usual five.

- MNIST: LeCun, Cortes, Burges. USPS: Hull 1994. SVHN, cropped: Netzer et al. 2011.
- SYN (Synthetic Digits) and MNIST-M: Ganin and Lempitsky 2015. Of SYN the paper's protocol has 10,000 / 2,000 images.
- Digit-Five: the MATLAB files of all five that Peng et al. 2019 share, with an MNIST-M of their own. The files of FedBN (Li
  et al. 2021) are pickles, which can run code, and are not read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedheal.data.readers.idx import read_idx_images
from fedheal.data.readers.libsvm import read_libsvm_images
from fedheal.data.readers.mat import MatNames, read_mat_images
from fedheal.data.specs import DatasetSpec, DomainSpec, FileLayout, FolderLayout, HubDataset, WebFile

CLASSES = tuple(str(digit) for digit in range(10))
TEN = len(CLASSES)
CSIE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
STANFORD = "http://ufldl.stanford.edu/housenumbers"
GANIN = "http://yaroslav.ganin.net"

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_SPELLINGS = tuple((f"{n}.gz", n, n.replace("-idx", ".idx"), f"{n.replace('-idx', '.idx')}.gz") for n in IDX_NAMES)
USPS_FILES = (("usps.bz2", "usps"), ("usps.t.bz2", "usps.t"))
SVHN_FILES = (("train_32x32.mat",), ("test_32x32.mat",))
SYN_FILES = (("synth_train_32x32.mat",), ("synth_test_32x32.mat",))
IDX = FileLayout("idx", IDX_SPELLINGS, CLASSES, partial(read_idx_images, classes=TEN))
LIBSVM = FileLayout("LIBSVM text", USPS_FILES, CLASSES, partial(read_libsvm_images, classes=TEN))
SVHN_NAMES = MatNames(first_label=1)
SVHN_MAT = FileLayout("MATLAB", SVHN_FILES, CLASSES, partial(read_mat_images, classes=TEN, names=SVHN_NAMES))
SYN_MAT = FileLayout("MATLAB", SYN_FILES, CLASSES, partial(read_mat_images, classes=TEN, names=MatNames()))
FOLDER_PER_DIGIT = FolderLayout(CLASSES, "{train,val}/<digit>/*.png")
DIGIT_FIVE_FOLDERS = ("Digit-Five", "digits/Digit-Five")


def _make_digit_five(file: str, images: tuple[str, str], labels: tuple[str, str], axes: str) -> FileLayout:
    """Specify a file of Digit-Five by its variables for training and testing."""
    kinds = ("uint8", "single", "double")
    train, test = (
        partial(read_mat_images, classes=TEN, names=MatNames(x, y, axes, kinds=kinds))
        for x, y in zip(images, labels, strict=True)
    )
    return FileLayout("Digit-Five", ((file,), (file,)), CLASSES, train, test)


DIGIT_FIVE = {
    "mnist": _make_digit_five("mnist_data.mat", ("train_32", "test_32"), ("label_train", "label_test"), "nhw"),
    "mnist_m": _make_digit_five("mnistm_with_label.mat", ("train", "test"), ("label_train", "label_test"), "nhwc"),
    "svhn": replace(SVHN_MAT, name="Digit-Five", files=(("svhn_train_32x32.mat",), ("svhn_test_32x32.mat",))),
    "syn": _make_digit_five("syn_number.mat", ("train_data", "test_data"), ("train_label", "test_label"), "nhwc"),
    "usps": _make_digit_five(
        "usps_28x28.mat", ("dataset{0,0}", "dataset{1,0}"), ("dataset{0,1}", "dataset{1,1}"), "nchw"
    ),
}

# fmt: off
MNIST = DomainSpec(
    "mnist", 60_000, 10_000, ("digits/mnist", "mnist", "MNIST/raw", "digits/MNIST/raw", "MNIST"), (IDX,),
    home="http://yann.lecun.com/exdb/mnist/",
    hub=HubDataset("ylecun/mnist", ("mnist/*.parquet",)),
)
USPS = DomainSpec(
    "usps", 7_291, 2_007, ("digits/usps", "usps", "USPS", "digits", "."), (LIBSVM,),
    home=f"{CSIE}.html#usps",
    hub=HubDataset("flwrlabs/usps"),
    web=(WebFile(f"{CSIE}/usps.bz2"), WebFile(f"{CSIE}/usps.t.bz2")),
)
SVHN = DomainSpec(
    "svhn", 73_257, 26_032, ("digits/svhn", "svhn", "SVHN", "digits", "."), (SVHN_MAT,),
    home=f"{STANFORD}/",
    hub=HubDataset("ufldl-stanford/svhn", ("cropped_digits/train*.parquet", "cropped_digits/test*.parquet")),
    web=(WebFile(f"{STANFORD}/train_32x32.mat"), WebFile(f"{STANFORD}/test_32x32.mat")),
)
SYN_STAND_IN = DomainSpec(
    "syn_standin", 10_000, 2_000, ("digits/syn_standin", "syn_standin"), (SYN_MAT, FOLDER_PER_DIGIT),
    home="no public site: it stands in for SYN if that is missing",
)
SYN = DomainSpec(
    "syn", 10_000, 2_000, ("digits/syn", "syn", "SYN", "digits/SynthDigits", "SynthDigits"), (SYN_MAT, FOLDER_PER_DIGIT),
    home=f"{GANIN}/",
    stand_in=SYN_STAND_IN,
)
MNIST_M = DomainSpec(
    "mnist_m", 60_000, 10_000, ("digits/mnist_m", "mnist_m", "mnistm", "MNIST-M", "MNIST_M", "digits/mnistm"),
    (FOLDER_PER_DIGIT,),
    home=f"{GANIN}/",
    hub=HubDataset("Mike0307/MNIST-M"),
)
# fmt: on

DIGITS = DatasetSpec(
    name="digits",
    about="ten digits as MNIST, USPS, SVHN and SYN, the paper's protocol: 5 clients a domain, 1 % of the images each",
    domains=(MNIST, USPS, SVHN, SYN),
    size=32,
    clients=5,
    fraction=0.01,
    classes=CLASSES,
    # Section 4.1 of the paper; the authors' released code has the crop and no flip.
    protocol={"model": "resnet10", "rounds": 200, "epochs": 10, "batch_size": 64, "lr": 0.001, "augment": "crop"},
)
DIGITS_FIVE = replace(
    DIGITS,
    name="digits-five",
    about="ten digits in five domains, MNIST-M among them; the protocol of FedBN: a client a domain, 743 images each",
    domains=tuple(
        replace(spec, folders=(*spec.folders, *DIGIT_FIVE_FOLDERS), layouts=(*spec.layouts, DIGIT_FIVE[spec.name]))
        for spec in (*DIGITS.domains, MNIST_M)
    ),
    size=28,
    clients=1,
    fraction=0.0,
    samples=743,  # a tenth of the smallest domain in their division
    # Li et al. 2021, `federated/fed_digits.py` of the released code; its network is a CNN of six layers.
    protocol={
        "model": "resnet10", "rounds": 100, "epochs": 1, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0,
        "augment": "none",
    },
)  # fmt: skip
