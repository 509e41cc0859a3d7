from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import EOS, TextTokenizer, load_tokenizer, ready_tokenizer, same_tokenizer, train_tokenizer, usual_begin
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


def ready(folder: Path, *tokens: AddedToken, config: object = None, model: object = None) -> Path:
    """A tokenizer from elsewhere, which cuts and pads and has nothing of ours but its bytes."""
    made = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, []) if model is None else model)
    if model is None:
        made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens(list(tokens))
    made.enable_truncation(2)
    made.enable_padding(length=7)
    made.post_processor = TemplateProcessing(single="a $0", special_tokens=[("a", made.token_to_id("a"))])
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "tokenizer.json"


ENDS = [AddedToken("<|im_end|>", special=True), AddedToken("</s>", special=True)]


@pytest.mark.parametrize(
    ("config", "given", "end"),
    [
        (None, None, 257),
        ({"eos_token": "<|im_end|>"}, None, 256),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, None, 256),
        ({"eos_token": "<|im_end|>"}, "</s>", 257),
        ({"eos_token": None}, None, 257),
        ([], "a", None),
    ],
)
def test_the_end_of_a_ready_tokenizer_is_found(config: object, given: str | None, end: int | None, tmp_path: Path) -> None:
    path = ready(tmp_path, *ENDS, config=config)
    if end is None:  # a letter
        with pytest.raises(RequestError, match="turns the text 'a' inside a document into the id that ends documents, "):
            ready_tokenizer(path, given)
        return
    tokenizer = ready_tokenizer(path, given)
    assert tokenizer.end == end and tokenizer.vocabulary == 258


@pytest.mark.parametrize("special", [False, True])
def test_a_ready_tokenizer_gives_the_ids_of_the_text_alone(special: bool, tmp_path: Path) -> None:
    """Nothing cut, padded or put in front, and no end in a document, even where its file calls the end no special token."""
    path = ready(tmp_path, AddedToken("</s>", special=special, lstrip=True))
    tokenizer = ready_tokenizer(path)
    text = "ends with </s> </s>"
    for found in (tokenizer, load_tokenizer(path, end=tokenizer.end)):
        ids = found.encode(text)
        assert [len(found.encode(short)) for short in ("", "a", "ab")] == [0, 1, 2]
        assert len(ids) == len(text) and max(ids) < found.end == 256
        assert found.decode([*ids, found.end]) == text
    assert Tokenizer.from_file(str(path)).encode("</s></s>").ids[:2] == [found.encode("a")[0], 256]  # what would happen otherwise
    tokenizer.save(tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("config", "template", "begin"),
    [
        (None, "<s> $A", "<s>"), (None, "$A", None), (None, "$A </s>", None), (None, "<s> <s> $A", None), (None, "<s> $A </s>", "<s>"),
        ({"add_bos_token": False, "bos_token": "<s>"}, "<s> $A", None), ({"add_bos_token": True, "bos_token": "<s>"}, "$A", "<s>"),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}}, "$A", "<s>"), ({"add_bos_token": None}, "<s> $A", "<s>"),
    ],
)  # fmt: skip
def test_the_token_that_a_tokenizer_puts_in_front(config: object, template: str, begin: str | None, tmp_path: Path) -> None:
    path = ready(tmp_path, AddedToken("<s>", special=True), AddedToken("</s>", special=True), config=config)
    raw = Tokenizer.from_file(str(path))
    raw.post_processor = TemplateProcessing(
        single=template, special_tokens=[(name, raw.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    raw.save(str(path))
    assert usual_begin(path) == begin


def test_tokenizers_are_the_same_by_what_makes_ids(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "ours.json")
    raw = Tokenizer.from_file(str(tmp_path / "ours.json"))
    raw.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    raw.enable_truncation(3)
    raw.enable_padding()
    raw.save(str(tmp_path / "dressed.json"))
    assert same_tokenizer(tmp_path / "ours.json", tmp_path / "dressed.json")
    raw.add_special_tokens(["<more>"])
    raw.save(str(tmp_path / "more.json"))
    assert not same_tokenizer(tmp_path / "ours.json", tmp_path / "more.json")
    with pytest.raises(RequestError, match="cannot be read"):
        same_tokenizer(tmp_path / "ours.json", tmp_path / "none.json")


def test_ids_that_are_left_out_count(tmp_path: Path) -> None:
    path = ready(tmp_path, AddedToken("</s>", special=True), model=WordLevel({"a": 0, "b": 900}, unk_token="a"))
    assert ready_tokenizer(path).vocabulary == 901


def test_an_end_that_is_not_known_is_refused_with_the_candidates(tmp_path: Path) -> None:
    path = ready(tmp_path, AddedToken("<stop>", special=True), AddedToken("<tool>", special=False), AddedToken("<pad>", special=True))
    with pytest.raises(RequestError, match=r"nothing says which token of .* ends a document; set .*\. Candidates: <stop>, <pad>\."):
        ready_tokenizer(path)
    with pytest.raises(RequestError, match=r"has no token '</s>'; set end_of_document\. Candidates: <stop>, <pad>\."):
        ready_tokenizer(path, "</s>")
    with pytest.raises(RequestError, match="has no token with the id 999"):
        load_tokenizer(path, end=999)
    path = ready(tmp_path, AddedToken("</s>", special=True), AddedToken("<eos>", special=True))
    with pytest.raises(RequestError, match=r"Candidates: </s>, <eos>\."):
        ready_tokenizer(path)


def test_a_model_that_spells_the_end_is_refused(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -1.0)]
    with pytest.raises(RequestError, match="turns the text '</s>' inside a document into the id that ends documents, 1"):
        ready_tokenizer(ready(tmp_path, model=Unigram(pieces, 0)))


def test_a_ready_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(RequestError, match=r"cannot be read .* give the path of a tokenizer\.json"):
            ready_tokenizer(path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(FailureError, match="is not valid JSON"):
        ready_tokenizer(tmp_path / "tokenizer.json")


def as_json(tokenizer: TextTokenizer) -> str:
    return tokenizer._tokenizer.to_str()
