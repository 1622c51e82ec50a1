"""Data sets from disk: located, read once, and given as `Domains`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from fedheal.data import archive, assemble, cache
from fedheal.data.domains import Domain, Domains
from fedheal.data.locate import Place, explained, located, root_of
from fedheal.data.readers.folders import subfolders
from fedheal.data.specs import Description, FolderLayout, Source
from fedheal.data.splits import RawDomain

FOLDER = "folder:"
OWN = "folder"  # what an export of such a folder is called
FOLDER_SIZE = 32
NAMED = 3  # unreadable images, in a note


@dataclass(frozen=True)
class Wanted:
    """How a data set is asked for."""

    root: str | None = None
    allow_missing: bool = False
    classes: str = "intersection"
    size: int | None = None  # instead of the data set's own


def share(fraction: float, whole: int) -> int:
    """So many of so many, rounded down; the fraction is the decimal that was written.

    >>> share(0.01, 73_257), share(0.1, 127), share(0.29, 100)
    (732, 12, 29)
    """
    return int(Fraction(str(fraction)) * whole)


def own_folder(name: str) -> Description:
    """The description of `folder:PATH`: every folder in it is a domain. PATH may also be an export of such a folder."""
    said = name.removeprefix(FOLDER)
    path = Path(said).expanduser()
    if said and path.is_file():
        domains = _exported(name, path)
    elif not said or not path.is_dir():
        raise ValueError(f"data = {name!r}: there is no folder {said!r}")
    else:
        domains = subfolders(path)
    if not domains:
        raise ValueError(f"data = {name!r}: {path} has no folders; <domain>/<class>/... is needed")
    layout = (FolderLayout(),)
    sources = tuple(Source(n, 0, 0, (n,), layout, home="") for n in domains)
    return Description(OWN, "your own image folders", sources, FOLDER_SIZE, clients=5, fraction=0.0)


def _exported(name: str, path: Path) -> list[str]:
    said = archive.manifest(path)
    if said.name != OWN:
        raise ValueError(
            f"data = {name!r}: {path} is an export of '{said.name}': use data={said.name} data_root={path}"
        )
    return [domain.name for domain in said.domains]


@dataclass(frozen=True)
class Opened:
    """A data set as found: where its domains lie (or the export that holds them), and how to read them."""

    description: Description
    recipe: cache.Recipe
    places: tuple[Place, ...]
    packed: Path | None = None


def opened(description: Description, wanted: Wanted) -> Opened:
    """Find a data set on disk; nothing is read yet."""
    root = root_of(wanted.root)
    size = wanted.size or description.size
    places = located(description, root)
    packed = export_of(description, places, root)
    if packed is not None:
        _refuse_lacking(description, packed, wanted)
        recipe = cache.Recipe(description.name, size, "export", {"": [packed]}, lambda: archive.read(packed))
        return Opened(description, recipe, (), packed)
    _refuse_missing(description, places, root, wanted)
    here = [place.found for place in places if place.found]

    def read() -> tuple[tuple[str, ...], Sequence[RawDomain]]:
        raws = [found.read() for found in here]
        classes = assemble.classes_of(raws, description.classes, wanted.classes, description.name)
        return classes, [assemble.aligned(raw, classes) for raw in raws]

    files = {found.name: found.files for found in here}
    return Opened(description, cache.Recipe(description.name, size, wanted.classes, files, read), places)


def export_of(description: Description, places: Sequence[Place], root: Path) -> Path | None:
    """The export to read instead, if there is one with more domains than there are in their own files."""
    here = {place.name for place in places if place.found}
    if len(here) == len(places):
        return None
    packed = archive.found(root, description.name)
    return packed if packed and not {d.name for d in archive.manifest(packed).domains} <= here else None


def load(description: Description, wanted: Wanted) -> Domains:
    """The data set, with notes on what is special about what was found."""
    found = opened(description, wanted)
    return domains_of(found, cache.prepare(found.recipe))


def domains_of(found: Opened, prepared: cache.Prepared) -> Domains:
    description, identity = found.description, prepared.manifest["fingerprint"]
    notes = _notes(found.places, prepared)
    if found.packed is not None:
        identity, notes = archive.provenance(found.packed, found.recipe.size, identity)
    sources = {s.name: s for source in description.sources for s in (source, source.stand_in) if s}
    domains = tuple(replace(d, nominal=_nominal(sources.get(d.name), d)) for d in prepared.domains())
    if found.packed is None:  # an export has its notes with it
        notes += _gaps(domains, prepared.manifest["classes"])
    return Domains(
        description.name,
        tuple(prepared.manifest["classes"]),
        domains,
        (description.clients,) * len(domains),
        tuple(share(description.fraction, d.nominal) for d in domains),
        identity,
        tuple(notes),
    )


def _nominal(source: Source | None, domain: Domain) -> int:
    return source.train if source and source.train else len(domain.labels)


def _refuse_missing(description: Description, places: Sequence[Place], root: Path, wanted: Wanted) -> None:
    missing = [place for place in places if place.found is None]
    if len(missing) == len(places):
        raise ValueError(f"none of '{description.name}' is below {root}: {explained(missing[0], root)}")
    if missing and not wanted.allow_missing:
        raise ValueError(
            f"'{description.name}' lacks {len(missing)} of {len(places)} domains below {root}: "
            f"{'; '.join(explained(place, root) for place in missing)}. allow_missing=true goes on without"
        )


def _refuse_lacking(description: Description, packed: Path, wanted: Wanted) -> None:
    """An export of some domains is no more than that."""
    absent = lacking(description, packed)
    if absent and not wanted.allow_missing:
        raise ValueError(f"{packed} lacks the domains {', '.join(absent)}. allow_missing=true goes on without")


def lacking(description: Description, packed: Path) -> list[str]:
    """The domains of a data set that an export of it does not hold, nor stand-ins for them."""
    here = {domain.name for domain in archive.manifest(packed).domains}
    names = [{source.name, source.stand_in.name if source.stand_in else ""} for source in description.sources]
    return [s.name for s, either in zip(description.sources, names, strict=True) if not either & here]


def _gaps(domains: Sequence[Domain], classes: Sequence[str]) -> list[str]:
    """Classes that a domain cannot teach, or cannot be judged by."""
    notes = []
    for domain in domains:
        for what, labels in (("training", domain.labels), ("test", domain.test.labels)):
            lacking = [name for i, name in enumerate(classes) if not bool((labels == i).any())]
            if lacking:
                more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
                notes.append(f"{domain.name}: no {what} images of {', '.join(lacking[:NAMED])}{more}")
    return notes


def _notes(places: Sequence[Place], prepared: cache.Prepared) -> list[str]:
    notes = []
    counts = {domain["name"]: domain for domain in prepared.manifest["domains"]}
    for place in places:
        whole = place.source
        if place.found is None:
            notes.append(f"{whole.name} is not on disk: results are over {len(counts)} of {len(places)} domains")
            continue
        if place.stand_in:
            notes.append(f"{place.name} stands in for {whole.name}: its results are not results on {whole.name}")
        here = counts[place.name]
        if whole.train and (here["train"] < whole.train or here["test"] < whole.test):
            notes.append(
                f"{place.name}: {here['train']:,} of {whole.train:,} training and {here['test']:,} of {whole.test:,} "
                "test images on disk"
            )
        bad = here["unreadable"]
        if bad:
            more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
            notes.append(f"{place.name}: {len(bad)} image(s) could not be read: {'; '.join(bad[:NAMED])}{more}")
    return notes
