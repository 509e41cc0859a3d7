"""Text to documents, split, tokenizer, token shards and batches."""

from __future__ import annotations

from depthroute.data.batches import evaluation_windows
from depthroute.data.config import PrepareConfig, Source
from depthroute.data.corpus import ContentHash, Corpus, DocstringCorpus, Document, docstring_corpus
from depthroute.data.dataset import HeldOut, TokenDataset
from depthroute.data.loader import Batch, Loader
from depthroute.data.manifest import Manifest, Marker, SourceFacts, SplitFacts, read_manifest
from depthroute.data.multi_hop import MULTI_HOP, MultiHopConfig, MultiHopCorpus
from depthroute.data.order import BatchOrder
from depthroute.data.prepare import prepare
from depthroute.data.progress import Progress
from depthroute.data.readers import FileCorpus
from depthroute.data.split import SPLITS, DocumentSplit, Split, document_hash
from depthroute.data.tokenizer import (
    BOS,
    EOS,
    PAD,
    UNK,
    TextTokenizer,
    load_tokenizer,
    ready_tokenizer,
    same_tokenizer,
    train_tokenizer,
    usual_begin,
)

__all__ = [
    "BOS",
    "EOS",
    "MULTI_HOP",
    "PAD",
    "SPLITS",
    "UNK",
    "Batch",
    "BatchOrder",
    "ContentHash",
    "Corpus",
    "DocstringCorpus",
    "Document",
    "DocumentSplit",
    "FileCorpus",
    "HeldOut",
    "Loader",
    "Manifest",
    "Marker",
    "MultiHopConfig",
    "MultiHopCorpus",
    "PrepareConfig",
    "Progress",
    "Source",
    "SourceFacts",
    "Split",
    "SplitFacts",
    "TextTokenizer",
    "TokenDataset",
    "docstring_corpus",
    "document_hash",
    "evaluation_windows",
    "load_tokenizer",
    "prepare",
    "read_manifest",
    "ready_tokenizer",
    "same_tokenizer",
    "train_tokenizer",
    "usual_begin",
]
