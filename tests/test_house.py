"""The shape of the house: three leaves that never import each other, and one root that wires them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = ("knapformer", "models", "data")


def imported(path: Path) -> set[str]:
    """First names of every package that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_imports_no_other_room(leaf: str) -> None:
    others = {*LEAVES, "knapformer_cli", "conf"} - {leaf}
    for path in (ROOT / leaf).rglob("*.py"):
        assert not imported(path) & others, path


def test_the_balancer_needs_torch_and_numpy_alone() -> None:
    import sys

    allowed = {"knapformer", "torch", "numpy", *sys.stdlib_module_names}
    optional = {"flash_attn", "flash_attn_interface"}  # kernels that are looked for by name
    for path in (ROOT / "knapformer").rglob("*.py"):
        assert imported(path) <= allowed | optional, path


def test_nothing_below_the_command_line_imports_hydra() -> None:
    for folder in LEAVES:
        for path in (ROOT / folder).rglob("*.py"):
            assert not imported(path) & {"hydra", "omegaconf", "typer", "wandb"}, path


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for top in (*LEAVES, "knapformer_cli")
        for path in (ROOT / top).rglob("*.py")
    }
    above: dict[str, set[str]] = {}
    for name, path in files.items():
        above[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                above[name] |= ({node.module} | inner) & files.keys() - {name}
    while ground := [name for name, needs in above.items() if not needs & above.keys()]:
        for name in ground:
            del above[name]
    assert not above
