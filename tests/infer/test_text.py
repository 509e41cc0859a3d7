"""Text in pieces is the text at once: any ids, any bytes, any stop strings, several kinds of decoders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from depthroute.common.errors import RequestError
from depthroute.data import TextTokenizer, train_tokenizer
from depthroute.infer import TextStream, first_stop

TEXTS = ["Grüße an alle, 你好世界, 👩👧 und “so” weiter", "the end. The end of the text.", "aab aabaab abab"] * 3
TOKENIZER = train_tokenizer(TEXTS, 330)
STOPS = st.lists(st.text("ab .e好ü�", min_size=1, max_size=4), max_size=3)
IDS = st.lists(st.integers(0, TOKENIZER.vocabulary - 1) | st.sampled_from(TOKENIZER.encode("".join(TEXTS[:3]))), max_size=40)


def sentencepiece() -> TextTokenizer:
    """With byte fallback, and a decoder that drops the first space, as Llama 2 has."""
    words = ["▁the", "▁end", "▁", "a", "b", "好", "▁a", "."]
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return TextTokenizer(tokenizer)


SENTENCEPIECE = sentencepiece()
UTF_8 = st.text("aé好👩", min_size=1, max_size=5).map(lambda text: list(text.encode()))
PIECES = st.lists(UTF_8 | st.integers(256, 264).map(lambda token: [token]), max_size=12).map(lambda parts: list(itertools.chain(*parts)))


def streamed(decode: Callable[[Sequence[int]], str], ids: Sequence[int], before: Sequence[int] = (), stop: Sequence[str] = ()) -> list[str]:
    text = TextStream(decode, before, stop)
    pieces = []
    for token in ids:
        pieces.append(text.add(token))
        if text.stopped:
            return pieces
    return [*pieces, text.finish()]


def cut(text: str, stop: Sequence[str]) -> str:
    """Character by character: at the first end of a stop string, without the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [len(string) for string in stop if text[:end].endswith(string)]
        if ending:
            return text[: end - max(ending)]
    return text


@given(IDS, IDS, STOPS)
def test_pieces_are_the_text_of_all_ids_cut_at_the_first_stop(before: list[int], ids: list[int], stop: list[str]) -> None:
    """Random ids: bytes in any order, so that many are no UTF-8, and special tokens in between."""
    at_once = TOKENIZER.decode([*before, *ids])[len(TOKENIZER.decode(before)):]
    assert "".join(streamed(TOKENIZER.decode, ids, before, stop)) == cut(at_once, stop)


@given(PIECES, PIECES, STOPS)
def test_also_for_a_decoder_that_drops_spaces_and_falls_back_to_bytes(before: list[int], ids: list[int], stop: list[str]) -> None:
    at_once = SENTENCEPIECE.decode([*before, *ids])[len(SENTENCEPIECE.decode(before)):]
    assert "".join(streamed(SENTENCEPIECE.decode, ids, before, stop)) == cut(at_once, stop)


def test_the_space_between_prompt_and_text_is_kept() -> None:
    assert streamed(SENTENCEPIECE.decode, [257, 256], [256]) == [" end", " the", ""]
    assert streamed(SENTENCEPIECE.decode, [257, 256]) == ["end", " the", ""]


@given(st.lists(st.sampled_from(b"\xff\xe2\x82\xac"), max_size=50))
def test_long_runs_of_bytes_that_are_no_text(ids: list[int]) -> None:
    """One byte a token, in all orders: 0xE2 0x82 0xAC is a euro sign, and what is cut short stands for one U+FFFD or two."""
    assert "".join(streamed(lambda found: bytes(found).decode("utf-8", errors="replace"), ids)) == bytes(ids).decode(errors="replace")


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
def test_no_piece_shows_a_broken_character(text: str) -> None:
    """One byte a token."""
    pieces = streamed(lambda ids: bytes(ids).decode("utf-8", errors="replace"), list(text.encode()))
    assert "".join(pieces) == text
    assert "�" in text or not any("�" in piece for piece in pieces)


@given(IDS, st.lists(st.text("ab .e", min_size=2, max_size=5), min_size=1, max_size=3))
def test_what_is_shown_is_never_part_of_a_stop_string(ids: list[int], stop: list[str]) -> None:
    """At any time: what was given out is no more than what is left if the text goes on with the rest of any stop string."""
    text, shown, seen = TextStream(TOKENIZER.decode, (), stop), "", []
    for token in ids:
        shown += text.add(token)
        seen.append(token)
        whole = TOKENIZER.decode(seen)
        if text.stopped:
            assert shown == cut(whole, stop)
            return
        for string in stop:
            for n in range(1, len(string)):
                if whole.endswith(string[:n]):
                    assert len(shown) <= len(whole) - n


def test_what_cannot_become_a_stop_string_is_set_free_at_once() -> None:
    ids = [TOKENIZER.encode(letter)[0] for letter in "aaXabY"]
    assert streamed(TOKENIZER.decode, ids, stop=["aab"]) == ["", "", "aaX", "", "ab", "Y", ""]
    assert streamed(TOKENIZER.decode, ids[:2], stop=["aab"]) == ["", "", "aa"]


def test_ids_cost_the_same_however_long_the_text_is() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return TOKENIZER.decode(ids)

    byte = TOKENIZER._tokenizer.token_to_id("ÿ")  # 0xFF, which is in no UTF-8
    for ids in (TOKENIZER.encode("".join(TEXTS)), [byte] * 200, [*TOKENIZER.encode("a"), *[0] * 200]):
        streamed(decode, ids)
    assert longest < 20


def test_the_first_stop_is_the_first_to_be_complete() -> None:
    assert first_stop("xabcdx", ["abcd", "c"]) == 3  # a text that ends behind the c has come to a stop too
    assert first_stop("xabcdx", ["cd", "abcd"]) == 1
    assert first_stop("xabcdx", ["e"]) is None and first_stop("x", []) is None
    ids = [TOKENIZER.encode(letter)[0] for letter in "xabcdx"]
    assert "".join(streamed(TOKENIZER.decode, ids, stop=["abcd", "c"])) == "xab"


def test_nothing_comes_after_a_stop() -> None:
    text = TextStream(TOKENIZER.decode, (), ["b"])
    assert [text.add(TOKENIZER.encode(letter)[0]) for letter in "abab"] == ["a", "", "", ""]
    assert text.stopped and text.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="a stop string is empty"):
        TextStream(TOKENIZER.decode, (), ["a", ""])
