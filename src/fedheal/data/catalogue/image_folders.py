"""Data sets of image folders: Office-Caltech-10, the second of the paper's two, and benchmarks that are not in the paper.

Office-Caltech-10: Gong et al. 2012, from Office-31 (Saenko et al. 2010) and Caltech-256 (Griffin et al. 2007). PACS: Li et al.
2017. Office-Home: Venkateswara et al. 2017. DomainNet: Peng et al. 2019. VLCS: Fang et al. 2013. Terra Incognita: Beery et al.
2018. docs/data.md compares each protocol with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from fedheal.data.specs import CameraTrapLayout, DatasetSpec, DomainSpec, FolderLayout, HubDataset
from fedheal.data.splits import find_training_images

OFFICE_CALTECH_CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug", "projector",
)  # fmt: skip
DOMAINNET_TEN = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")
TERRA_CLASSES = (
    "bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel",
)  # fmt: skip
ANY_CLASSES = FolderLayout()
# Huang et al. 2024, "A Survey and Benchmark", `Configs/domain_skew` of the released code (MarsFL): a client a domain with 30 %
# of its training images. Momentum and weight decay are fedheal's defaults.
MARSFL = {"rounds": 50, "epochs": 10, "batch_size": 16, "lr": 0.001, "augment": "flip"}


def _make_dataset(
    name: str,
    about: str,
    images: Mapping[str, int | tuple[int, int]],  # of each domain, or its training and its test images; 0: unknown
    parents: tuple[str, ...],
    home: str,
    hub: str = "",
    layout: FolderLayout = ANY_CLASSES,
    spellings: Mapping[str, tuple[str, ...]] | None = None,  # of a domain's folder, if it is not called like the domain
    **settings: Any,  # of `DatasetSpec`
) -> DatasetSpec:
    """Specify domains `<parent>/<domain>/<class>/...`, which the hub may have in one table."""
    domains = []
    for domain, number in images.items():
        if isinstance(number, int):
            train = int(find_training_images(number).sum())
            number = train, number - train
        names = (spellings or {}).get(domain, (domain,))
        folders = tuple(str(PurePath(parent, name)) for parent in parents for name in names)
        table = HubDataset(hub, domain=domain) if hub else None
        domains.append(DomainSpec(domain.lower().replace(" ", "_"), *number, folders, (layout,), home, table))
    return DatasetSpec(name, about, tuple(domains), classes=layout.classes, **settings)


OFFICE_CALTECH = _make_dataset(
    "office-caltech",
    "ten classes of objects in Caltech, Amazon, Webcam and DSLR, the paper's protocol: 5 clients a domain, 10 % each",
    {"caltech": 1123, "amazon": 958, "webcam": 295, "dslr": 157},
    parents=("office_caltech_10", "office-caltech", "OfficeCaltech10", ""),
    home="https://github.com/jindongwang/transferlearning/blob/master/data/dataset.md",
    layout=FolderLayout(OFFICE_CALTECH_CLASSES, "<class>/*.jpg"),
    size=192,
    clients=5,
    fraction=0.1,
    # Section 4.1 of the paper and its released code (192 x 192, flip); tau is chosen per data set.
    protocol={
        "model": "resnet10", "rounds": 200, "epochs": 10, "batch_size": 16, "lr": 0.001, "augment": "flip", "tau": 0.4,
    },
)  # fmt: skip
PACS = _make_dataset(
    "pacs",
    "seven classes of objects in photographs, paintings, cartoons and sketches; the protocol of MarsFL",
    # As the split files that come with PACS divide it: "train" and "crossval".
    {"photo": (1499, 171), "art_painting": (1840, 208), "cartoon": (2107, 237), "sketch": (3531, 398)},
    parents=("PACS", "pacs", "pacs_data", "PACS/kfold", "PACS/raw_images", "PACS/raw_images/kfold", "pacs/images"),
    home="https://domaingeneralization.github.io/",
    hub="flwrlabs/pacs",
    layout=FolderLayout(
        looks_for="<class>/*.jpg (with <domain>_train_kfold.txt and <domain>_crossval_kfold.txt beside this folder)",
        split_lists=("{}_train_kfold.txt", "{}_crossval_kfold.txt"),
    ),
    size=224,
    clients=1,
    fraction=0.3,
    protocol={"model": "resnet34", **MARSFL},
)
OFFICE_HOME = _make_dataset(
    "office-home",
    "65 classes of objects in art, clip art, product pictures and photographs; the protocol of MarsFL",
    {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
    parents=("OfficeHomeDataset_10072016", "OfficeHome", "office_home", "office-home"),
    home="https://www.hemanthdv.org/officeHomeDataset.html",
    hub="flwrlabs/office-home",
    spellings={"Real World": ("Real World", "Real_World", "RealWorld")},
    size=224,
    clients=1,
    fraction=0.3,
    protocol={"model": "resnet18", **MARSFL},
)
VLCS = _make_dataset(
    "vlcs",
    "five classes of objects in photographs of Caltech-101, LabelMe, PASCAL VOC and SUN; the protocol of MarsFL",
    {"caltech": 1415, "labelme": 2656, "pascal": 3376, "sun": 3282},
    parents=("VLCS", "vlcs"),
    home="https://github.com/facebookresearch/DomainBed (domainbed/scripts/download.py)",
    # In {train,crossval,full,test}/<number>/, `full` is the union of train and crossval.
    layout=FolderLayout(
        VLCS_CLASSES, "<class>/*.jpg or {full,test}/<class>/*.jpg", train_folders=("full", "train"), is_numbered=True
    ),
    spellings={
        "caltech": ("Caltech101", "CALTECH"), "labelme": ("LabelMe", "LABELME"), "pascal": ("VOC2007", "PASCAL"),
        "sun": ("SUN09", "SUN"),
    },
    size=224,
    clients=1,
    fraction=0.3,
    protocol={"model": "resnet34", **MARSFL},
)  # fmt: skip
DOMAINNET = _make_dataset(
    "domainnet",
    "345 classes of objects in clip art, infographics, paintings, doodles, photographs and sketches; the protocol of FedSR, "
    "which starts from ImageNet's weights (weights=FILE)",
    {
        "clipart": (33_525, 14_604), "infograph": (36_023, 15_582), "painting": (50_416, 21_850),
        "quickdraw": (120_750, 51_750), "real": (120_906, 52_041), "sketch": (48_212, 20_916),
    },
    parents=("domainnet", "DomainNet", "domain_net"),
    home="https://ai.bu.edu/M3SDA/",
    hub="wltjr1007/DomainNet",
    layout=FolderLayout(
        looks_for="<class>/*.jpg (with <domain>_train.txt and <domain>_test.txt beside this folder)",
        split_lists=("{}_train.txt", "{}_test.txt"),
    ),
    size=224,
    clients=1,
    # Nguyen et al. 2022, README of the released code: 5,000 steps, five a round.
    protocol={
        "model": "torchvision:resnet50", "rounds": 1000, "steps": 5, "batch_size": 64, "lr": 0.01, "weight_decay": 5e-4,
        "augment": "flip",
    },
)  # fmt: skip
DOMAINNET_10 = replace(
    DOMAINNET,
    name="domainnet-10",
    about="ten classes of DomainNet; the protocol of FedBN: a client a domain, 105 images each",
    domains=tuple(replace(spec, train=0, test=0) for spec in DOMAINNET.domains),
    size=256,
    samples=105,  # a twentieth of the smallest domain
    classes=DOMAINNET_TEN,
    # Li et al. 2021, `federated/fed_domainnet.py` of the released code; its network is an AlexNet with batch normalisation.
    protocol={
        "model": "resnet10", "rounds": 300, "epochs": 1, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0,
        "augment": "flip",
    },
)  # fmt: skip
_TERRA_FOLDERS = _make_dataset(
    "terra-incognita",
    "ten classes of animals at four camera traps; the protocol of FedDG-GA, which starts from ImageNet's weights "
    "(weights=FILE)",
    dict.fromkeys(("location_100", "location_38", "location_43", "location_46"), 0),
    parents=("terra_incognita", "TerraIncognita", "terra-incognita"),
    home="https://lila.science/datasets/caltech-camera-traps (the ECCV 2018 subset)",
    layout=FolderLayout(TERRA_CLASSES, "<class>/*.jpg"),
    size=224,
    clients=1,
    # Zhang et al. 2023, README and `algorithms/` of the released code; its rate falls to a tenth after 80 % of the epochs.
    protocol={
        "model": "torchvision:resnet18", "rounds": 40, "epochs": 5, "batch_size": 16, "lr": 0.001, "weight_decay": 5e-4,
        "augment": "flip",
    },
)  # fmt: skip
TERRA_INCOGNITA = replace(
    _TERRA_FOLDERS,
    domains=tuple(
        replace(
            spec,
            layouts=(
                *spec.layouts,
                CameraTrapLayout(
                    spec.name.removeprefix("location_"),
                    TERRA_CLASSES,
                    images="eccv_18_all_images_sm",
                    annotations=("eccv_18_annotation_files/*_annotations.json", "caltech_images_*.json"),
                ),
            ),
        )
        for spec in _TERRA_FOLDERS.domains
    ),
)
