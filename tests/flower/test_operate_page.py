"""The operator's page: its commands work, and what it names exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from flwr.cli.constant import DEFAULT_FLOWER_CONFIG_TOML
from flwr.cli.flower_config import read_superlink_connection
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as make_link_parser
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as make_node_parser

from fedheal.runs import folder as files
from fedheal.runs.schema import RoundRecord

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
DEPLOY = ROOT / "examples" / "flower" / "deploy"


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_the_commands_make_a_certificate_that_sites_accept(tmp_path):
    commands = next(block for block in PAGE.split("```") if "openssl" in block)
    check = "openssl verify -CAfile ca.crt -verify_hostname fl.example.org server.pem"
    done = subprocess.run(
        ["bash", "-e"], input=f"{commands}\n{check}", text=True, cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "server.pem: OK"
    assert (tmp_path / "ca.key").stat().st_mode & 0o077 == 0


def test_files_and_settings_on_the_page_exist():
    for name in re.findall(r"deploy/([\w.]+)", PAGE):
        assert (DEPLOY / name).is_file()
    strategy = (ROOT / "src" / "fedheal" / "flower" / "strategy.py").read_text(encoding="utf-8")
    for setting in ("max_reply_bytes", "max_norm", "wait_seconds", "min_replies", "max_empty_rounds", "budget"):
        assert setting in PAGE
        assert f"{setting}: " in strategy


@pytest.mark.parametrize("page", ["operate.md", "flower.md"])
@pytest.mark.parametrize("exists", [True, False])
def test_flower_finds_both_superlinks_of_the_shown_configuration(page, exists, monkeypatch, tmp_path):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    shown = next(block for block in text.split("```") if "[superlink.deployment]" in block)
    own = shown[shown.index("[superlink.deployment]") :]
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(f"{DEFAULT_FLOWER_CONFIG_TOML}\n{own}" if exists else shown)
    (certificate,) = re.findall(r'root-certificates = "(/.*)"', shown)
    assert read_superlink_connection().address == ":local:"  # what `flwr run . --stream` uses
    assert read_superlink_connection("deployment").root_certificates == certificate


@pytest.mark.parametrize(
    ("weights", "report", "is_empty"),
    [
        ({"a": 1.0}, {"skipped": {}, "missing": []}, False),
        ({"a": 1.0}, {"skipped": {"b": '"unmoved": "weights": {}'}}, False),  # a client's own words
        ({}, {"skipped": {"a": "NaN"}}, True),
        ({"a": 1.0}, {"unmoved": "overflow"}, True),
        ({"a": 1.0}, {"ended": "only 1 of 2 nodes"}, True),
    ],
)
def test_the_shown_command_finds_an_empty_last_round(weights, report, is_empty, tmp_path):
    (command,) = (line for line in PAGE.splitlines() if line.startswith("tail "))
    (tmp_path / "hospitals").mkdir()
    for number, record in enumerate(((weights, report), ({"a": 1.0}, {}), ({}, {}), (weights, report)), 1):
        files.append_round(tmp_path / "hospitals", RoundRecord(round=number, weights=record[0], report=record[1]))
    done = subprocess.run(["bash"], input=command, text=True, cwd=tmp_path, capture_output=True, check=True)
    assert (done.stdout == "the last round moved the model\n") is not is_empty


def test_telemetry_is_off_and_only_the_fleet_api_is_open_in_the_examples():
    unit, compose = ((DEPLOY / name).read_text(encoding="utf-8") for name in ("supernode.service", "compose.yaml"))
    proxy = (DEPLOY / "fleet.conf").read_text(encoding="utf-8")
    for variable in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"):
        assert variable in unit
        assert variable in compose
    assert re.findall(r"location (\S+)", proxy) == ["/v1/fleet/", "/"]
    assert re.search(r"location / \{\s+return 403;", proxy)
    assert '"127.0.0.1:8001:8000"' in compose  # the SuperLink itself


def test_the_unit_finds_flowers_other_programs():
    """A SuperNode starts `flower-superexec` by name, and hangs if it is not on the PATH."""
    unit = (DEPLOY / "supernode.service").read_text(encoding="utf-8")
    program = re.search(r"^ExecStart=(\S+)/flower-supernode ", unit, re.MULTILINE)
    path = re.search(r"^Environment=PATH=(\S+)$", unit, re.MULTILINE)
    assert program is not None
    assert path is not None
    assert program[1] in path[1].split(":")


def test_the_proxy_lets_flowers_pieces_through():
    limit = re.search(r"client_max_body_size (\d+)m;", (DEPLOY / "fleet.conf").read_text(encoding="utf-8"))
    assert limit is not None
    assert FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE == 5 * 2**20  # what the page says
    assert int(limit[1]) * 2**20 > 2 * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE


def test_the_commands_have_the_options_of_flowers_programs():
    texts = {"page": PAGE, **{path.name: path.read_text(encoding="utf-8") for path in DEPLOY.iterdir()}}
    used = {name: set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) for name, text in texts.items()}
    parsers = make_link_parser(), make_node_parser()
    link, node = ({option for action in parser._actions for option in action.option_strings} for parser in parsers)
    assert len(used["compose.yaml"]) >= 8
    assert used["compose.yaml"] <= link
    assert used["page"] >= used["compose.yaml"]
    assert {"--superlink", "--root-certificates", "--auth-supernode-private-key"} <= used["supernode.service"] & node
