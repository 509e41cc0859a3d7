"""Where documents come from: what a corpus is, and the default one, the docstrings of the installed scientific Python packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from depthroute.common.errors import DepthrouteError, FailureError
from depthroute.common.files import cache_folder, read_json, write_bytes, write_json
from depthroute.common.processors import usable_processors
from depthroute.data import docstrings

DOCSTRING_PACKAGES = ("torch", "scipy", "sympy", "networkx", "numpy", "matplotlib")
STANDARD_LIBRARY = "standard library"
CACHE_FORMAT = 2
TEST_FOLDERS = frozenset({"test", "tests"})
NOT_SOURCES = TEST_FOLDERS | {"site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """One document: the split is decided by its `id`, the tokens are made of its `text`. Both are valid Unicode."""

    id: str
    text: str


class Part(NamedTuple):
    """A stretch of a corpus that can be read by itself. What `start` and `end` count is known to the corpus alone."""

    name: str
    """The file, or what else it is a stretch of."""
    start: int
    end: int
    bytes: int
    """About how much there is to read, for progress and to share out work."""
    columns: tuple[str, str | None] | None = None
    """Of a file with columns: that of the text, and that of the id, if there is one."""


class Corpus(Protocol):
    """A source of documents that can be read as often as needed and gives the same documents in the same order every time."""

    @property
    def name(self) -> str: ...

    @property
    def contents(self) -> tuple[str, ...]:
        """What it was made of, for people: packages with their versions, or how many files."""
        ...

    @property
    def missing(self) -> tuple[str, ...]:
        """What would have been part of it and is not there."""
        ...

    def parts(self, skipped: Counter[str]) -> Sequence[Part]:
        """What it consists of, in order; everything that can be refused without reading the documents is refused here. What is left out
        as a whole is counted in `skipped` by reason."""
        ...

    def documents(self, part: Part, skipped: Counter[str]) -> Iterator[Document]:
        """The documents of a part, streamed; what is left out is counted in `skipped` by reason. Documents do not depend on how a corpus
        is cut into parts."""
        ...

    def stamp(self) -> Any:
        """A JSON value found without reading the documents; as long as it is the same, so are they."""
        ...


class ContentHash:
    """The hash that identifies a corpus: a chain over the hashes of its documents, h(0) = 32 zero bytes and h(i) = SHA-256 of h(i - 1) and
    of `document_digest` of document i. So documents can be hashed beside each other, and the chain goes on from what it had come to.

    Args:
        value: what a chain had come to, 64 hexadecimal digits.
    """

    def __init__(self, value: str = "00" * 32) -> None:
        self._value = bytes.fromhex(value)

    def add(self, digest: bytes) -> None:
        self._value = hashlib.sha256(self._value + digest).digest()

    def hexdigest(self) -> str:
        return self._value.hex()


def document_digest(document: Document) -> bytes:
    """SHA-256 over the id and the text of a document in UTF-8, each preceded by its length in bytes as 8 little-endian bytes."""
    found = hashlib.sha256()
    for part in document:
        data = part.encode("utf-8")
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()


@dataclass(frozen=True, kw_only=True)
class DocstringCorpus:
    """The default corpus, read from its cache file, or from memory where that cannot be written. Make one with `docstring_corpus`."""

    path: Path
    """JSON lines `{"id": ..., "text": ...}`."""
    lines: bytes | None = field(default=None, repr=False)
    """What `path` would hold where it cannot be written."""
    content_hash: str
    contents: tuple[str, ...]
    missing: tuple[str, ...]
    skipped: dict[str, int]
    name: str = "docstrings"

    def parts(self, skipped: Counter[str]) -> Sequence[Part]:
        skipped.update(self.skipped)
        return [Part(self.name, 0, 1, self.path.stat().st_size if self.lines is None else len(self.lines))]

    def documents(self, part: Part, skipped: Counter[str]) -> Iterator[Document]:
        with self.path.open("rb") if self.lines is None else io.BytesIO(self.lines) as file:
            for line in file:
                row = json.loads(line)
                yield Document(row["id"], row["text"])

    def stamp(self) -> str:
        return self.content_hash


def docstring_corpus(
    packages: tuple[str, ...] = DOCSTRING_PACKAGES, *, cache: Path | None = None, report: Callable[[str], None] | None = None
) -> DocstringCorpus:
    """The docstrings of `packages` and of the standard library: one document per source file, its module's name as id.

    No package is imported. Tests are left out, and so is every docstring that a module earlier in the alphabet has word for word. Documents
    come in the order of a hash of their ids, so that the beginning of any split is a sample of all packages. The result is kept under
    `cache`, by default the user's cache folder, in a file named after the installed versions and the sources found; where that cannot be
    written it stays in memory, and the next call reads the sources again.

    Raises:
        FailureError: Python could not be started to parse the files.
    """
    roots: dict[str, Path] = {STANDARD_LIBRARY: Path(sysconfig.get_paths()["stdlib"])}
    contents, missing = [f"{STANDARD_LIBRARY} {platform.python_version()}"], []
    for package in packages:
        root = _locate(package)
        if root is None:
            missing.append(package)
        else:
            roots[package] = root
            contents.append(f"{package} {_version(package)}")
    files = sorted(file for package, root in roots.items() for file in _source_files("" if package == STANDARD_LIBRARY else package, root))
    inventory = [CACHE_FORMAT, contents, [(module, path.stat().st_size) for module, path in files]]
    key = hashlib.sha256(json.dumps(inventory).encode("utf-8")).hexdigest()[:16]
    path = (cache or cache_folder()) / f"docstrings-{key}.jsonl"
    facts, lines = _cached(path), None
    if facts is None:
        if report:
            report(f"reading the docstrings of {len(files)} source files ({', '.join(contents)})")
        facts, extracted = _extract_lines(files)
        try:
            write_bytes(path, extracted)
            write_json(path.with_suffix(".json"), facts)
        except (FailureError, OSError) as error:
            lines = extracted
            if report:
                report(f"the docstrings are not kept for the next time: {error}")
    return DocstringCorpus(
        path=path,
        lines=lines,
        content_hash=facts["content_hash"],
        contents=tuple(contents),
        missing=tuple(missing),
        skipped=facts["skipped"],
    )


def _extract_lines(files: list[tuple[str, Path]]) -> tuple[dict[str, Any], bytes]:
    """What is known of a cache file, and what it holds."""
    documents, skipped = _extract(files)
    content, lines = ContentHash(), bytearray()
    for document in documents:
        content.add(document_digest(document))
        lines += json.dumps(document._asdict(), ensure_ascii=False).encode("utf-8") + b"\n"
    facts = {"content_hash": content.hexdigest(), "file_hash": hashlib.sha256(lines).hexdigest(), "skipped": skipped}
    return facts, bytes(lines)


def _cached(path: Path) -> dict[str, Any] | None:
    """What is known of a cache file, or None where it is absent, cut short or altered: then it is made again."""
    try:
        facts: dict[str, Any] = read_json(path.with_suffix(".json"))
        with path.open("rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest() == facts["file_hash"]
    except (DepthrouteError, OSError, KeyError, TypeError):
        return None
    return facts if whole else None


def _extract(files: list[tuple[str, Path]]) -> tuple[list[Document], dict[str, int]]:
    """Documents in their final order, and how many files and docstrings were left out, by reason."""
    processes = usable_processors()
    # Largest files first and dealt out like cards: every worker gets the same load, and no straggler keeps the others waiting.
    by_size = sorted(files, key=lambda file: file[1].stat().st_size, reverse=True)
    deals = [deal for deal in (by_size[i :: 4 * processes] for i in range(4 * processes)) if deal]
    with ThreadPoolExecutor(processes) as pool:
        modules = dict(module for deal in pool.map(_parse, deals) for module in deal)
    skipped: Counter[str] = Counter()
    seen: set[str] = set()
    documents = []
    for module in sorted(modules):
        found = modules[module]
        if found is None:
            skipped["source files that this Python cannot read or parse"] += 1
            continue
        new = [text for text in dict.fromkeys(found) if text not in seen]
        skipped["docstrings that another module or definition has word for word"] += len(found) - len(new)
        seen.update(new)
        if new:
            documents.append(Document(module, "\n\n".join(new)))
        else:
            skipped["source files without docstrings of their own"] += 1
    documents.sort(key=lambda document: hashlib.blake2b(document.id.encode("utf-8"), digest_size=8).digest())
    return documents, dict(sorted(skipped.items()))


def _parse(deal: list[tuple[str, Path]]) -> list[tuple[str, list[str] | None]]:
    # Isolated mode keeps the folder of the script off the path: its tokenizer.py and others must not stand in for anybody else's.
    command = [sys.executable, "-I", "-S", docstrings.__file__]
    wanted = json.dumps([(module, str(path)) for module, path in deal])
    done = subprocess.run(command, input=wanted, capture_output=True, text=True, encoding="utf-8")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FailureError(f"{sys.executable} could not read the docstrings (exit status {done.returncode}: {last}).")
    result: list[tuple[str, list[str] | None]] = json.loads(done.stdout)
    return result


def _locate(package: str) -> Path | None:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    # A namespace (no origin) is a folder of that name that happens to lie on the path, not the package.
    return Path(spec.origin).parent if spec and spec.origin and spec.submodule_search_locations else None


def _source_files(package: str, root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - NOT_SOURCES)
        prefix = (*([package] if package else []), *Path(folder).relative_to(root).parts)
        for name in names:
            stem = name.removesuffix(".py")
            if stem == name or stem.startswith("test_") or stem.endswith("_test") or stem == "conftest":
                continue
            path = Path(folder, name)
            if path.is_file():  # not a link to nowhere
                yield ".".join(prefix if stem == "__init__" else (*prefix, stem)), path


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
