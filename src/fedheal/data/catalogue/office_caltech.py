"""Office-Caltech-10, the second of the paper's two data sets.

Gong et al. 2012, from Office-31 (Saenko et al. 2010) and Caltech-256 (Griffin et al. 2007).
"""

from __future__ import annotations

from fedheal.data.specs import DatasetSpec, DomainSpec, FolderLayout, split_eight_to_two

CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug", "projector",
)  # fmt: skip
PARENTS = ("office_caltech_10/", "office-caltech/", "OfficeCaltech10/", "")
# Section 4.1 of the paper and its released code (192 x 192, flip); tau is chosen per data set.
PROTOCOL = {
    "model": "resnet10", "rounds": 200, "epochs": 10, "batch_size": 16, "lr": 0.001, "augment": "flip", "tau": 0.4,
}  # fmt: skip
OFFICE_CALTECH = DatasetSpec(
    name="office-caltech",
    about="ten kinds of things as Caltech, Amazon, Webcam and DSLR, the paper's protocol: 5 clients a domain, 10 % each",
    domains=tuple(
        DomainSpec(
            name=name,
            train=split_eight_to_two(images)[0],
            test=split_eight_to_two(images)[1],
            folders=tuple(f"{parent}{name}" for parent in PARENTS),
            layouts=(FolderLayout(CLASSES, "<class>/*.jpg"),),
            home="https://github.com/jindongwang/transferlearning/blob/master/data/dataset.md",
        )
        for name, images in (("caltech", 1123), ("amazon", 958), ("webcam", 295), ("dslr", 157))
    ),
    size=192,
    clients=5,
    fraction=0.1,
    classes=CLASSES,
    protocol=PROTOCOL,
)
