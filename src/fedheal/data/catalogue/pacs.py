"""PACS (Li et al. 2017): photographs, art paintings, cartoons and sketches."""

from __future__ import annotations

from fedheal.data.specs import DEFAULT_PROTOCOL, DatasetSpec, make_folder_domain, split_eight_to_two

PACS = DatasetSpec(
    name="pacs",
    about="seven kinds of things as photographs, paintings, cartoons and sketches",
    domains=tuple(
        make_folder_domain(
            name,
            split_eight_to_two(images),
            parents=("PACS", "pacs", "pacs_data", "PACS/kfold"),
            home="https://domaingeneralization.github.io/",
            hub="flwrlabs/pacs",
        )
        for name, images in (("photo", 1670), ("art_painting", 2048), ("cartoon", 2344), ("sketch", 3929))
    ),
    size=64,
    clients=5,
    fraction=0.1,
    protocol=DEFAULT_PROTOCOL,
)
