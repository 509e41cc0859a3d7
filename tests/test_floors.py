"""Imports point down the floors, and heavy libraries are imported where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "depthroute"
FLOORS = (
    "common", "ops", "residual", "model", "data", "parallel", "train", "infer", "hf", "analysis", "convert", "cost", "study", "evals",
    "report", "recipes", "cli",
)  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"rich", "matplotlib", "scipy"}


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """Every module that an import statement under `tree` names, relative ones made absolute, with its line."""
    package = ("depthroute", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def at_start_up(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run when the module is imported: all but the bodies of functions and of `if TYPE_CHECKING`."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def upward(source: str, path: Path) -> list[str]:
    own = path.relative_to(PACKAGE).parts[0]
    if own not in FLOORS:  # __init__.py and __main__.py of the package stand above all floors
        return []
    found = []
    for module, line in imported(ast.parse(source), path):
        parts = module.split(".")
        if parts[0] == "depthroute" and len(parts) > 1 and parts[1] in FLOORS and FLOORS.index(parts[1]) > FLOORS.index(own):
            found.append(f"{path.relative_to(PACKAGE)}:{line} imports {module} from a floor above")
    return found


def heavy(source: str, path: Path) -> list[str]:
    modules = [module for statement in at_start_up(ast.parse(source)) for module, _ in imported(statement, path)]
    return [f"{path.relative_to(PACKAGE)} imports {module} at start-up" for module in modules if module.split(".")[0] in HEAVY]


def test_the_package_is_read() -> None:
    assert {path.relative_to(PACKAGE).parts[0] for path in FILES} - {"__init__.py", "__main__.py"} <= set(FLOORS)
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_point_down_and_heavy_ones_wait(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert upward(source, path) + heavy(source, path) == []


def test_the_check_sees_what_it_should() -> None:
    inside = PACKAGE / "residual" / "some.py"
    assert upward("from depthroute.model import Decoder", inside)
    assert upward("def f():\n    import depthroute.train.loop", inside)
    assert upward("from ..model import Decoder", inside)
    assert upward("from depthroute import model", inside)
    assert not upward("from depthroute.ops import depth_attention\nfrom .schedule import block_ends", inside)
    assert heavy("try:\n    import scipy.stats\nexcept ImportError:\n    pass", inside)
    assert heavy("class A:\n    from rich import print", inside)
    assert not heavy("def f():\n    import matplotlib", inside)
    assert not heavy("if TYPE_CHECKING:\n    from matplotlib.axes import Axes", inside)


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").glob("*.py")), ids=lambda path: path.name)
def test_the_operator_knows_no_modules_and_no_configuration(path: Path) -> None:
    modules = {module for module, _ in imported(ast.parse(path.read_text(encoding="utf-8")), path)}
    assert not [module for module in modules if module.startswith("torch.nn") or "config" in module]
    own = {module.split(".")[1] for module in modules if module.startswith("depthroute.")}
    assert own <= {"ops", "common"}


def test_the_ground_floor_needs_no_torch() -> None:
    for path in (PACKAGE / "common").glob("*.py"):
        modules = {module.split(".")[0] for module, _ in imported(ast.parse(path.read_text(encoding="utf-8")), path)}
        assert "torch" not in modules
