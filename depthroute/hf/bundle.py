"""One Python file with all that a model needs: our own definitions, those that are reached, in the order in which they need each other.

It imports torch, transformers and the standard library, so a folder with it loads with `trust_remote_code=True` where depthroute is not
installed. Depth attention is its definition in plain PyTorch there: the same numbers, without the kernels.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from pathlib import Path

from depthroute import __version__
from depthroute.common.errors import FailureError
from depthroute.common.files import write_text
from depthroute.hf.configuration import DepthrouteConfig
from depthroute.hf.sources import External, Source, Symbol, Target, undefined
from depthroute.model import ModelConfig
from depthroute.residual import PreNormConfig, ResidualConfig

MODELLING_FILE = "modeling_depthroute.py"
MODEL = Symbol("depthroute.hf.modelling", "DepthrouteForCausalLM")  # by name: it writes this file when it is saved
AUTO_MAP = {
    "AutoConfig": f"{Path(MODELLING_FILE).stem}.{DepthrouteConfig.__name__}",
    "AutoModelForCausalLM": f"{Path(MODELLING_FILE).stem}.{MODEL.name}",
}
ALLOWED = frozenset({"torch", "transformers", *sys.stdlib_module_names})
COMPILED = {"registry": ("serving",), "operator": ("read",), "held": ("hold",), "thin": ("linear", "linears")}  # in depthroute.ops
STAND_INS = {
    Symbol(f"depthroute.ops.{file}", name): Symbol("depthroute.hf.standins", name) for file, names in COMPILED.items() for name in names
}
# Bodies that are not exported, and documents that share a sequence (`DepthrouteConfig`): their code is not in the file.
STAND_INS |= {Symbol("depthroute.model.sight", name): Symbol("depthroute.hf.standins", name) for name in ("Seen", "attend")}
STAND_INS |= {
    Symbol(f"depthroute.model.{file}", name): Symbol("depthroute.hf.standins", "NotExported")
    for file, name in (("kda", "DeltaAttention"), ("mla", "LatentAttention"), ("experts", "Experts"), ("sight", "packed_documents"))
}
REGISTRY = Symbol("depthroute.residual.protocol", "METHODS")
# Methods of any class that a model does not run: our own losses and diagnostics, and the writing of this very file.
OMITTED = frozenset({
    "decoding", "describe", "logits", "loss", "parameter_counts", "save_pretrained", "source_names", "source_weights", "token_nll",
    "token_nll_and_hits",
})  # fmt: skip


def write_modelling_file(config: ModelConfig, folder: Path) -> None:
    """Write the file for models of `config` into a folder.

    Raises:
        FailureError: the residual method's source is not there, or needs another library.
    """
    write_text(folder / MODELLING_FILE, modelling_source(type(config.residual)))


@lru_cache(maxsize=64)
def modelling_source(residual: type[ResidualConfig]) -> str:
    """The text of the file for models with a residual method. Raises as `write_modelling_file` does."""
    return _Bundle(residual).text()


class _Bundle:
    def __init__(self, residual: type[ResidualConfig]) -> None:
        self._own = frozenset({"depthroute", residual.__module__})
        classes = (PreNormConfig, residual, DepthrouteConfig)
        self._roots = [*dict.fromkeys(Symbol(one.__module__, one.__qualname__) for one in classes), MODEL]
        self._methods = self._roots[:-2]
        self._residual = residual
        self._sources: dict[str, Source] = {}
        self._reached: dict[str, set[ast.stmt]] = {}  # by module
        self._needs: dict[str, dict[str, None]] = {}  # the modules that a module needs before it
        self._externals: dict[External, str] = {}
        self._final: dict[Symbol, str] = {}

    def text(self) -> str:
        waiting = [self._defined(root) for root in self._roots]
        registry = self._defined(REGISTRY)
        waiting.append(registry)
        while waiting:
            waiting += self._reach(waiting.pop())
        order = self._order()
        self._name(order)
        head = _HEADER.format(version=__version__, method=self._residual.name)
        parts = [f"{head}\n\nfrom __future__ import annotations\n\n{self._import_lines()}"]
        for module in order:
            parts.append(self._module(module))
        entries = ", ".join(f"{self._final[method]}.name: {self._final[method]}" for method in self._methods)
        parts.append(f"{self._final[registry]}.update({{{entries}}})")
        text = "\n\n\n".join(parts) + "\n"
        self._check(text)
        return text

    def _source(self, module: str) -> Source:
        if module not in self._sources:
            self._sources[module] = Source(module, self._own)
        return self._sources[module]

    def _defined(self, symbol: Symbol) -> Symbol:
        """Where a name is defined that a module may only hand on."""
        target: Target | None = symbol
        while isinstance(target, Symbol):
            target = STAND_INS.get(target, target)
            found = self._source(target.module).target(target.name)
            if found == target:
                return target
            target = found
        raise FailureError(f"{symbol.module} does not define {symbol.name!r} at its top; a self-contained modelling file cannot have it.")

    def _reach(self, symbol: Symbol) -> list[Symbol]:
        """Keep the definition of a symbol; what it needs in turn."""
        found = self._source(symbol.module)
        statement = found.definitions[symbol.name]
        if statement in self._reached.setdefault(symbol.module, set()):
            return []
        self._reached[symbol.module].add(statement)
        needed = []
        for node in found.names(statement, OMITTED):
            target = found.target(node.id)
            if isinstance(target, External):
                self._externals.setdefault(target, node.id)
            elif target is not None:
                needed.append(self._defined(target))
                if node.id not in found.typing_only and needed[-1].module != symbol.module:
                    self._needs.setdefault(symbol.module, {})[needed[-1].module] = None
        return needed

    def _order(self) -> list[str]:
        """The reached modules, each behind those that it needs."""
        order: dict[str, None] = {}

        def visit(module: str, above: tuple[str, ...]) -> None:
            if module in above:
                raise FailureError(f"{' needs '.join((*above, module))}: definitions in a circle cannot be in one file.")
            if module not in order:
                for needed in sorted(self._needs.get(module, ())):
                    visit(needed, (*above, module))
                order[module] = None

        for module in sorted(self._reached):
            visit(module, ())
        return list(order)

    def _name(self, order: list[str]) -> None:
        """A name for everything; of two that are called alike the later one gets its file's name too."""
        taken: set[str] = set()
        for external, alias in self._externals.items():
            self._externals[external] = _unlike(alias, external.module, taken)
        for module in order:
            found = self._source(module)
            for name, statement in found.definitions.items():
                if statement in self._reached[module]:
                    self._final[Symbol(module, name)] = _unlike(name, module, taken)

    def _import_lines(self) -> str:
        """Grouped: the standard library, then the others."""
        whole: dict[str, str] = {}
        parts: dict[str, list[str]] = {}
        for external, alias in self._externals.items():
            if external.name is None:
                whole[external.module] = f"import {external.module}" + (f" as {alias}" if alias != external.module else "")
            else:
                parts.setdefault(external.module, []).append(external.name + (f" as {alias}" if alias != external.name else ""))
        lines = [
            *((module, line) for module, line in sorted(whole.items())),
            *((module, f"from {module} import {', '.join(sorted(names))}") for module, names in sorted(parts.items())),
        ]
        groups: tuple[list[str], list[str]] = ([], [])
        for module, line in lines:
            groups[module.partition(".")[0] not in sys.stdlib_module_names].append(line)
        return "\n\n".join("\n".join(group) for group in groups)

    def _module(self, module: str) -> str:
        found = self._source(module)
        place = module.replace(".", "/") + ".py"
        parts = [f"# {'-' * 20} {place}\n# {found.summary}"]
        for statement in dict.fromkeys(found.definitions.values()):
            if statement in self._reached[module]:
                parts.append(found.written(statement, OMITTED, self._renamed(found, statement)))
        return "\n\n\n".join(parts)

    def _renamed(self, found: Source, statement: ast.stmt) -> dict[str, str]:
        names = {node.id for node in found.names(statement, OMITTED)}
        names |= {name for name, defined in found.definitions.items() if defined is statement}
        renamed = {}
        for name in names:
            target = found.target(name)
            if target is not None:
                final = self._externals[target] if isinstance(target, External) else self._final[self._defined(target)]
                if final != name:
                    renamed[name] = final
        return renamed

    def _check(self, text: str) -> None:
        """Nothing is imported that may be absent, and nothing is missing."""
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                if module.partition(".")[0] not in ALLOWED:
                    raise FailureError(
                        f"the residual method {self._residual.name!r} imports {module}; a self-contained modelling file may import torch, "
                        "transformers and the standard library."
                    )
        if missing := undefined(text):
            names = ", ".join(sorted(missing))
            raise FailureError(f"the self-contained modelling file of {self._residual.name!r} would not define {names}.")


def _unlike(name: str, module: str, taken: set[str]) -> str:
    """`name`, or with the last word of its module where it is taken."""
    lead = name[: len(name) - len(name.lstrip("_"))]
    found, word = name, module.rpartition(".")[2]
    while found in taken:
        found = f"{lead}{word}_{found.lstrip('_')}"
    taken.add(found)
    return found


_HEADER = '''"""A decoder with the residual method {method!r}, in one file.

Made by depthroute {version} from its own sources, whose files are named below; Apache License 2.0. Do not edit it: `save_pretrained` of the
model, and `depthroute export hf RUN DIR`, write it again. With depthroute installed, `import depthroute.hf` loads the same model with its
compiled kernels, and this file is not needed.
"""'''
