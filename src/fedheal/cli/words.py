"""Words of a command: which are files, which are fields, and which are neither."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# A value for each field that beginners set, since reading all fields would import PyTorch.
EXAMPLES = {
    "method": "fedheal", "data": "digits", "model": "resnet10", "rounds": "10", "seed": "1", "epochs": "1", "lr": "0.01",
    "batch_size": "32", "participation": "0.5", "dropout": "0.1", "clients_per_domain": "5", "device": "cpu", "tau": "0.4",
    "beta": "0.4",
}  # fmt: skip


def is_file(word: str) -> bool:
    """Return whether a word is a file: `name=x.toml` is a field, `runs/compare-embedded-lr=0.1/experiment.toml` a file."""
    key, equals, _ = word.partition("=")
    return not equals or (word.endswith(".toml") and not key.isidentifier())


def check_files(files: Sequence[str], words: Sequence[str]) -> None:
    """Raise ValueError unless the words are fields and at most one experiment file."""
    if "=" in words:
        raise ValueError(f"'{' '.join(words)}' has spaces around '=': write key=value without them")
    for file in files:
        if Path(file).is_dir():
            raise ValueError(f"{file} is a folder: name an experiment file, such as {Path(file, 'experiment.toml')}")
        if not file.endswith(".toml") and not Path(file).exists():
            example = f"{file}={EXAMPLES[file]}" if file in EXAMPLES else f"method={file}"
            raise ValueError(f"'{file}' is neither a field (key=value, such as {example}) nor a file (FILE.toml)")
    if len(files) > 1:
        raise ValueError(f"{', '.join(files)}: a run takes one experiment file, not {len(files)}; leave the others out")


def is_override(word: str) -> bool:
    """Return whether a word is a field, with = and no earlier `:`; `fedprox:mu=0.1` is a method."""
    before, equals, _ = word.partition("=")
    return bool(equals) and ":" not in before


def check_jobs_option(jobs: int) -> int:
    """Return the number of runs at a time. Raise ValueError if it is negative."""
    if jobs < 0:
        raise ValueError(f"jobs = {jobs}: use 0 for as many as this machine takes, or a number of runs at a time")
    return jobs
