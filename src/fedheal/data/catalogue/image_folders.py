"""Data sets of image folders: Office-Caltech-10, the second of the paper's two, and three that are not in the paper.

Office-Caltech-10: Gong et al. 2012, from Office-31 (Saenko et al. 2010) and Caltech-256 (Griffin et al. 2007). PACS: Li et al.
2017. Office-Home: Venkateswara et al. 2017. DomainNet: Peng et al. 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from fedheal.data.specs import DatasetSpec, DomainSpec, FolderLayout, HubDataset
from fedheal.data.splits import find_training_images

OFFICE_CALTECH_CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug", "projector",
)  # fmt: skip
ANY_CLASSES = FolderLayout()
# Settings chosen so that one GPU needs an afternoon.
PROTOCOL = {"model": "resnet10", "rounds": 100, "epochs": 5, "batch_size": 32, "lr": 0.01, "augment": "crop-flip"}


def _make_dataset(
    name: str,
    about: str,
    images: Mapping[str, int | tuple[int, int]],  # of each domain, or its training and its test images
    parents: tuple[str, ...],
    home: str,
    hub: str = "",
    layout: FolderLayout = ANY_CLASSES,
    size: int = 64,
    fraction: float = 0.1,
    protocol: Mapping[str, Any] = PROTOCOL,
) -> DatasetSpec:
    """Specify domains `<parent>/<domain>/<class>/...`, which the hub may have in one table."""
    domains = []
    for domain, number in images.items():
        if isinstance(number, int):
            train = int(find_training_images(number).sum())
            number = train, number - train
        folders = tuple(str(PurePath(parent, domain)) for parent in parents)
        table = HubDataset(hub, domain=domain) if hub else None
        domains.append(DomainSpec(domain.lower().replace(" ", "_"), *number, folders, (layout,), home, table))
    return DatasetSpec(name, about, tuple(domains), size, 5, fraction, layout.classes, protocol)


OFFICE_CALTECH = _make_dataset(
    "office-caltech",
    "ten classes of objects in Caltech, Amazon, Webcam and DSLR, the paper's protocol: 5 clients a domain, 10 % each",
    {"caltech": 1123, "amazon": 958, "webcam": 295, "dslr": 157},
    parents=("office_caltech_10", "office-caltech", "OfficeCaltech10", ""),
    home="https://github.com/jindongwang/transferlearning/blob/master/data/dataset.md",
    layout=FolderLayout(OFFICE_CALTECH_CLASSES, "<class>/*.jpg"),
    size=192,
    # Section 4.1 of the paper and its released code (192 x 192, flip); tau is chosen per data set.
    protocol={
        "model": "resnet10", "rounds": 200, "epochs": 10, "batch_size": 16, "lr": 0.001, "augment": "flip", "tau": 0.4,
    },
)  # fmt: skip
PACS = _make_dataset(
    "pacs",
    "seven classes of objects in photographs, paintings, cartoons and sketches",
    {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929},
    parents=("PACS", "pacs", "pacs_data", "PACS/kfold"),
    home="https://domaingeneralization.github.io/",
    hub="flwrlabs/pacs",
)
OFFICE_HOME = _make_dataset(
    "office-home",
    "65 classes of objects in art, clip art, product pictures and photographs",
    {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
    parents=("OfficeHomeDataset_10072016", "OfficeHome", "office_home", "office-home"),
    home="https://www.hemanthdv.org/officeHomeDataset.html",
    hub="flwrlabs/office-home",
)
DOMAINNET = _make_dataset(
    "domainnet",
    "345 classes of objects in clip art, infographics, paintings, doodles, photographs and sketches",
    {
        "clipart": (33_525, 14_604), "infograph": (36_023, 15_582), "painting": (50_416, 21_850),
        "quickdraw": (120_750, 51_750), "real": (120_906, 52_041), "sketch": (48_212, 20_916),
    },
    parents=("domainnet", "DomainNet", "domain_net"),
    home="https://ai.bu.edu/M3SDA/",
    hub="wltjr1007/DomainNet",
    layout=FolderLayout(has_split_lists=True),
    fraction=0.01,
)  # fmt: skip
