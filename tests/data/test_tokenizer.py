from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import EOS, TextTokenizer, load_tokenizer, train_tokenizer
from depthroute.data.tokenizer import SPECIAL_TOKENS

TEXTS = ["the residual stream of the network", "the routes of the residual stream", "queries and keys, and values"] * 3
SPECIAL_TEXT = "".join(SPECIAL_TOKENS) + " <eos> <eos><eos>\n<pad>" * 50
TOKENIZER = train_tokenizer([*TEXTS, SPECIAL_TEXT], 400)


def test_special_ids_are_fixed(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [raw.token_to_id(token) for token in ("<pad>", "<unk>", "<bos>", "<eos>")] == [0, 1, 2, 3]


@pytest.mark.parametrize("saved", [False, True])
def test_special_tokens_in_a_document_are_text(saved: bool, tmp_path: Path) -> None:
    """Even for a tokenizer trained on little else, and after loading, when the library matches added tokens by default."""
    tokenizer = TOKENIZER
    if saved:
        TOKENIZER.save(tmp_path / "tokenizer.json")
        assert EOS in Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(SPECIAL_TEXT).ids  # what would happen otherwise
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    for ids in (tokenizer.encode(SPECIAL_TEXT), *tokenizer.encode_batch([SPECIAL_TEXT, "a<eos>", "<bos>"])):
        assert min(ids) > EOS
    assert tokenizer.decode(tokenizer.encode(SPECIAL_TEXT)) == SPECIAL_TEXT


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(EOS < token < TOKENIZER.vocabulary for token in ids)


def test_special_ids_have_no_text() -> None:
    assert TOKENIZER.decode([2, *TOKENIZER.encode("keys"), EOS]) == "keys"


def test_the_order_of_the_documents_does_not_matter() -> None:
    shuffled = [f"{text} {i}" for i, text in enumerate(TEXTS)]
    one = train_tokenizer(shuffled, 330)
    random.Random(0).shuffle(shuffled)
    assert as_json(train_tokenizer(shuffled, 330)) == as_json(one)


def test_little_text_gives_a_smaller_vocabulary() -> None:
    assert train_tokenizer(["ab ab"], 1000).vocabulary == 4 + 256 + 2  # "ab" and " ab"


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(RequestError, match="vocabulary cannot be 259; it takes 260"):
        train_tokenizer(TEXTS, 259)


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(RequestError, match=r"holds no tokenizer\.json: .* prepare it"):
        load_tokenizer(path)
    TOKENIZER.save(path)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:500], encoding="utf-8")
    with pytest.raises(FailureError, match="cut short"):
        load_tokenizer(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(FailureError, match="is not a tokenizer"):
        load_tokenizer(path)
    path.write_text(whole.replace("<eos>", "<end>"), encoding="utf-8")
    with pytest.raises(RequestError, match="must be 0, 1, 2 and 3"):
        load_tokenizer(path)


def as_json(tokenizer: TextTokenizer) -> str:
    return tokenizer._tokenizer.to_str()
