from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import EOS, TextTokenizer, long_documents, text_tokenizer, train_tokenizer
from depthroute.data.long_documents import pieces
from depthroute.data.tiktoken import PATTERN

PROSE = "The routes of a residual stream don't end (it's said): 12345 queries, 1234567 keys!\n\n    def values(self):\n\treturn  x_1 \r\n"
WIDE = "残差流的路径。第12层，共24层！Слой за слоем — l'été 🙂 à la fin\u3000日本語の文章です\n"  # noqa: RUF001
DIGITS = "".join(random.Random(1).choices("0123456789", k=900))
TEXT = "".join(random.Random(0).choices([PROSE, WIDE, "<eos> <eos>", "<eos><pad>", " " * 300, "\n \n", "x" * 400, DIGITS, "the "], k=150))
OURS = train_tokenizer([PROSE, WIDE, TEXT[:20_000]], 700)


def trained(pre_tokenizer: object, normalizer: object = None, *, unigram: bool = False) -> TextTokenizer:
    made = Tokenizer(Unigram() if unigram else BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.normalizer = pre_tokenizer, normalizer
    common = {"special_tokens": ["<unk>"], "show_progress": False, "vocab_size": 500}
    trainer = UnigramTrainer(unk_token="<unk>", **common) if unigram else BpeTrainer(**common)
    made.train_from_iterator([PROSE, WIDE, TEXT[:20_000]], trainer)
    made.add_tokens([AddedToken("routes of", normalized=False), AddedToken("12 34", normalized=False)])
    return TextTokenizer(made, 0)


def sequence(*parts: object) -> object:
    return pre_tokenizers.Sequence(list(parts))


TOKENIZERS = {
    "ours": lambda: OURS,
    "gpt-4": lambda: trained(sequence(pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False))),
    "prefix": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": lambda: trained(pre_tokenizers.Metaspace(), normalizers.NFKC(), unigram=True),
    "metaspace-first": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first"), unigram=True),
    "bert": lambda: trained(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "strip": lambda: trained(pre_tokenizers.Whitespace(), normalizers.Strip()),
    "digits": lambda: trained(sequence(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False))),
    "llama-2": lambda: trained(None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
}


def small(patch: pytest.MonkeyPatch, *, piece: int = 64, whole: int = 2**22) -> None:
    patch.setattr(long_documents, "PIECE", piece)
    patch.setattr(text_tokenizer, "PIECE", piece)
    patch.setattr(long_documents, "WHOLE", whole)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_have_the_ids_of_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[name]()
    small(monkeypatch)
    cut = list(pieces(tokenizer._tokenizer, TEXT))
    assert "".join(cut) == TEXT
    assert (len(cut) > 40) is (name != "llama-2")  # else nothing was tried
    assert tokenizer.encode_documents([TEXT])[0].tolist() == tokenizer.encode(TEXT)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*" \n\t\u3000'’.,。_-ab1é²日🙂\u0301\x00\x1f", "<eos>", "'s", "1234", "the", "   "]), max_size=200))  # noqa: RUF001
def test_pieces_of_any_text_have_its_ids(parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small(patch, piece=3)
        patch.setattr(long_documents, "STRIDE", 1)
        ids = OURS.encode_documents(["".join(parts)])[0].tolist()
    assert ids == OURS.encode("".join(parts)) and min(ids, default=EOS + 1) > EOS


@pytest.mark.parametrize("letters", [" a", "a.", "。日"])
def test_text_is_cut_soon_where_words_end(letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, piece=1000)
    assert max(map(len, pieces(OURS._tokenizer, letters * 5000))) < 2000


def test_a_long_run_of_digits_is_cut_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-4's expression takes three at a time from the first one on, which no text around a cut shows."""
    small(monkeypatch)
    assert list(pieces(TOKENIZERS["gpt-4"]()._tokenizer, DIGITS * 5)) == [DIGITS * 5]


def test_text_that_cannot_be_cut_is_encoded_whole_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, whole=3000)
    assert OURS.encode_documents(["a" * 3000])[0].tolist() == OURS.encode("a" * 3000)
    with pytest.raises(RequestError, match=r"the 3000 characters from character \d+ on have no place .* a tokenizer with a pre-tok"):
        OURS.encode_documents(["short", PROSE * 3 + "a" * 4000])
    with pytest.raises(RequestError, match="the 3000 characters from character 0 on have no place"):
        TOKENIZERS["llama-2"]().encode_documents([PROSE * 100])


def test_a_place_to_cut_is_found_behind_many_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every digit before a letter looks like one, and is in the same word."""
    made = TOKENIZERS["ours"]()._tokenizer
    own = Tokenizer.from_str(made.to_str())
    own.pre_tokenizer = sequence(pre_tokenizers.Split(Regex(r"\s"), "merged_with_next"), pre_tokenizers.ByteLevel(False, use_regex=False))
    tokenizer = TextTokenizer(own)
    text = "a1" * 20_000 + "\n" + "a1" * 20_000
    small(monkeypatch, piece=100, whole=90_000)
    assert tokenizer.encode_documents([text])[0].tolist() == tokenizer.encode(text)
    assert tokenizer.encode_documents([text + " " + text])[0].tolist() == tokenizer.encode(text + " " + text)


def test_documents_come_back_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    monkeypatch.setattr(text_tokenizer, "BATCH_CHARACTERS", 100)
    texts = ["", "the routes", PROSE * 2, "", "keys" * 8, "values " * 8, WIDE * 3, "a"]
    found = OURS.encode_documents(texts)
    assert [ids.tolist() for ids in found] == [OURS.encode(text) for text in texts]
    assert {ids.dtype for ids in found} == {np.dtype(np.uint16)}
    assert OURS.encode_documents([]) == []


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_the_smallest_dtype_holds_every_id(vocabulary: int, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(BPE({**letters, "~": vocabulary - 1}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = TextTokenizer(raw, 0)
    small(monkeypatch)
    for text in ("a~", "a~ " * 50):
        ids = tokenizer.encode_documents([text])[0]
        assert ids.dtype == dtype and ids.max() == vocabulary - 1 and ids.tolist() == tokenizer.encode(text)


def test_an_id_beyond_the_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    highest = max(OURS.encode(PROSE))
    monkeypatch.setattr(TextTokenizer, "vocabulary", property(lambda _: highest))
    small(monkeypatch)
    for text in (PROSE, PROSE * 10):
        with pytest.raises(FailureError, match=f"gives the id {highest}, which is not below its vocabulary of {highest}"):
            OURS.encode_documents([text])
