"""Digits: MNIST, USPS, SVHN and SYN, the first of the paper's two data sets; with MNIST-M, the usual five.

- MNIST: LeCun, Cortes, Burges. USPS: Hull 1994. SVHN, cropped: Netzer et al. 2011.
- SYN (Synthetic Digits) and MNIST-M: Ganin and Lempitsky 2015. Of SYN the paper's protocol has 10,000 / 2,000 images.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedheal.data.readers.idx import read_idx_images
from fedheal.data.readers.libsvm import read_libsvm_images
from fedheal.data.readers.mat import read_mat_images
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
SVHN_MAT = FileLayout("MATLAB", SVHN_FILES, CLASSES, partial(read_mat_images, classes=TEN, zero_is_ten=True))
SYN_MAT = FileLayout("MATLAB", SYN_FILES, CLASSES, partial(read_mat_images, classes=TEN, zero_is_ten=False))
FOLDER_PER_DIGIT = FolderLayout(CLASSES, "{train,val}/<digit>/*.png")

# fmt: off
MNIST = DomainSpec(
    "mnist", 60_000, 10_000, ("digits/mnist", "mnist", "MNIST/raw", "digits/MNIST/raw"), (IDX,),
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
    "mnist_m", 60_000, 10_000, ("digits/mnist_m", "mnist_m", "mnistm", "MNIST-M", "digits/mnistm"), (FOLDER_PER_DIGIT,),
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
    DIGITS, name="digits-five", about="the same with MNIST-M as a fifth domain", domains=(*DIGITS.domains, MNIST_M)
)
