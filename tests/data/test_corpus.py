from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import pytest

from depthroute.common.errors import FailureError
from depthroute.data import DocstringCorpus, Document, docstring_corpus
from depthroute.data.docstrings import docstrings
from tests.data.preparation import read

MODULE = '''"""Module."""
import os
class A:
    """Class A."""
    def f(self):
        """Method f.

        Indented.
        """
        def inner():
            """Inner."""
    x = "not a docstring"
if True:
    async def g():
        """Guarded g."""
else:
    def h():
        r"""Raw \\d h."""
try:
    pass
except OSError:
    def i():
        "Handler i."
def j():
    pass
'''


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few files, and a package that must not be imported."""
    files = {
        "stdlib/solo.py": '"""Solo."""',
        "stdlib/site-packages/other.py": '"""Not the standard library."""',
        "stdlib/json/__init__.py": '"""Json."""',
        "stdlib/json/decoder.py": '"""Decoder."""\ndef f():\n    """Json."""\ndef g():\n    """Decoder."""',
        "stdlib/test/support.py": '"""Test support."""',
        "stdlib/old.py": 'print "Python 2"',
        "site/fakepackage/__init__.py": '"""Fake."""\nraise RuntimeError("imported")',
        "site/fakepackage/plain.py": "x = 1",
        "site/fakepackage/warns.py": '"""An invalid \\d escape."""\nx = 1 is 1',
        "site/fakepackage/tests/helper.py": '"""Helper of tests."""',
        "site/fakepackage/test_it.py": '"""A test."""',
        "site/fakepackage/it_test.py": '"""A test."""',
        "site/fakepackage/conftest.py": '"""A conftest."""',
        "site/anamespace/module.py": '"""No package."""',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "stdlib")})
    return tmp_path


def extract(installation: Path, lines: list[str] | None = None) -> DocstringCorpus:
    report = None if lines is None else lines.append
    return docstring_corpus(("fakepackage", "anamespace", "absentpackage"), cache=installation / "cache", report=report)


def test_docstrings_come_in_source_order() -> None:
    expected = ["Module.", "Class A.", "Method f.\n\nIndented.", "Inner.", "Guarded g.", "Raw \\d h.", "Handler i."]
    assert docstrings(MODULE.encode()) == expected


def test_the_warnings_of_other_peoples_files_are_ignored() -> None:
    """Here warnings are errors, and the parser would raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert docstrings(b'"""An invalid \\d escape."""') == ["An invalid \\d escape."]


def test_what_cannot_be_parsed_raises() -> None:
    for source in (b"print 'two'", b"\0", b'"caf\xe9"'):
        with pytest.raises((SyntaxError, ValueError)):
            docstrings(source)


def test_lone_surrogates_are_left_out() -> None:
    assert docstrings(b'"""\\ud800"""\ndef f():\n    "Text."') == ["Text."]


def test_the_corpus_of_an_installation(installation: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also: nothing is imported (the package would raise), and no SyntaxWarning of other people's files is shown or raised."""
    found = extract(installation)
    skipped: Counter[str] = Counter()
    assert dict(read(found, skipped)) == {
        "fakepackage": "Fake.",
        "fakepackage.warns": "An invalid \\d escape.",
        "json": "Json.",
        "json.decoder": "Decoder.",
        "solo": "Solo.",
    }
    assert skipped == {
        "docstrings that another module or definition has word for word": 2,
        "source files that this Python cannot read or parse": 1,
        "source files without docstrings of their own": 1,
    }
    assert found.missing == ("anamespace", "absentpackage")
    assert [entry.split()[0] for entry in found.contents] == ["standard", "fakepackage"]
    assert capfd.readouterr() == ("", "")


def test_documents_are_ordered_by_the_hash_of_their_ids(installation: Path) -> None:
    ids = [document.id for document in read(extract(installation))]
    assert ids == sorted(ids, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest()) != sorted(ids)


def test_the_cache_is_used_once_made_and_made_again_when_damaged(installation: Path) -> None:
    lines: list[str] = []
    first = extract(installation, lines)
    documents = read(first)
    assert extract(installation, lines) == first
    assert len(lines) == 1
    whole = first.path.read_bytes()
    for damage in (whole[:-10], whole.replace(b"Json", b"Jsom"), None):
        first.path.unlink() if damage is None else first.path.write_bytes(damage)
        assert read(extract(installation, lines)) == documents
    assert len(lines) == 4


def test_other_sources_get_another_cache_and_another_hash(installation: Path) -> None:
    first = extract(installation)
    (installation / "stdlib" / "solo.py").write_text('"""Changed."""', encoding="utf-8")
    second = extract(installation)
    assert first.path != second.path and first.content_hash != second.content_hash
    assert Document("solo", "Solo.") in read(first)
    assert Document("solo", "Changed.") in read(second)


def test_the_users_cache_folder_is_the_default(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(installation / "xdg"))
    assert docstring_corpus(()).path.parent == installation / "xdg" / "depthroute"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(installation / "home"))
    assert docstring_corpus(()).path.parent == installation / "home" / ".cache" / "depthroute"


@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_costs_only_the_cache(installation: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    kept = extract(installation)
    expected = read(kept)
    kept.path.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    lines: list[str] = []
    found = extract(installation, lines)
    assert read(found) == read(found) == expected
    assert found.stamp() == kept.stamp() and not found.path.exists()
    assert len(lines) == 2 and lines[1].startswith("the docstrings are not kept for the next time: ")


def test_a_link_to_nowhere_is_no_source(installation: Path) -> None:
    before = extract(installation)
    (installation / "stdlib" / "gone.py").symlink_to(installation / "nowhere.py")
    assert extract(installation) == before


def test_a_file_that_cannot_be_read_is_counted(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in place of a file is what even root cannot read."""
    (installation / "stdlib" / "locked.py").mkdir()
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr("os.walk", lambda root: [(str(root), [], [path.name for path in Path(root).glob("*.py")])])
    skipped: Counter[str] = Counter()
    assert {document.id for document in read(extract(installation), skipped)} >= {"solo"}
    assert skipped["source files that this Python cannot read or parse"] == 2  # and old.py


def test_a_worker_that_fails_is_one_sentence(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthroute.data.docstrings.__file__", str(installation / "nothing.py"))
    with pytest.raises(FailureError, match=r"could not read the docstrings \(exit status 2"):
        extract(installation)


def test_the_real_standard_library(tmp_path: Path) -> None:
    found = dict(read(docstring_corpus((), cache=tmp_path)))
    assert found["json.decoder"].startswith("Implementation of JSONDecoder\n\nSubclass of ValueError")
    assert sum(map(len, found.values())) > 1_000_000
    assert not [name for name in found if "test" in name.split(".") or "site-packages" in name]
