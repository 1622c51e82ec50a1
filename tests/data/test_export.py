"""An export runs the same experiments with the same bytes where the data are not, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedheal
import layouts
from command_line import assert_sentence
from fedheal import data
from fedheal.cli import app
from fedheal.data.archive import read_export
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import Experiment

SMALL = ["samples_per_client=3", "clients_per_domain=2"]
KEYS = {
    "samples_per_client": 3,
    "clients_per_domain": 2,
    "rounds": 1,
    "epochs": 1,
    "model": "tiny_data:wide",
    "device": "cpu",
}


@pytest.fixture(scope="module")
def export_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny Digits in `data`, and an export of them in `away`."""
    folder = tmp_path_factory.mktemp("exported")
    layouts.digits(folder / "data")
    out = folder / "away" / "digits.export"
    words = [
        "data",
        "export",
        "digits",
        "--data-root",
        str(folder / "data"),
        "--seeds",
        "0-1",
        "--out",
        str(out),
        *SMALL,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHEAL_CACHE", str(folder / "cache"))
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "for the seeds 0, 1" in result.output
    return folder


@pytest.fixture
def digits(export_folder: Path, tmp_path: Path) -> Path:
    for name in ("data", "away"):
        shutil.copytree(export_folder / name, tmp_path / name)
    return tmp_path / "away" / "digits.export"


def load_client_images(root: Path, seed: int, **keys: object) -> dict[str, torch.Tensor]:
    experiment = Experiment(**KEYS | {"data": "digits", "data_root": str(root), "seed": seed} | keys)
    domains = load_domains(experiment)
    return {c.id: domains[c.domain].select(c.indices).images for c in partition_clients(experiment, domains)}


@pytest.mark.parametrize("seed", [0, 1])
def test_clients_hold_the_same_bytes(digits: Path, tmp_path: Path, seed: int) -> None:
    here, there = load_client_images(tmp_path / "data", seed), load_client_images(digits, seed)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[client], there[client]) for client in here)


def test_test_sets_labels_fingerprint_and_notes_are_the_same(digits: Path, tmp_path: Path) -> None:
    here, there = (data.load_dataset("digits", data.DataRequest(str(root))) for root in (tmp_path / "data", digits))
    assert here.identity == there.identity
    assert here.notes == there.notes
    assert here.classes == there.classes
    assert here.samples_per_client == there.samples_per_client
    for domain, other in zip(here.domains, there.domains, strict=True):
        assert (domain.name, domain.nominal) == (other.name, other.nominal)
        assert torch.equal(domain.test.images, other.test.images)
        assert torch.equal(domain.test.labels, other.test.labels)
        assert torch.equal(domain.labels, other.labels)
        assert len(other.train) < len(domain.train)


