"""Documents with the borders of their tokens, and what a token stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import SPLITS, DocumentSplit, TextTokenizer, TokenDataset, ready_tokenizer
from depthroute.data.corpus import Document
from depthroute.data.shards import INDEX_DTYPE
from depthroute.data.show import Shower
from depthroute.data.spelling import Speller, shown, visible
from tests.data.by_hand import TEST_SHARE, VALIDATION_SHARE, alter, alter_manifest, documents, seal, tokenizer, write

TEXT = "größe 流 \N{GRINNING FACE}\n\ttwo  spaces, \x1b[31m and \u202e.\ufffd"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path / "data", {"a.jsonl": documents(60, "a"), "b.jsonl": [*documents(30, "b"), Document("odd", TEXT)]})
    return tmp_path / "data"


def pieces_of_words(folder: Path, *more: str) -> TextTokenizer:
    """A tokenizer that is not byte-level: spaces are part of words, and what it does not know is written in bytes."""
    words = {"</s>": 0, "▁": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "▁two": 258, "g": 259}
    words |= {word: len(words) + number for number, word in enumerate(more)}
    made = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "theirs.json"))
    return ready_tokenizer(folder / "theirs.json")


def test_pieces_of_a_byte_level_tokenizer_are_its_bytes() -> None:
    ours = tokenizer()
    ids = [*ours.encode(TEXT), ours.end]
    pieces = Speller(ours).pieces(ids)
    assert len(pieces) == len(ids) and b"".join(pieces).decode() == TEXT and pieces[-1] == b""
    assert all(pieces[:-1])


def test_pieces_of_another_tokenizer_make_its_text(tmp_path: Path) -> None:
    made = pieces_of_words(tmp_path)
    ids = made.encode(TEXT)
    pieces = Speller(made).pieces(ids)
    assert len(pieces) == len(ids) and b"".join(pieces).decode() == made.decode(ids) == TEXT
    # A character of several ids belongs to the last of them.
    assert pieces[:5] == [b"", b"g", b"r", b"", "ö".encode()]
    assert Speller(made).spelling(258) == "▁two"


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ids each call of `decode` is given."""
    calls: list[int] = []
    decode = TextTokenizer.decode

    def counted(self: TextTokenizer, ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(TextTokenizer, "decode", counted)
    return calls


@pytest.mark.parametrize("text", ["\ufffd" * 200, "g\ufffdg\ufffd流\N{GRINNING FACE}\ufffd" * 40])
@pytest.mark.parametrize("known", [False, True])
def test_a_text_that_holds_the_replacement_character(text: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to its own id, or to the last of its bytes, and a document takes time in proportion to its length."""
    made = pieces_of_words(tmp_path, *(["\ufffd"] if known else []))
    ids = made.encode(text)
    calls = count_decoded(monkeypatch)
    pieces = Speller(made).pieces(ids)
    assert b"".join(pieces).decode() == text and sum(calls) < 15 * len(ids)
    assert [piece.decode() for piece in pieces if piece][1 - (text[0] == "g") :][:50] == list(text)[:50]


def test_bytes_in_an_unusual_decoder_are_credited_within_four_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "theirs.json"))
    ready = ready_tokenizer(tmp_path / "theirs.json")
    text = "\ufffd" * 200 + "流 a"
    ids = ready.encode(text)
    calls = count_decoded(monkeypatch)
    pieces = Speller(ready).pieces(ids)
    assert b"".join(pieces).decode() == text and sum(calls) < 15 * len(ids)


def test_an_id_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tokenizer()
    ids = [*ours.encode(TEXT * 50), ours.end]
    calls = count_decoded(monkeypatch)
    Speller(ours).pieces(ids)
    assert len(calls) <= len(set(ids)) < len(ids) / 10


def test_special_tokens_inside_a_document_are_named(tmp_path: Path) -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "depth": 2, "##s": 3}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[SEP]"])
    made.save(str(tmp_path / "theirs.json"))
    ready = ready_tokenizer(tmp_path / "theirs.json", "[SEP]")
    given = [Document(f"{number}", "depth what depths") for number in range(30)]
    write(tmp_path / "data", {"a.jsonl": given}, made=ready, tokenizer="theirs.json")
    (document,) = Shower(tmp_path / "data").documents("train", 0)
    assert document.marked(colours=False) == "depth·[UNK]· depth·s·[SEP]"
    assert [token.bytes for token in document.tokens] == [5, 0, 6, 1, 0] and document.text == "depth depths"


def test_what_has_no_shape_is_made_visible() -> None:
    assert visible("a\nb\t\x00\x7f \u202e\u200b流") == "a␊b␉␀␡ \\u{202e}\\u{200b}流"
    assert shown("流".encode()[:2]) == "\\xe6\\xb5" and shown(b"\n") == "␊"


def test_a_document_with_its_borders(directory: Path) -> None:
    data = TokenDataset.open(directory)
    (document,) = Shower(directory).documents("train", 3)
    boundaries = data.boundaries("train")
    ids = data.tokens("train")[boundaries[3] : boundaries[4]].tolist()
    assert [token.id for token in document.tokens] == ids and document.number == 3
    assert document.text == data.tokenizer().decode(ids) and document.bytes == len(document.text.encode())
    assert document.header == f"train document 3: {len(ids)} tokens, {document.bytes} bytes, from a.jsonl"
    marked = document.marked(colours=False)
    assert marked.count("·") == len(ids) - 1 and marked.endswith("·<eos>")
    assert sum(token.bytes for token in document.tokens) == document.bytes and document.tokens[-1].bytes == 0


def test_colours_take_turns_and_do_not_run_over_the_end_of_a_line(directory: Path) -> None:
    (document,) = Shower(directory).with_id("odd")
    painted = document.marked(colours=True)
    assert "·" not in painted and painted.count("\033[0m") >= len(document.tokens)
    assert painted.count("\033[30;46m") + painted.count("\033[30;43m") >= len(document.tokens)
    assert "␊\033[0m\n" in painted and "\x1b[31m" not in painted and "\u202e" not in painted
    assert "␊\n" in document.marked(colours=False)


def test_numbers_count_from_both_ends(directory: Path) -> None:
    shower = Shower(directory)
    last = TokenDataset.open(directory).manifest.splits.train.documents - 1
    assert shower.documents("train", -1) == shower.documents("train", last)
    assert shower.documents("train", -last - 1) == shower.documents("train", 0)
    assert [one.number for one in shower.documents("train", last - 1, 5)] == [last - 1, last]
    assert shower.documents("train", last)[0].source == "b.jsonl"
    for number in (last + 1, -last - 2):
        with pytest.raises(RequestError, match=f"no document {number}; it takes 0 to {last}, or -1 to {-last - 1} from the end"):
            shower.documents("train", number)
    with pytest.raises(RequestError, match="count cannot be 0"):
        shower.documents("train", 0, 0)


def test_documents_are_found_by_their_ids(directory: Path, tmp_path: Path) -> None:
    shower = Shower(directory)
    split = DocumentSplit(validation_share=VALIDATION_SHARE, test_share=TEST_SHARE, sample_one_in=4, salt="depthroute")
    for wanted in documents(30, "b"):
        (document,) = shower.with_id(wanted.id)
        assert document.text == wanted.text and document.split == split.split_of(wanted.id)
    assert {split.split_of(f"absent {number}") for number in range(30)} == set(SPLITS)
    for number in range(30):
        with pytest.raises(RequestError, match=f"has the id 'absent {number}'.* would be in {split.split_of(f'absent {number}')}"):
            shower.with_id(f"absent {number}")
    write(tmp_path / "twice", {"a.jsonl": documents(20), "b.jsonl": documents(20)})
    assert [one.source for one in Shower(tmp_path / "twice").with_id("document 4")] == ["a.jsonl", "b.jsonl"]


def test_directories_from_before_ids_and_sources_were_recorded(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": documents(3, "c")}, recorded=False)
    shower = Shower(tmp_path)
    assert shower.documents("train", 0)[0].source is None
    with pytest.raises(RequestError, match="prepared before ids were recorded"):
        shower.with_id("c 0")
    with pytest.raises(RequestError, match="the test split has no document 0; it is empty"):
        shower.documents("test", 0)


def test_an_id_that_is_no_text(directory: Path) -> None:
    with pytest.raises(RequestError, match=r"the id '\\udcff' is no UTF-8"):
        Shower(directory).with_id("\udcff")


@pytest.mark.parametrize("odd", [0, 1])
def test_files_of_another_dtype(tmp_path: Path, odd: int) -> None:
    given = next(many for count in range(20, 30) if write(tmp_path, {"a.jsonl": (many := documents(count))}).splits.train.tokens % 2 == odd)
    write(tmp_path, {"a.jsonl": given})
    alter_manifest(tmp_path, lambda manifest: manifest.update(dtype="uint32"))
    says = r"train\.bin has \d+ bytes, no whole number of uint32" if odd else r"train\.index\.bin is not the index of the tokens beside it"
    with pytest.raises(FailureError, match=says):
        Shower(tmp_path).documents("train", 0)


def test_an_index_that_does_not_rise_where_it_is_read(directory: Path) -> None:
    alter(directory, "train.index.bin", INDEX_DTYPE, lambda index: index.__setitem__(4, index[3]))
    seal(directory)
    assert Shower(directory).documents("train", 0)
    with pytest.raises(FailureError, match=r"train\.index\.bin is not the index of the tokens beside it"):
        Shower(directory).documents("train", 1, 4)
    alter_manifest(directory, lambda manifest: manifest["sources"][0]["splits"]["train"].update(documents=-3))
    with pytest.raises(FailureError, match=r"manifest\.json gives a\.jsonl -3 documents in train"):
        Shower(directory).documents("train", 0)
