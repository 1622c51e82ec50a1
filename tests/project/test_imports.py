"""Imports point one way, so that each part can be read, tested and used without those above it."""

from __future__ import annotations

import ast
from pathlib import Path

import fedheal

ROOT = Path(fedheal.__file__).parent

# A part may import the parts on lines before its own, and itself.
ORDER = [
    {"core", "version"},
    {"aggregate", "local", "models", "data", "runs", "analysis"},
    {"methods", "report"},
    {"engine", "federation"},
    {"simulate", "flower", "nvflare"},
    {"campaign", "tracking"},
    {"reproduce"},
    {"cli", "__main__"},
]
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}


def list_imports(path: Path) -> set[str]:
    """Return the parts of fedheal that a file imports."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "fedheal" else [f"fedheal.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("fedheal.")}
    return parts


def test_every_part_has_its_place():
    parts = {
        p.stem if p.is_file() else p.name for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert parts - {"__init__"} <= RANK.keys()


def test_imports_point_one_way():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for other in list_imports(path) - {part} if part != "__init__" else ():
            if RANK.get(other, -1) > RANK[part] or (other not in RANK):
                wrong.append(f"{path.relative_to(ROOT)} imports fedheal.{other}")
    assert wrong == []


def test_importing_fedheal_touches_neither_network_nor_files_nor_slow_libraries(tmp_path):
    import subprocess
    import sys

    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network at import')\n"
        "socket.socket.connect = refuse\n"
        "import fedheal.cli\n"
        "print(fedheal.__version__)\n"
        "slow = ['scipy.optimize', 'scipy.sparse', 'scipy.special', 'scipy.stats', 'sklearn', 'matplotlib']\n"
        "slow += ['flwr', 'nvflare']\n"
        "print([name for name in slow if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [fedheal.__version__, "[]"], done.stderr  # half of a command's start otherwise
    assert list(tmp_path.iterdir()) == []
