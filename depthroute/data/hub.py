"""Data sets of the Hugging Face hub, or folders in its formats, through the `datasets` library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from depthroute.common.errors import FailureError, RequestError, choose
from depthroute.data import rows
from depthroute.data.config import HUB
from depthroute.data.corpus import Document, Part
from depthroute.data.parquet import BATCH_ROWS, batch_rows_of, columns_of
from depthroute.data.rows import BadRow, BadRows, Row, to_documents

FEWEST_ROWS = 1000
"""Of a part that is not the last one."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """What `hf:NAME[,config=NAME][,split=NAME][,revision=NAME]` asks for."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Read the notation.

        Raises:
            RequestError: it is not of that form.
        """
        name, *rest = text.removeprefix(HUB).split(",")
        if not name:
            raise RequestError(f"the source {text!r} names no data set; it takes hf:NAME[,config=NAME][,split=NAME][,revision=NAME].")
        options: dict[str, str] = {}
        for item in rest:
            key, _, value = item.partition("=")
            if key not in ("config", "split", "revision"):
                raise RequestError(f"the source {text!r}: {choose('setting', key, ('config', 'split', 'revision'))}")
            if key in options or not value:
                raise RequestError(f"the source {text!r} must give {key} once, and a value for it.")
            options[key] = value
        return cls(name=name, **options)


class HubCorpus:
    """The rows of a data set that the `datasets` library reads, in its order. Nothing is looked at before it is asked for.

    A NAME that is no folder is looked up on the hub and downloaded as a whole into the cache of that library (HF_HOME says where); only
    this kind of source reaches for the network.

    Args:
        spec: `hf:NAME[,config=NAME][,split=NAME][,revision=NAME]`. NAME is a data set on the hub, a folder as on the hub, or one written by
            `save_to_disk`. The split is `train` unless it is given.
        text_column, id_column, bad_rows: as for `FileCorpus`.

    Raises:
        RequestError: the spec is not of this form.
    """

    def __init__(self, spec: str, *, text_column: str | None = None, id_column: str | None = None, bad_rows: BadRows = "refuse") -> None:
        self._wanted = HubName.parse(spec)
        self._spec, self._text_column, self._id_column, self._bad_rows = spec, text_column, id_column, bad_rows
        folder = Path(self._wanted.name)
        self.name = folder.resolve().name if folder.is_dir() else self._wanted.name
        found = ((key, getattr(self._wanted, key)) for key in ("config", "split", "revision"))
        self.contents = tuple(f"{key} {value}" for key, value in found if value is not None)
        self.missing: tuple[str, ...] = ()

    def parts(self, skipped: Counter[str]) -> Sequence[Part]:
        """Ranges of rows of about `PART_BYTES`, and 1,000 rows or more.

        Raises:
            RequestError: the `datasets` library is not installed, it does not find what is asked for, or a column is not there or not of
                text.
            FailureError: the data set could not be downloaded or read.
        """
        count = len(self._dataset)
        columns = columns_of(self._dataset.features.arrow_schema, self._spec, self._text_column, self._id_column)
        mean = max(1, self._dataset.data.nbytes // max(1, self._dataset.data.num_rows))
        step = max(FEWEST_ROWS, rows.PART_BYTES // mean)
        ranges = ((start, min(start + step, count)) for start in range(0, count, step))
        return [Part(self._spec, start, end, (end - start) * mean, columns) for start, end in ranges]

    def documents(self, part: Part, skipped: Counter[str]) -> Iterator[Document]:
        """As `FileCorpus.documents`."""
        if part.columns is None:
            raise TypeError("a part of a data set has columns")
        yield from to_documents(
            self._rows(part, part.columns), lambda position: f"{self._spec} row {position + 1}", part.columns, self._bad_rows, skipped
        )

    def stamp(self) -> list[Any]:
        """The fingerprint that the library gives the data set, and the number of rows."""
        return [self._dataset._fingerprint, len(self._dataset)]

    def _rows(self, part: Part, columns: tuple[str, str | None]) -> Iterator[Row | BadRow]:
        import pyarrow

        tables = self._dataset.with_format("arrow")
        for start in range(part.start, part.end, BATCH_ROWS):
            try:
                batches = tables[start : min(start + BATCH_ROWS, part.end)].to_batches()
            except (pyarrow.ArrowException, OSError) as error:
                raise FailureError(f"{self._spec} cannot be read behind row {start} ({_line(error)}).") from error
            for batch in batches:
                yield from batch_rows_of(batch, columns, start)
                start += batch.num_rows

    @cached_property
    def _dataset(self) -> Any:
        import pyarrow

        try:
            import datasets
        except ImportError as error:
            raise RequestError(
                f"the source {self._spec} needs the datasets library, which is not installed: pip install 'depthroute[datasets]'."
            ) from error
        wanted, folder = self._wanted, Path(self._wanted.name)
        if not folder.is_dir() and wanted.name.startswith(("/", ".", "~")):
            raise RequestError(f"the source {self._spec}: the folder {wanted.name} does not exist.")
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                return self._saved(datasets.load_from_disk(wanted.name))
            return datasets.load_dataset(wanted.name, wanted.config, split=wanted.split or "train", revision=wanted.revision)
        except (ConnectionError, TimeoutError, pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
            raise FailureError(f"the source {self._spec} could not be read ({_line(error.__cause__ or error)}).") from error
        except RequestError:
            raise
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise RequestError(f"the source {self._spec} cannot be read ({_line(error)}).") from error

    def _saved(self, found: Any) -> Any:
        """The split of what `save_to_disk` wrote: a data set, or several by the names of their splits."""
        wanted = self._wanted
        if wanted.config or wanted.revision:
            raise RequestError(f"the source {self._spec} is a folder written by save_to_disk; leave config and revision out.")
        if not isinstance(found, dict):
            if wanted.split not in (None, str(found.split)):
                raise RequestError(f"the source {self._spec} is one data set without splits; leave split out.")
            return found
        split = wanted.split or "train"
        if split not in found:
            raise RequestError(f"the source {self._spec}: {choose('split', split, found)}")
        return found[split]


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
