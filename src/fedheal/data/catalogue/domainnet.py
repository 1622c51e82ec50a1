"""DomainNet (Peng et al. 2019): clip art, infographics, paintings, doodles, photographs and sketches."""

from __future__ import annotations

from fedheal.data.specs import DEFAULT_PROTOCOL, DatasetSpec, make_folder_domain

SIZES = {  # training and test images
    "clipart": (33_525, 14_604),
    "infograph": (36_023, 15_582),
    "painting": (50_416, 21_850),
    "quickdraw": (120_750, 51_750),
    "real": (120_906, 52_041),
    "sketch": (48_212, 20_916),
}

DOMAINNET = DatasetSpec(
    name="domainnet",
    about="345 kinds of things as clip art, infographics, paintings, doodles, photographs and sketches",
    domains=tuple(
        make_folder_domain(
            name,
            sizes,
            parents=("domainnet", "DomainNet", "domain_net"),
            home="https://ai.bu.edu/M3SDA/",
            hub="wltjr1007/DomainNet",
            has_split_lists=True,
        )
        for name, sizes in SIZES.items()
    ),
    size=64,
    clients=5,
    fraction=0.01,
    protocol=DEFAULT_PROTOCOL,
)
