"""Tokenizers that are there already: that of a data directory, or one made elsewhere. Here too: what they are and how ours is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json
from depthroute.data.text_tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, UNK, TextTokenizer
from depthroute.data.tiktoken import CL100K, cl100k
from depthroute.data.train_tokenizer import SMALLEST_VOCABULARY, train_tokenizer

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "SMALLEST_VOCABULARY",
    "SPECIAL_TOKENS",
    "UNK",
    "USUAL_ENDS",
    "TextTokenizer",
    "load_tokenizer",
    "ready_tokenizer",
    "same_tokenizer",
    "train_tokenizer",
    "usual_begin",
]

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]")  # noqa: RUF001


def load_tokenizer(path: Path, *, end: int | None = None, begin: int | None = None) -> TextTokenizer:
    """Load the `tokenizer.json` of a data directory.

    Args:
        end: of a ready tokenizer, the id that ends a document. None: the tokenizer is ours.
        begin: of a ready tokenizer, the id in front of a document, if there is one.

    Raises:
        RequestError: the file does not exist, our special tokens do not have the ids 0 to 3, or `end` or `begin` is no id of a ready
            tokenizer.
        FailureError: the file is not a tokenizer.
    """
    try:
        file = path.read_bytes()
    except FileNotFoundError as error:
        raise RequestError(
            f"{path.parent} holds no {path.name}: it is no data directory, or its preparation did not finish; prepare it."
        ) from error
    tokenizer = _parsed(file, path)
    if end is not None:
        return _ready(tokenizer, end, begin, file, path)
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if ids != [PAD, UNK, BOS, EOS]:
        raise RequestError(f"{path} gives {', '.join(SPECIAL_TOKENS)} the ids {ids}; they must be 0, 1, 2 and 3.")
    return TextTokenizer(tokenizer)


def ready_tokenizer(path: Path, end_of_document: str | None = None, begin_of_document: str | None = None) -> TextTokenizer:
    """A tokenizer that was made elsewhere, such as the one a public checkpoint was trained with.

    Nothing is put in front of or behind a text (what its post-processor does), and no text is cut or padded, whatever its file says.

    Args:
        path: a `tokenizer.json` of the `tokenizers` library; or `cl100k`, where there is no file of that name: tiktoken's vocabulary, which
            the extra `cl100k` installs (see `depthroute.data.tiktoken`).
        end_of_document: the token that ends a document. None: the `eos_token` of the tokenizer_config.json beside it, or else the one
            of the usual names (`USUAL_ENDS`) that it has.
        begin_of_document: the token in front of a document (see `usual_begin`). None: there is none.

    Raises:
        RequestError: no such file; no such token, or none that is known to end a document, or more than one; or the text of one of these
            tokens inside a document would become its id; or the extra `cl100k` is not installed.
        FailureError: the file is not a tokenizer.
    """
    file = cl100k() if path == Path(CL100K) and not path.exists() else _read(path)
    tokenizer = _parsed(file, path)
    name = end_of_document or _configured(path.with_name("tokenizer_config.json"), "eos_token")
    usual = [token for token in USUAL_ENDS if tokenizer.token_to_id(token) is not None]
    if name is None and len(usual) == 1:
        name = usual[0]
    end = None if name is None else tokenizer.token_to_id(name)
    if end is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        what = f"{path} has no token {name!r}" if name else f"nothing says which token of {path} ends a document"
        raise RequestError(f"{what}; set end_of_document. Candidates: {', '.join(usual or special) or 'none is special'}.")
    begin = None if begin_of_document is None else tokenizer.token_to_id(begin_of_document)
    if begin_of_document is not None and begin is None:
        raise RequestError(f"{path} has no token {begin_of_document!r}; begin_of_document takes one that it has, or none.")
    if begin == end:
        raise RequestError(f"begin_of_document {begin_of_document!r} ends documents too, and stands between them already; leave it out.")
    return _ready(tokenizer, end, begin, file, path)


def usual_begin(path: Path) -> str | None:
    """The token that a tokenizer made elsewhere puts in front of a text, as the checkpoint beside it was trained: by `add_bos_token` of the
    tokenizer_config.json beside it, or else by the template of the tokenizer.json. None where there is none, or more than one.

    Raises:
        RequestError: the file cannot be read.
        FailureError: it is not a tokenizer.
    """
    configured = path.with_name("tokenizer_config.json")
    config = read_json(configured) if configured.is_file() else None
    asked = config.get("add_bos_token") if isinstance(config, dict) else None
    if asked is False:
        return None
    if asked is True and (token := _configured(configured, "bos_token")) is not None:
        return token
    tokenizer = _parsed(_read(path), path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    whole, text = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    front = next((whole[:at] for at in range(len(whole)) if whole[at : at + len(text)] == text), [])
    return tokenizer.id_to_token(front[0]) if len(front) == 1 else None


def same_tokenizer(first: Path, second: Path) -> bool:
    """Whether two tokenizer.json give a text the same ids, by all that makes them; what is put around a text and where it is cut is no
    part of it, since none of that reaches token shards.

    Raises:
        RequestError: a file cannot be read.
        FailureError: a file is not a tokenizer.
    """
    files = [_read(path) for path in (first, second)]
    if files[0] == files[1]:
        return True
    parts = [json.loads(_parsed(file, path).to_str()) for file, path in zip(files, (first, second), strict=True)]
    for part in parts:
        for name in ("truncation", "padding", "post_processor"):
            part.pop(name, None)
    return bool(parts[0] == parts[1])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"tokenizer {path} cannot be read ({error.strerror}); give the path of a tokenizer.json.") from error


def _parsed(file: bytes, path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        text = file.decode("utf-8")
        json.loads(text)
    except ValueError as error:
        raise FailureError(f"{path} is not valid JSON ({error}); it was cut short or changed by hand.") from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise FailureError(f"{path} is not a tokenizer that this version of tokenizers can read ({error}).") from error


def _ready(tokenizer: tokenizers.Tokenizer, end: int, begin: int | None, file: bytes, path: Path) -> TextTokenizer:
    from tokenizers import AddedToken

    edges = {"end": end} if begin is None else {"end": end, "begin": begin}
    names: dict[str, str] = {}
    for edge, token in edges.items():
        names[edge] = tokenizer.id_to_token(token) or ""
        if not names[edge]:
            raise RequestError(f"{path} has no token with the id {token}.")
    # Whatever it was added as: only special tokens are text in documents, and have no text themselves.
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found = TextTokenizer(tokenizer, end, begin=begin, file=file)
    for edge, token in edges.items():
        name = names[edge]
        if any(token in ids for ids in found.encode_batch([name, f"a {name} b", f"a{name}b"])):  # a piece of a unigram model, say
            raise RequestError(
                f"{path} turns the text {name!r} inside a document into the id that {edge}s documents, {token}; give another "
                f"{edge}_of_document."
            )
    return found


def _configured(path: Path, name: str) -> str | None:
    """A token that a tokenizer_config.json names; None where the file or the entry is absent."""
    if not path.is_file():
        return None
    config = read_json(path)
    token = config.get(name) if isinstance(config, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
