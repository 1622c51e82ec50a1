"""Check the locked dependencies for known vulnerabilities and list their licences.

This writes docs/dependencies.md from constraints.txt, from the metadata of the installed packages, and from a clone of the
Python Packaging Advisory Database. The page states the date of the database, because later advisories are not in it.

    python tools/audit.py path/to/advisory-database
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
# Licences that require more than a notice from those who redistribute.
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EPL|EUPL)|Mozilla Public|GNU", re.IGNORECASE)
MAX_NAME = 60  # some packages put the whole text of their licence into its field


@dataclass(frozen=True)
class Advisory:
    """A published vulnerability that affects a locked version."""

    package: str
    version: str
    identifier: str
    fixed: str  # the first version without it, or ""


def read_constraints(path: Path) -> dict[str, str]:
    """Return the locked versions by canonical name."""
    pins = re.findall(r"^([\w.\-]+)==([^\s;]+)", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def is_affected(version: str, affected: dict[str, Any]) -> bool:
    """Return whether the `affected` entry of an OSV record includes a version."""
    if version in affected.get("versions", ()):
        return True
    own = Version(version)
    for span in affected.get("ranges", ()):
        if span["type"] != "ECOSYSTEM":  # a range of Git commits says nothing about a version
            continue
        inside = False
        for kind, number in _sort_events(span["events"]):
            if kind == "introduced" and own >= number:
                inside = True
            elif (kind == "fixed" and own >= number) or (kind == "last_affected" and own > number):
                inside = False
        if inside:
            return True
    return False


def find_fix(version: str, affected: dict[str, Any]) -> str:
    """Return the first fixed version above one, or ""."""
    events = [event for span in affected.get("ranges", ()) if span["type"] == "ECOSYSTEM" for event in span["events"]]
    fixed = [number for kind, number in _sort_events(events) if kind == "fixed" and number > Version(version)]
    return str(fixed[0]) if fixed else ""


def _sort_events(events: list[dict[str, str]]) -> list[tuple[str, Version]]:
    pairs = [(kind, Version(number)) for event in events for kind, number in event.items() if kind != "limit"]
    return sorted(pairs, key=lambda pair: pair[1])


def find_advisories(locked: dict[str, str], database: Path) -> list[Advisory]:
    """Return the advisories of the database that affect a locked version."""
    if not (database / "vulns").is_dir():
        raise ValueError(
            f"{database} has no folder 'vulns': clone the Python Packaging Advisory Database and name its folder"
        )
    advisories = []
    for package, version in locked.items():
        for path in sorted((database / "vulns" / package).glob("*.yaml")):
            record = yaml.safe_load(path.read_text())
            entries = [] if "withdrawn" in record else record["affected"]
            matches = [entry for entry in entries if is_affected(version, entry)]
            if matches:
                advisories.append(Advisory(package, version, record["id"], find_fix(version, matches[0])))
    return advisories


def read_licence(package: str) -> str:
    """Return the licence in a package's metadata, or "not stated"."""
    fields = metadata.metadata(package)
    expression = fields.get("License-Expression") or ""
    classifiers = [c.rpartition(" :: ")[2] for c in fields.get_all("Classifier") or () if c.startswith("License")]
    text = (fields.get("License") or "").strip()
    name = expression or " and ".join(c for c in classifiers if c != "OSI Approved")
    return name or (text if 0 < len(text) <= MAX_NAME and "\n" not in text else "not stated")


def list_licences(locked: dict[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the packages by licence, and those that are locked but not installed here."""
    by_licence, missing = defaultdict(list), []
    for package in locked:
        try:
            by_licence[read_licence(package)].append(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    return dict(sorted(by_licence.items(), key=lambda item: (-len(item[1]), item[0]))), missing


def write_page(locked: dict[str, str], advisories: list[Advisory], database_date: str) -> str:
    """Return docs/dependencies.md."""
    by_licence, missing = list_licences(locked)
    copyleft = [name for licence, names in by_licence.items() if COPYLEFT.search(licence) for name in names]
    unstated = by_licence.get("not stated", [])
    lines = [
        "# Dependencies",
        "",
        "This page lists the packages that fedheal was tested with: their known vulnerabilities and their licences.",
        "`make audit` writes it.",
        "",
        f"- Packages: the {len(locked)} versions in `constraints.txt`, optional extras and development tools included.",
        f"- Advisories: the Python Packaging Advisory Database of {database_date}. Later advisories are not in it.",
        "  For today's state clone it anew and run `make audit`, or run `pip-audit -r constraints.txt`.",
        "- Licences: what each package states in its metadata. Nobody has read the texts for you.",
        "",
        "## Known vulnerabilities",
        "",
    ]
    if advisories:
        lines += ["| package | version | advisory | fixed in |", "|---|---|---|---|"]
        lines += [f"| {a.package} | {a.version} | {a.identifier} | {a.fixed or 'no version yet'} |" for a in advisories]
    else:
        lines.append(f"The database ends on {database_date}. Up to then no advisory affects a locked version.")
        lines.append("Later ones were not checked.")
    lines += ["", "## Licences", ""]
    if copyleft:
        lines.append(f"Copyleft licences: {', '.join(sorted(copyleft))}.")
    if unstated:
        lines.append(f"Packages that state no licence in a form that can be read here: {', '.join(sorted(unstated))}.")
    if missing:
        lines.append(f"Not installed on the machine that wrote this page: {', '.join(sorted(missing))}.")
    lines += ["", "| licence | packages |", "|---|---|"]
    lines += [f"| {licence} | {', '.join(sorted(names))} |" for licence, names in by_licence.items()]
    return "\n".join(lines) + "\n"


def read_date(database: Path) -> str:
    """Return the day of the clone's newest commit."""
    command = ["git", "-C", str(database), "log", "-1", "--format=%cs"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(words: list[str] | None = None) -> int:
    """Write the page; return 1 if an advisory affects a locked version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, help="a clone of the Python Packaging Advisory Database")
    options = parser.parse_args(words)
    locked = read_constraints(ROOT / "constraints.txt")
    try:
        advisories = find_advisories(locked, options.database)
        date = read_date(options.database)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    PAGE.write_text(write_page(locked, advisories, date))
    for advisory in advisories:
        print(
            f"{advisory.package} {advisory.version}: {advisory.identifier}, fixed in {advisory.fixed or 'no version yet'}"
        )
    print(f"{len(locked)} packages, {len(advisories)} advisories (database of {date}): {PAGE.relative_to(ROOT)}")
    return 1 if advisories else 0


if __name__ == "__main__":
    sys.exit(main())
