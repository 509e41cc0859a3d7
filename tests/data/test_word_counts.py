from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import train_tokenizer, word_counts
from depthroute.data.train_tokenizer import SPECIAL_TOKENS, train_from_counts
from depthroute.data.word_counts import STRETCH, WORD_BYTES, WordCounter, merge_counts, most_frequent, write_counts

LIBRARY = ByteLevel(add_prefix_space=False, use_regex=True)
SPACES = " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u3000"
AWKWARD = SPACES + "\x00abé1²'’s_-.!、。日本ー🙂\u0301\u200b\u200d<>"  # noqa: RUF001
TEXTS = st.lists(st.text(st.sampled_from(AWKWARD) | st.sampled_from(" \n'stver") | st.characters(exclude_categories=("Cs",))), max_size=4)


def by_library(*texts: str) -> Counter[str]:
    return Counter(word for text in texts for word, _ in LIBRARY.pre_tokenize_str(text))


def counted(path: Path, *texts: str) -> tuple[list[tuple[str, int]], int]:
    """The counts of texts, and how many words were left out."""
    counter = WordCounter(path)
    for text in texts:
        counter.add(text)
    counter.finish()
    return list(merge_counts([path])), counter.left_out


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from([(2**20, 2**25, 2**16), (7, 5, 2**16), (1, 1, 3)]))
def test_words_are_those_of_the_library(texts: list[str], bounds: tuple[int, int, int]) -> None:
    """However a text is looked at in pieces, and whatever is written in between."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        piece, characters, stretch = bounds
        patch.setattr(word_counts, "PIECE", piece)
        patch.setattr(word_counts, "HELD_CHARACTERS", characters)
        found, left_out = counted(Path(folder, "words"), *texts)
        assert (found, left_out) == (sorted(by_library(*texts).items()), 0)
        assert os.listdir(folder) == ["words"]
        patch.setattr(word_counts, "STRETCH", stretch)  # what is cut inside a run is cut where words end
        found, left_out = counted(Path(folder, "words"), *texts)
        assert not Counter(dict(found)) - by_library(*texts)
        assert found == sorted(by_library(*texts).items()) or left_out


@pytest.mark.slow
def test_every_character_is_counted_as_in_the_library(tmp_path: Path) -> None:
    """Python and the library may know different versions of Unicode."""
    characters = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]  # none beyond is white space, nor may become it
    for start in range(0, len(characters), 5_000):
        text = "".join(f"a{one} b!{one}\n" for one in characters[start : start + 5_000])
        assert counted(tmp_path / "words", text)[0] == sorted(by_library(text).items())


def test_long_words_and_stretches_are_left_out_and_counted(tmp_path: Path) -> None:
    kept, dropped, wide = "a" * WORD_BYTES, "b" * (WORD_BYTES + 1), "é" * (WORD_BYTES // 2 + 1)
    assert counted(tmp_path / "words", f"{kept}!{dropped} {wide}") == ([("!", 1), ("a" * WORD_BYTES, 1)], 2)
    sentence = "日本語の文です。"
    assert counted(tmp_path / "words", sentence * STRETCH)[0] == [
        (word, STRETCH) for word in sorted(word for word, _ in LIBRARY.pre_tokenize_str(sentence))
    ]
    assert counted(tmp_path / "words", "é1" * STRETCH + " b") == ([("Ġb", 1)], 1)


def test_a_long_text_has_the_words_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_counts, "HELD", 200)
    draw = random.Random(0)
    text = "".join(draw.choice([*AWKWARD, *" \n" * 8, "the", "'ll"]) for _ in range(30_000))
    monkeypatch.setattr(word_counts, "PIECE", 1000)
    assert counted(tmp_path / "words", text) == (sorted(by_library(text).items()), 0)


def test_files_are_merged_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_counts, "OPEN_FILES", 3)
    draw, total, paths = random.Random(0), Counter[str](), []
    words = [word for word in by_library(" ".join(AWKWARD) + "ab abc a! a, aé aa") if word]
    for number in range(29):
        part = Counter({word: draw.randrange(1, 99) for word in words if draw.random() < 0.3})
        total += part
        paths.append(tmp_path / str(number))
        write_counts(paths[-1], sorted(part.items()))
    before = sorted(tmp_path.iterdir())
    opened: list[int] = []
    merged = word_counts._merged
    monkeypatch.setattr(word_counts, "_merged", lambda files: opened.append(len(files)) or merged(files))
    assert list(merge_counts(paths)) == sorted(total.items())
    assert max(opened) == 3 and sorted(tmp_path.iterdir()) == before
    assert list(merge_counts([])) == []
    for limit in (1, 5, len(total) - 1, len(total), 10**6):
        expected = sorted(sorted(total.items(), key=lambda pair: (-pair[1], pair[0]))[:limit])
        assert list(most_frequent(paths, limit, tmp_path)) == expected
    assert sorted(tmp_path.iterdir()) == before


def test_of_equally_frequent_words_the_first_are_taken(tmp_path: Path) -> None:
    write_counts(tmp_path / "words", [("a", 1), ("b", 2), ("c", 2), ("d", 3), ("e", 2)])
    assert [list(most_frequent([tmp_path / "words"], limit, tmp_path)) for limit in (1, 2, 3)] == [
        [("d", 3)], [("b", 2), ("d", 3)], [("b", 2), ("c", 2), ("d", 3)],
    ]  # fmt: skip
    with pytest.raises(RequestError, match="the number of words cannot be 0; it takes 1 or more"):
        next(most_frequent([tmp_path / "words"], 0, tmp_path))


@pytest.mark.parametrize("line", [b"word\n", b"word x\n", b"a b 3\n"])
def test_a_damaged_file_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "counts.words").write_bytes(b"a 1\n" + line)
    with pytest.raises(FailureError, match=r"counts\.words.* is no file of word counts: b'"):
        list(merge_counts([tmp_path / "counts.words"]))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "words"
    write_counts(path, [("a", 1)])
    with pytest.raises(ZeroDivisionError):
        write_counts(path, ((word, 1 // number) for word, number in [("b", 1), ("c", 0)]))
    assert path.read_bytes() == b"a 1\n" and os.listdir(tmp_path) == ["words"]


def test_no_character_that_spells_a_byte_parts_words() -> None:
    alphabet = "".join(sorted(ByteLevel.alphabet()))
    assert len(alphabet) == 256 and [word for word, _ in WhitespaceSplit().pre_tokenize_str(alphabet)] == [alphabet]


@pytest.mark.parametrize("vocabulary", [260, 300, 700])
def test_training_gives_what_the_library_gives_for_the_texts(vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the texts, and from their counts in any order, given often enough to need more than one text of the library's input."""
    # As an attribute of the package, the name is that of the function.
    monkeypatch.setattr(sys.modules["depthroute.data.train_tokenizer"], "TRAINING_TEXT", 50)
    docs = [str(value.__doc__) for module in (os, random, tempfile, sys) for value in vars(module).values() if value.__doc__]
    docs += ["日本語 の 文\r\n\tl'été\x85 <eos><pad> 🙂", "x" * 200]
    direct = Tokenizer(models.BPE())
    direct.pre_tokenizer, direct.decoder = ByteLevel(add_prefix_space=False, use_regex=True), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    direct.train_from_iterator(docs, trainer=trainer)
    expected = (direct.to_str(pretty=True) + "\n").encode()
    assert train_tokenizer(docs, vocabulary).file == expected
    counts, _ = counted(tmp_path / "words", *docs)
    random.Random(0).shuffle(counts)
    assert train_from_counts(counts, vocabulary).file == expected


def test_a_contraction_is_not_parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "été-we'll,you've"
    monkeypatch.setattr(word_counts, "STRETCH", 7)
    assert counted(tmp_path / "words", text) == (sorted(by_library(text).items()), 0)
