"""The public images of an experiment, for methods whose clients compare their outputs on images that all of them have.

They have no labels, and no client trains or validates with them. By default they are drawn from the training images
that no client holds. `public` names another data set. Of this set, images that clients hold or are tested on are left
out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedheal import data as datasets
from fedheal.core.rng import generator
from fedheal.data.domains import Domains
from fedheal.data.on_disk import FOLDER_PREFIX, DataRequest
from fedheal.data.partition import Client
from fedheal.simulate.experiment import Experiment


def select_public_images(
    experiment: Experiment, domains: Domains, clients: Sequence[Client], device: torch.device
) -> Tensor | None:
    """Draw the public images by seed; return None if the method needs none, and raise ValueError if there are too few."""
    method = experiment.resolved_method
    most = max((term.public_images for term in method.local), default=0)
    if not most:
        return None
    shape = domains.domains[0].test.images.shape[1:]
    if experiment.public in (None, experiment.data):
        source, places, used = domains, _list_free_places(domains, clients), set[int]()
    else:
        source = _load_public(experiment, shape[-1])
        places, used = _list_free_places(source, ()), _hash_used_images(domains, clients)
    order = torch.randperm(len(places), generator=generator(experiment.get_seed("split"), "public images"))
    images: list[Tensor] = []
    for domain, position in (places[i] for i in order.tolist()):
        if len(images) == most:
            break
        image = source.domains[domain].select(torch.tensor([position])).images[0]
        if image.shape != shape:
            raise ValueError(
                f"a public image of '{source.name}' has the shape {tuple(image.shape)}, but the clients' images have "
                f"{tuple(shape)}: bring them to one size"
            )
        if _hash_image(image) not in used:
            images.append(image)
    if len(images) < 2 and source is not domains:
        count = _count(source)
        raise ValueError(
            f"public = '{experiment.public}': it has {count} training images, and clients hold or are tested on at least "
            f"{count - 1} of them: name other data"
        )
    if len(images) < 2:
        raise ValueError(
            f"method '{method.name}' needs public images, but the clients hold all {_count(source)} training images of "
            f"'{source.name}': use fewer samples_per_client, or give public=DATA, another data set"
        )
    return torch.stack(images).to(device)


def _hash_used_images(domains: Domains, clients: Sequence[Client]) -> set[int]:
    """Return the hashes of all images that clients hold or are tested on: another data set may have the same ones."""
    held = [domains[client.domain].select(client.indices) for client in clients]
    tested = [domain.test for domain in domains.domains]
    return {_hash_image(image) for split in (*held, *tested) for image in split.images}


def _hash_image(image: Tensor) -> int:
    return hash(image.numpy().tobytes())


def _load_public(experiment: Experiment, size: int) -> Domains:
    """Load the data set that `public` names; images on disk are resized to `size`."""
    name = str(experiment.public)
    on_disk = name in datasets.SPECS or name.startswith(FOLDER_PREFIX)
    root = None if name.startswith(FOLDER_PREFIX) else experiment.data_root
    request = DataRequest(root, experiment.allow_missing, experiment.classes, size if on_disk else None)
    try:
        return datasets.load_dataset(name, request)
    except ValueError as error:
        raise ValueError(f"public = '{name}': {error}") from error


def _list_free_places(source: Domains, clients: Sequence[Client]) -> list[tuple[int, int]]:
    """Return domain and position of every training image that no client holds.

    An exported file has the images of clients: it has none to spare for them, but may be public data for others.
    """
    places = []
    for number, domain in enumerate(source.domains):
        is_free = torch.full((len(domain.labels),), domain.excerpt is None)
        if domain.excerpt is not None and not clients:
            is_free[domain.excerpt.positions] = True
        for client in clients:
            if client.domain == domain.name:
                is_free[client.indices] = False
        places += [(number, position) for position in is_free.nonzero().flatten().tolist()]
    return places


def _count(source: Domains) -> int:
    return sum(len(domain.labels) for domain in source.domains)
