"""Names that a newcomer can guess: the rules of docs/design.md that a program can check."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import fedheal

ROOT = Path(fedheal.__file__).parent
LONGEST_FUNCTION = 60
IRREGULAR = re.findall(
    r"\w+",
    "begun bound bought broken brought built chosen done drawn fallen found given gone grown held hidden kept known left lost "
    "made met said sent shown spoken taken thought thrown told understood won worn written",
)
VERBS = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "succeed"}
PRONOUNS = {"beside", "mine", "one", "others", "there", "what", "who"}
# Public names of earlier versions, which stay.
CONTRACT = {"Callback.started", "Callback.finished", "Experiment.of", "Layout.of", "Packed", "Term.evaluated"}


def parse_modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def list_functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function, nested ones too, with its class's name in front."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{owner}{node.name}", node
        inner = f"{node.name}." if isinstance(node, ast.ClassDef) else owner
        yield from list_functions(node, inner)


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith("ed") and word not in VERBS)


def is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in function.decorator_list)


def is_contract(name: str, function: ast.FunctionDef) -> bool:
    """Whether a name is public, or overrides a public hook."""
    hooks = {contract.partition(".")[2] for contract in CONTRACT}
    return name in CONTRACT or ("." in name and function.name in hooks)


def test_functions_are_verb_phrases():
    wrong = []
    for path, tree in parse_modules():
        for name, function in list_functions(tree):
            words = function.name.strip("_").split("_")
            if is_property(function) or function.name.startswith("__") or is_contract(name, function):
                continue
            if is_participle(words[0]) or words[0] in PRONOUNS or (words[-1] == "of" and len(words) <= 2):
                wrong.append(f"{path}:{function.lineno}: {name}")
    assert wrong == []


def test_no_module_is_named_like_what_it_exports_or_like_the_standard_library():
    wrong = []
    for path, tree in parse_modules():
        exported = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if path.stem in exported:
            wrong.append(f"{path} defines {path.stem}")
        if path.stem in sys.stdlib_module_names and not path.stem.startswith("__"):
            wrong.append(f"{path} is named like a module of the standard library")
    assert wrong == []


def test_no_two_public_things_have_one_name():
    where = defaultdict(list)
    for path, tree in parse_modules():
        if path.parts[:2] == ("aggregate", "kernels"):  # twins with one contract
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path))
    commands = {"run", "report", "compare", "sweep", "reproduce", "demo", "check", "show", "prepare", "fetch", "export"}
    doubled = {
        name: paths
        for name, paths in where.items()
        if len(paths) > 1 and not (name in commands and any(path.startswith("cli") for path in paths))
    }
    assert doubled == {}


def test_no_function_is_long():
    lengths = {
        f"{path}:{name}": (function.end_lineno or 0) - function.lineno + 1
        for path, tree in parse_modules()
        for name, function in list_functions(tree)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}
