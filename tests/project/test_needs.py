"""Skips name their reason, and turn into failures where all tests must run."""

from __future__ import annotations

import pytest

from needs import needs


def test_a_missing_command_skips_with_the_reason(monkeypatch):
    monkeypatch.delenv("FEDHEAL_TEST_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match="'no-such-command' is not installed"):
        needs("no-such-command")


def test_a_missing_command_fails_where_all_must_run(monkeypatch):
    monkeypatch.setenv("FEDHEAL_TEST_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match="'no-such-command' is not installed"):
        needs("no-such-command")


def test_a_missing_gpu_skips_even_there(monkeypatch):
    monkeypatch.setenv("FEDHEAL_TEST_ALL", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(pytest.skip.Exception):
        needs("gpu")


def test_missing_data_sets_skip_even_there(monkeypatch):
    monkeypatch.setenv("FEDHEAL_TEST_ALL", "1")
    monkeypatch.delenv("FEDHEAL_DATA", raising=False)
    with pytest.raises(pytest.skip.Exception, match="FEDHEAL_DATA"):
        needs("data")


def test_data_sets_that_are_there_do_not_skip(monkeypatch):
    monkeypatch.setenv("FEDHEAL_DATA", "/anywhere")
    needs("data")
