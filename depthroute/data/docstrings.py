"""The worker that reads docstrings out of source files; run as a script, it needs nothing but the standard library.

It is a program of its own because parsing thousands of files wants every core, and a pool of `multiprocessing` would either fork
a process that has threads (PyTorch's, the tokenizer's) or import the caller's main script again.

    input   JSON on standard input:  [[module, path], ...]
    output  JSON on standard output: [[module, [docstring, ...] or null], ...], null where Python cannot read or parse the file
"""

from __future__ import annotations

import ast
import gc
import json
import sys
import warnings

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


def docstrings(source: bytes) -> list[str]:
    """The docstrings of a module, its classes and its functions, nested ones too, in source order, as `ast.get_docstring` cleans them.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: this Python cannot parse the source.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's files are not the user's business
        tree = ast.parse(source)
    found = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node)
            if text and not any("\ud800" <= character <= "\udfff" for character in set(text)):  # lone surrogates are not text
                found.append(text)
        # Only statements can hold a definition; `ast.walk` would visit every expression and take longer than the parser.
        for block in reversed(BLOCKS):
            pending.extend(reversed(getattr(node, block, ()) if not isinstance(node, ast.expr) else ()))
    return found


def main() -> None:
    gc.disable()  # a syntax tree is freed by reference counts; the collector would walk it again and again
    result: list[tuple[str, list[str] | None]] = []
    for module, path in json.load(sys.stdin):
        try:
            with open(path, "rb") as file:
                result.append((module, docstrings(file.read())))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply for the parser
            result.append((module, None))
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
