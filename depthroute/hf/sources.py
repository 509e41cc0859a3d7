"""Python files as graphs of definitions: what each name of a module refers to, and the text that defines it."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from depthroute.common.errors import FailureError

# What only the tools of this repository read.
_PRAGMA = re.compile(r"\s*# (?:type: ignore(?:\[[^\]]*\])?|noqa(?:: [A-Z0-9, ]+)?|fmt: skip)(?=\s*(?:#|$))")


class Symbol(NamedTuple):
    """A definition at the top of a module."""

    module: str
    name: str


class External(NamedTuple):
    """What comes from another library: `name` of a module, or the module itself."""

    module: str
    name: str | None


Target = Symbol | External


class Source:
    """One file. `own` says which modules are read as sources too; everything else is external."""

    def __init__(self, module: str, own: Collection[str]) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise FailureError(f"the source of {module} is not there; a self-contained modelling file is made from source files.")
        self.module, self._own = module, own
        self.text = Path(spec.origin).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        tree = ast.parse(self.text)
        self.summary = (ast.get_docstring(tree) or "").partition("\n")[0]
        self.definitions: dict[str, ast.stmt] = {}
        self._imports: dict[str, Target] = {}
        self.typing_only: set[str] = set()
        for statement in tree.body:
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self.definitions[statement.name] = statement  # the last of several is the one behind its overloads
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            for name in _stored(statement):
                self.definitions[name] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            self._add_imports(statement)
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            before = set(self._imports)
            for inner in statement.body:
                self._add(inner)
            self.typing_only |= self._imports.keys() - before

    def _add_imports(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                self._imports[alias.asname or alias.name] = External(alias.name, None)
                continue
            if statement.level:
                raise FailureError(f"{self.module} has a relative import; a self-contained modelling file is made from absolute ones.")
            module = statement.module or ""
            if module != "__future__":
                own = module in self._own or module.partition(".")[0] in self._own
                self._imports[alias.asname or alias.name] = Symbol(module, alias.name) if own else External(module, alias.name)

    def target(self, name: str) -> Target | None:
        """What `name` refers to at the top of this module; None for a builtin."""
        return Symbol(self.module, name) if name in self.definitions else self._imports.get(name)

    def names(self, statement: ast.stmt, omitted: Collection[str]) -> list[ast.Name]:
        """The names in a definition that refer to the top of the module, methods called as `omitted` left out."""
        return list(_free(_without(statement, omitted), frozenset()))

    def written(self, statement: ast.stmt, omitted: Collection[str], renamed: Mapping[str, str]) -> str:
        """The text of a definition with the comment above it, some names changed and some methods left out."""
        lines = [line.encode("utf-8") for line in self.lines]  # columns count bytes
        for place in sorted(self._places(statement, omitted, renamed), reverse=True):
            row, column, name = place
            line = lines[row]
            lines[row] = line[:column] + renamed[name].encode() + line[column + len(name.encode()) :]
        drop: set[int] = set()
        if isinstance(statement, ast.ClassDef):
            for part in statement.body:
                if isinstance(part, ast.FunctionDef) and part.name in omitted:
                    drop |= set(range(self._first(part), part.end_lineno or 0))
        rows = range(self._first(statement), statement.end_lineno or 0)
        text = "\n".join(_PRAGMA.sub("", lines[row].decode("utf-8")) for row in rows if row not in drop)
        return re.sub(r"\n{3,}", "\n\n", text).rstrip()

    def _places(self, statement: ast.stmt, omitted: Collection[str], renamed: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
        found = [(node.lineno - 1, node.col_offset, node.id) for node in self.names(statement, omitted)]
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            keyword = "class " if isinstance(statement, ast.ClassDef) else "def "
            found.append((statement.lineno - 1, statement.col_offset + len(keyword), statement.name))
        else:
            found += [(node.lineno - 1, node.col_offset, node.id) for node in ast.walk(statement)
                      if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]  # fmt: skip
        yield from (place for place in found if place[2] in renamed)

    def _first(self, statement: ast.stmt) -> int:
        """The row, from 0, of its first decorator or of the comment right above it."""
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        row = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while row > 0 and self.lines[row - 1].lstrip().startswith("#"):
            row -= 1
        return row


def _without(statement: ast.stmt, omitted: Collection[str]) -> ast.stmt:
    """A class without some methods; anything else as it is."""
    if not isinstance(statement, ast.ClassDef):
        return statement
    body = [part for part in statement.body if not (isinstance(part, ast.FunctionDef) and part.name in omitted)]
    kept = ast.ClassDef(
        name=statement.name, bases=statement.bases, keywords=statement.keywords, body=body, decorator_list=statement.decorator_list
    )
    return ast.copy_location(kept, statement)


def undefined(text: str) -> set[str]:
    """The names that a module uses and does not define."""
    tree = ast.parse(text)
    defined = {*dir(builtins), "__name__"}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            defined.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in statement.names}
        else:
            defined |= _stored(statement)
    return {node.id for statement in tree.body for node in _free(statement, frozenset())} - defined


def _stored(node: ast.AST) -> set[str]:
    """The names that statements bind, functions and classes inside them by their own name only."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            found.add(one.name)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in one.names}
        elif isinstance(one, ast.ExceptHandler) and one.name:
            found.add(one.name)
        if not isinstance(one, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(one))
    return found


def _free(node: ast.AST, bound: frozenset[str]) -> Iterator[ast.Name]:
    """The names read under `node` that no scope between binds."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in bound:
            yield node
    elif isinstance(node, ast.FunctionDef | ast.Lambda):
        given = node.args
        everyone = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        body = node.body if isinstance(node.body, list) else [node.body]
        outside: list[ast.AST | None] = [*given.defaults, *given.kw_defaults, *(one.annotation for one in everyone)]
        if isinstance(node, ast.FunctionDef):
            outside += [*node.decorator_list, node.returns]
        for part in outside:
            if part is not None:
                yield from _free(part, bound)
        inside = bound | {one.arg for one in everyone}.union(*map(_stored, body))
        for part in body:
            yield from _free(part, inside)
    elif isinstance(node, ast.ClassDef):
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            yield from _free(part, bound)
        inside = bound.union(*map(_stored, node.body))
        for part in node.body:  # what a class binds its methods do not see
            yield from _free(part, bound if isinstance(part, ast.FunctionDef) else inside)
    else:
        inner = bound
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inner = bound.union(*(_stored(generator.target) for generator in node.generators))
        for part in ast.iter_child_nodes(node):
            yield from _free(part, inner)
