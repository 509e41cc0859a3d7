"""A directory made by `prepare`, opened for reading: its tokens, the order of training over them, and slices that are held out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from depthroute.common.errors import FailureError, RequestError
from depthroute.data.manifest import TOKENIZER, Manifest, read_manifest
from depthroute.data.order import BatchOrder, Stretch
from depthroute.data.shards import DTYPES, INDEX_DTYPE, check_files, index_file, read_array, token_file
from depthroute.data.shares import shares
from depthroute.data.split import Split
from depthroute.data.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What an evaluation reads: every token but the first is a target.

    Attributes:
        tokens: uint16 or uint32 [targets + 1].
        boundaries: int64 [documents + 1]: document i is `tokens[boundaries[i] : boundaries[i + 1]]`. Those that the slice cuts off end
            where it does.
    """

    tokens: np.ndarray
    boundaries: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """A directory made by `prepare`, opened for reading."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: Path, *, verify: bool = False) -> TokenDataset:
        """Open a directory after comparing the size of every file with the manifest, and its SHA-256 where `verify` asks for it.

        Raises:
            RequestError: it is not a prepared directory.
            FailureError: a file is absent, cut short or altered; the message names it.
        """
        manifest = read_manifest(directory)
        check_files(directory, manifest, hashes=verify)
        return cls(directory=directory, manifest=manifest)

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that identify the tokens, wherever they lie; see `Manifest.fingerprint`."""
        return self.manifest.fingerprint

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer; every token id is below it."""
        return self.manifest.vocabulary

    @property
    def end(self) -> int:
        """The id behind every document."""
        return self.manifest.end

    @property
    def begin(self) -> int | None:
        """The id in front of every document; None: there is none."""
        return self.manifest.begin

    def tokens(self, split: Split) -> np.ndarray:
        """The token ids of a split, uint16 or uint32 [tokens], read-only through the memory map."""
        return read_array(self.directory / token_file(split), DTYPES[self.manifest.dtype])

    def boundaries(self, split: Split) -> np.ndarray:
        """int64 [documents + 1]: document i is `tokens(split)[boundaries[i] : boundaries[i + 1]]`, its begin and its end included."""
        return read_array(self.directory / index_file(split), INDEX_DTYPE)

    def tokenizer(self) -> TextTokenizer:
        ready = self.manifest.prepare.tokenizer is not None
        return load_tokenizer(self.directory / TOKENIZER, end=self.end if ready else None, begin=self.begin)

    def order(self, context: int, sequences: int, seed: int) -> BatchOrder:
        """The order of training: over all sources by their weights, or over the whole split where they have none.

        Raises:
            RequestError: what `BatchOrder` refuses.
        """
        weights = self.manifest.prepare.weights
        stretches: tuple[Stretch, ...] = ()
        if weights is not None and len(weights) > 1:
            names = [source.name for source in self.manifest.sources]
            edges = self._edges("train")
            stretches = tuple(
                Stretch(name=name, start=start, end=end, weight=weight)
                for name, start, end, weight in zip(names, edges[:-1], edges[1:], weights, strict=True)
            )
        return BatchOrder(self.manifest.splits.train.tokens, context, sequences, seed, stretches)

    def held_out(self, split: Split = "validation", limit: int | None = None) -> HeldOut:
        """The part of a split that an evaluation of `limit` targets reads: exactly so many, or all of the split where it has fewer.

        Of one source it is the beginning. Of several, each gives its beginning, in proportion to the weights, or without weights to what
        it has in the split; what one lacks the others give. These parts follow each other, and where they meet a document ends and
        another begins; a mixture with a limit lies in memory, everything else in the memory map.

        Raises:
            RequestError: `limit` is below 1.
            FailureError: it holds an id that is none of the vocabulary.
        """
        if limit is not None and limit < 1:
            raise RequestError(f"limit cannot be {limit}; it takes 1 or more, or None for all.")
        tokens, boundaries = self.tokens(split), self.boundaries(split)
        if limit is None or limit + 1 >= len(tokens):
            return HeldOut(tokens=self.checked(tokens, split), boundaries=np.asarray(boundaries))
        edges = self._edges(split) if len(self.manifest.sources) > 1 else [0, len(tokens)]
        sizes = np.diff(edges).tolist()
        weights = self.manifest.prepare.weights if len(sizes) > 1 else None
        counts = shares(limit + 1, weights or sizes, sizes)
        parts = [(start, start + count) for start, count in zip(edges, counts, strict=False) if count]
        ends, before = [np.zeros(1, dtype=np.int64)], 0
        for start, end in parts:
            inside = boundaries[np.searchsorted(boundaries, start, side="right") : np.searchsorted(boundaries, end)]
            ends.append(np.append(inside, end) - start + before)
            before += end - start
        slices = [tokens[start:end] for start, end in parts]
        together = slices[0] if len(slices) == 1 else np.concatenate(slices)
        return HeldOut(tokens=self.checked(together, split), boundaries=np.concatenate(ends))

    def checked(self, tokens: np.ndarray, split: Split) -> np.ndarray:
        """Tokens of a split, which are read here. FailureError: an id is none of the vocabulary."""
        if tokens.size and tokens.max() >= self.vocabulary:
            path = self.directory / token_file(split)
            raise FailureError(
                f"{path} holds the id {tokens.max()}, and the vocabulary ends at {self.vocabulary - 1}: it was altered. "
                f"`depthroute data verify {self.directory}` says more; prepare the data again in a new directory."
            )
        return tokens

    def _edges(self, split: Split) -> list[int]:
        """Where the stretch of each source begins in a split, and where the last one ends."""
        return [0, *accumulate(getattr(source.splits, split).tokens for source in self.manifest.sources)]