@pytest.mark.slow
def test_a_run_there_is_the_run_here(digits: Path, tmp_path: Path) -> None:
    """The second run finds the export by its folder."""
    first, second = (
        fedheal.run(Experiment(**KEYS, data="digits", data_root=str(root)), progress=False)
        for root in (tmp_path / "data", digits.parent)
    )
    assert first.summary["used_fingerprint"] == second.summary["used_fingerprint"]
    assert first.summary["data_fingerprint"] == second.summary["data_fingerprint"]
    assert first.domains == second.domains
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.slow
def test_it_needs_no_library_of_the_extras(digits: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('pyarrow', 'huggingface_hub', 'matplotlib', 'torchvision'): sys.modules[name] = None\n"
        "from fedheal import data\n"
        f"print(data.load_dataset('digits', data.DataRequest({str(digits)!r})).identity)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == data.load_dataset("digits", data.DataRequest(str(digits))).identity, done.stderr


@pytest.mark.parametrize("keys", [{"seed": 2}, {"samples_per_client": 5}, {"dirichlet": 0.1}])
def test_what_it_was_not_made_for_is_refused(digits: Path, keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="images that the exported file does not contain"):
        load_client_images(digits, **{"seed": 0} | keys)


def test_skewed_clients_can_be_exported_since_all_labels_are_there(tmp_path: Path, call) -> None:
    root, out = layouts.digits(tmp_path / "data"), tmp_path / "skewed.export"
    call("data", "export", "digits", "--data-root", root, "--seeds", "1", "--out", out, *SMALL, "dirichlet=0.1")
    here, there = (load_client_images(place, 0, dirichlet=0.1) for place in (root, out))
    assert all(torch.equal(here[client], there[client]) for client in here)


def test_image_files_go_in_byte_for_byte(tmp_path: Path, call) -> None:
    root, out = layouts.office_caltech(tmp_path / "data", ("dslr",)), tmp_path / "office.export"
    done = call("data", "export", "office-caltech", "--data-root", root, "--allow-missing", "--out", out, *SMALL)
    assert done.code == 0, done.err
    originals = {path.read_bytes() for path in root.rglob("*.jpg")}
    with zipfile.ZipFile(out) as file:
        packed = [file.read(name) for name in file.namelist() if name.endswith(".jpg")]
    assert 14 < len(packed) < 70
    assert set(packed) <= originals
    with pytest.raises(ValueError, match=r"lacks the domains caltech, amazon, webcam.*allow_missing=true"):
        data.load_dataset("office-caltech", data.DataRequest(str(out)))
    assert (
        data.load_dataset("office-caltech", data.DataRequest(str(out), allow_missing=True))
        .notes[0]
        .startswith("caltech is not")
    )


def test_unreadable_images_stay_behind(tmp_path: Path, call) -> None:
    root, out = layouts.office_caltech(tmp_path / "data", ("dslr",)), tmp_path / "office.export"
    (root / "office_caltech_10" / "dslr" / "bike" / "0000.jpg").write_bytes(b"no")
    (root / "office_caltech_10" / "dslr" / "bike" / "0001.jpg").write_bytes(b"no")  # for testing
    done = call("data", "export", "office-caltech", "--data-root", root, "--allow-missing", "--out", out, *SMALL)
    assert done.code == 0, done.err
    here, there = (
        data.load_dataset("office-caltech", data.DataRequest(str(place), allow_missing=True)) for place in (root, out)
    )
    assert here.identity == there.identity
    assert torch.equal(here["dslr"].test.images, there["dslr"].test.images)
    positions = there["dslr"].excerpt.positions
    assert torch.equal(here["dslr"].train.images[positions], there["dslr"].train.images)


def test_the_same_images_give_the_same_file(tmp_path: Path, call) -> None:
    layouts.digits(tmp_path / "data")
    outs = [tmp_path / name for name in ("a.export", "b.export")]
    for out in outs:
        call("data", "export", "digits", "--data-root", tmp_path / "data", "--seeds", "1", "--out", out, *SMALL)
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_another_size_there_is_possible_and_has_its_own_fingerprint(digits: Path) -> None:
    dataset = data.load_dataset("digits", data.DataRequest(str(digits), size=16))
    assert dataset["svhn"].train.images.shape[-1] == 16
    assert dataset.identity != data.load_dataset("digits", data.DataRequest(str(digits))).identity
    assert not any("decode to other bytes" in note for note in dataset.notes)


def edit_manifest(path: Path, **keys: object) -> None:
    """Change values in an archive's manifest."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members["manifest.json"]) | keys
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (members | {"manifest.json": json.dumps(manifest).encode()}).items():
            file.writestr(name, content)


def test_images_that_decode_otherwise_are_not_passed_off_as_the_same(digits: Path) -> None:
    edit_manifest(digits, fingerprint="0" * 64)
    dataset = data.load_dataset("digits", data.DataRequest(str(digits)))
    assert dataset.identity != json.loads(zipfile.ZipFile(digits).read("manifest.json"))["identity"]
    assert "decode to other bytes on this machine" in dataset.notes[-1]


def test_an_export_of_another_set_and_several_of_one(digits: Path) -> None:
    with pytest.raises(ValueError, match="an export of 'digits', not of 'pacs'"):
        data.load_dataset("pacs", data.DataRequest(str(digits)))
    (digits.parent / "more.export").write_bytes(digits.read_bytes())
    with pytest.raises(ValueError, match=r"several exports of 'digits'.*digits\.export, more\.export"):
        data.load_dataset("digits", data.DataRequest(str(digits.parent)))


def test_the_files_themselves_are_preferred_unless_they_are_fewer(digits: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "digits.export").write_bytes(digits.read_bytes())
    assert data.load_dataset("digits", data.DataRequest(str(root)))["mnist"].excerpt is None
    shutil.rmtree(root / "digits" / "svhn")
    assert data.load_dataset("digits", data.DataRequest(str(root)))["mnist"].excerpt is not None


def test_check_of_an_export_says_what_it_lacks(digits: Path, tmp_path: Path, call) -> None:
    whole = call("data", "check", "--data-root", digits)  # of which data set it says itself
    assert whole.code == 0, whole
    assert "digits: an export" in whole.out
    root, out = layouts.office_caltech(tmp_path / "office", ("dslr",)), tmp_path / "office.export"
    call("data", "export", "office-caltech", "--data-root", root, "--allow-missing", "--out", out, *SMALL)
    for words in (("office-caltech", "--data-root", out), ("--data-root", out)):
        some = call("data", "check", *words)
        assert some.code == 1, some
        assert f"webcam: missing in {out}" in some.out


def test_a_file_that_is_no_export_is_passed_over(digits: Path, tmp_path: Path, call, caplog) -> None:
    (digits.parent / "a.export").write_bytes(b"junk")
    assert data.load_dataset("digits", data.DataRequest(str(digits.parent)))["mnist"].excerpt is not None
    root = layouts.office_caltech(tmp_path / "office", ("dslr",))
    (root / "b.export").write_bytes(b"junk")
    assert len(data.load_dataset("office-caltech", data.DataRequest(str(root), allow_missing=True)).domains) == 1
    done = call("data", "check", "--data-root", root)
    assert done.code == 1, done
    messages = [record.getMessage() for record in caplog.records if ": ignored" in record.getMessage()]
    assert len(messages) == 2  # once for each of them
    assert "b.export is not an export, or is damaged" in messages[1]


def test_an_export_cannot_be_exported(digits: Path, call) -> None:
    done = call("data", "export", "digits", "--data-root", digits, "--seeds", "1", "--out", "again.export", *SMALL)
    assert (done.code, "is already an export" in done.err) == (2, True)


@pytest.mark.parametrize(
    "manifest",
    [
        {"format": "fedheal-export-99"}, {"name": 3}, {"domains": 3}, {"domains": [{}]}, {"domains": [{"name": "mnist"}]},
        {"classes": []}, {"classes": ["0"]},
    ],
    ids=str,
)  # fmt: skip
def test_manifests_that_are_wrong(digits: Path, cache_folder: Path, manifest: dict[str, object]) -> None:
    edit_manifest(digits, **manifest)
    with pytest.raises(ValueError, match=r"digits\.export"):
        data.load_dataset("digits", data.DataRequest(str(digits)))
    assert list(cache_folder.rglob("*")) == []


@pytest.fixture
def pets(tmp_path: Path, call) -> tuple[Path, Path]:
    """A user's image folders, and an export of them."""
    for number, name in enumerate(("photos", "sketches")):
        layouts.image_folders(tmp_path / "pets" / name, {"cat": 15, "dog": 15}, number)
    done = call("data", "export", "folder:pets", "--seeds", "1", *SMALL)
    assert done.code == 0, done.err
    return tmp_path / "pets", tmp_path / "pets.export"


@pytest.mark.slow
def test_an_export_of_own_folders_runs_the_same_there(pets: tuple[Path, Path], call) -> None:
    first, second = (fedheal.run(Experiment(**KEYS, data=f"folder:{path}"), progress=False) for path in pets)
    assert first.summary["used_fingerprint"] == second.summary["used_fingerprint"]
    assert first.summary["data_fingerprint"] == second.summary["data_fingerprint"]
    assert first.domains == second.domains
    with pytest.raises(ValueError, match="images that the exported file does not contain"):
        fedheal.run(Experiment(**KEYS | {"seed": 7}, data=f"folder:{pets[1]}"), progress=False)
    done = call("data", "check", f"folder:{pets[1]}")
    assert (done.code, "an export" in done.out, "photos, sketches" in done.out) == (0, True, True)


def test_an_export_never_replaces_one_of_other_data(pets: tuple[Path, Path], tmp_path: Path, call) -> None:
    other = tmp_path / "others" / "pets"
    for number, name in enumerate(("photos", "sketches"), 2):
        layouts.image_folders(other / name, {"cat": 15, "dog": 15}, number)
    before = pets[1].read_bytes()
    refused = call("data", "export", f"folder:{other}", "--seeds", "1", *SMALL)
    assert_sentence(
        refused, "pets.export exists already and is no export of these data: remove it, or name another file"
    )
    assert pets[1].read_bytes() == before
    for word in ("pets", "others/pets"):
        (tmp_path / "notes.txt").write_text("mine")
        done = call("data", "export", f"folder:{word}", "--seeds", "1", "--out", "notes.txt", *SMALL)
        assert_sentence(done, "notes.txt exists already")
    again = call("data", "export", "folder:pets", "--seeds", "2", *SMALL)  # of the same data, for other seeds
    assert (again.code, pets[1].read_bytes() == before) == (0, False), again


def test_own_folders_say_themselves_where_they_lie(pets: tuple[Path, Path], digits: Path, call) -> None:
    done = call("run", f"data=folder:{pets[0]}", f"data_root={pets[1]}", "rounds=1")
    assert (done.code, done.out) == (2, "")
    assert "already names the folder; leave data_root out" in done.err
    done = call("data", "check", f"folder:{digits}")
    assert f"is an export of 'digits': use data=digits data_root={digits}" in done.err


def test_damage_anywhere_is_found_or_harmless(digits: Path, cache_folder: Path) -> None:
    """Loading gives the same images or one error message, and never leaves a partial cache."""
    good = data.load_dataset("digits", data.DataRequest(str(digits)))
    whole, before = digits.read_bytes(), len(list(cache_folder.iterdir()))
    chance = np.random.default_rng(0)
    refused = 0
    for step in range(40):
        broken = bytearray(whole)
        if step % 4:
            broken[int(chance.integers(0, len(whole)))] ^= 1 << int(chance.integers(0, 8))
        else:
            del broken[int(chance.integers(1, len(whole))) :]
        digits.write_bytes(broken)
        try:
            dataset = data.load_dataset("digits", data.DataRequest(str(digits)))
        except ValueError:
            refused += 1
        else:
            before += 1
            assert dataset.identity == good.identity
            assert all(
                torch.equal(a.train.images, b.train.images) for a, b in zip(good.domains, dataset.domains, strict=True)
            )
    assert refused >= 30
    assert len(list(cache_folder.iterdir())) == before


def rewrite_archive(export: Path, changes: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> None:
    """Write an export again with other members."""
    with zipfile.ZipFile(export) as file:
        members = {name: file.read(name) for name in file.namelist()} | changes
    with zipfile.ZipFile(export, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)


def test_an_export_whose_manifest_unpacks_to_too_much(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedheal.data.archive.MAX_MANIFEST", 1000)
    with pytest.raises(ValueError, match=r"manifest.json has .* bytes, more than 1,000"):
        read_export(digits)


def test_an_export_that_unpacks_to_more_than_it_states(digits: Path) -> None:
    rewrite_archive(digits, {"0/whole": bytes(1 << 26)})
    digits.write_bytes(digits.read_bytes().replace((1 << 26).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="is damaged"):
            read_export(digits)
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


def test_an_export_with_more_pixels_than_fit(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedheal.data.archive.MAX_ARRAY", 1000)
    with pytest.raises(ValueError, match=r"0/train: .* images of shape"):
        read_export(digits)


def test_an_export_with_another_compression_is_refused(digits: Path) -> None:
    """The unpacked size of bzip2 and LZMA cannot be bounded."""
    rewrite_archive(digits, {}, zipfile.ZIP_BZIP2)
    with pytest.raises(ValueError, match="or an unknown compression"):
        read_export(digits)


def test_an_error_does_not_quote_pages_of_a_damaged_archive(digits: Path) -> None:
    rewrite_archive(digits, {"0/whole": bytes(9)})
    with zipfile.ZipFile(digits) as file:
        length = file.getinfo("0/whole").header_offset + 26  # of the member's name, before it
    whole = bytearray(digits.read_bytes())
    whole[length : length + 2] = b"\xff\x7f"
    digits.write_bytes(whole)
    with pytest.raises(
        ValueError, match=r"is damaged \(0/whole of .* cannot be read \(File name in directory"
    ) as error:
        read_export(digits)
    assert len(str(error.value)) < 1000
