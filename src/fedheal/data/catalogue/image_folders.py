"""Data sets of image folders that are not in the paper.

PACS: Li et al. 2017. Office-Home: Venkateswara et al. 2017. DomainNet: Peng et al. 2019.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedheal.data.specs import DatasetSpec, DomainSpec, FolderLayout, HubDataset, split_eight_to_two

# Settings chosen so that one GPU needs an afternoon.
PROTOCOL = {"model": "resnet10", "rounds": 100, "epochs": 5, "batch_size": 32, "lr": 0.01, "augment": "crop-flip"}


def _make_dataset(
    name: str,
    about: str,
    sizes: Mapping[str, tuple[int, int]],
    parents: tuple[str, ...],
    home: str,
    hub: str,
    fraction: float = 0.1,
    has_split_lists: bool = False,
) -> DatasetSpec:
    """Specify domains `<parent>/<domain>/<class>/...` that the hub has in one table, by their training and test images."""
    domains = tuple(
        DomainSpec(
            name=domain.lower().replace(" ", "_"),
            train=train,
            test=test,
            folders=tuple(f"{parent}/{domain}" for parent in parents),
            layouts=(FolderLayout(has_split_lists=has_split_lists),),
            home=home,
            hub=HubDataset(hub, domain=domain),
        )
        for domain, (train, test) in sizes.items()
    )
    return DatasetSpec(name, about, domains, size=64, clients=5, fraction=fraction, protocol=PROTOCOL)


PACS_IMAGES = {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}
PACS = _make_dataset(
    "pacs",
    "seven kinds of things as photographs, paintings, cartoons and sketches",
    {name: split_eight_to_two(images) for name, images in PACS_IMAGES.items()},
    parents=("PACS", "pacs", "pacs_data", "PACS/kfold"),
    home="https://domaingeneralization.github.io/",
    hub="flwrlabs/pacs",
)
OFFICE_HOME_IMAGES = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}
OFFICE_HOME = _make_dataset(
    "office-home",
    "65 kinds of things as art, clip art, product pictures and photographs",
    {name: split_eight_to_two(images) for name, images in OFFICE_HOME_IMAGES.items()},
    parents=("OfficeHomeDataset_10072016", "OfficeHome", "office_home", "office-home"),
    home="https://www.hemanthdv.org/officeHomeDataset.html",
    hub="flwrlabs/office-home",
)
DOMAINNET = _make_dataset(
    "domainnet",
    "345 kinds of things as clip art, infographics, paintings, doodles, photographs and sketches",
    {
        "clipart": (33_525, 14_604),
        "infograph": (36_023, 15_582),
        "painting": (50_416, 21_850),
        "quickdraw": (120_750, 51_750),
        "real": (120_906, 52_041),
        "sketch": (48_212, 20_916),
    },
    parents=("domainnet", "DomainNet", "domain_net"),
    home="https://ai.bu.edu/M3SDA/",
    hub="wltjr1007/DomainNet",
    fraction=0.01,
    has_split_lists=True,
)
