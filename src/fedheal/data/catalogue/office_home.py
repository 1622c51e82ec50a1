"""Office-Home (Venkateswara et al. 2017): art, clip art, product pictures and photographs."""

from __future__ import annotations

from fedheal.data.specs import DEFAULT_PROTOCOL, DatasetSpec, make_folder_domain, split_eight_to_two

OFFICE_HOME = DatasetSpec(
    name="office-home",
    about="65 kinds of things as art, clip art, product pictures and photographs",
    domains=tuple(
        make_folder_domain(
            name,
            split_eight_to_two(images),
            parents=("OfficeHomeDataset_10072016", "OfficeHome", "office_home", "office-home"),
            home="https://www.hemanthdv.org/officeHomeDataset.html",
            hub="flwrlabs/office-home",
        )
        for name, images in (("Art", 2427), ("Clipart", 4365), ("Product", 4439), ("Real World", 4357))
    ),
    size=64,
    clients=5,
    fraction=0.1,
    protocol=DEFAULT_PROTOCOL,
)
