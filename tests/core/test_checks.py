"""Checks of arguments."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPTS = {
    "workers": "import fedheal, tiny_data\nfedheal.run(tiny_data.quick(workers=2))\n",
    "jobs": "import fedheal, tiny_data\nfedheal.compare(['fedavg', 'fedheal'], seeds=1, jobs=2, **tiny_data.QUICK)\n",
}


@pytest.mark.parametrize("field", SCRIPTS)
def test_a_script_that_new_processes_would_run_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPTS[field])
    with pytest.raises(
        ValueError, match=rf'{field} = 2: .* would run mine.py again; put .* under `if __name__ == "__main__":`, or use'
    ):
        runpy.run_path("mine.py", run_name="__main__")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.py", "if __name__ == '__main__':\n    check_main_guard('jobs', 2)\n"),
        ("__main__.py", "check_main_guard('jobs', 2)\n"),  # new processes do not import it
        ("mine.py", "def start():\n    check_main_guard('jobs', 2)\n"),  # called later, as at an interactive prompt
    ],
)
def test_a_script_that_may_start_processes_is_not_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(f"from fedheal.core.checks import check_main_guard\n{text}")
    start = runpy.run_path(str(tmp_path / name), run_name="__main__").get("start")
    if start is not None:
        start()
