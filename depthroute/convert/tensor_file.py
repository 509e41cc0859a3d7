"""Safetensors files read and written a tensor, or some rows of one, at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from depthroute.common.errors import FailureError, RequestError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """How a tensor is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorReader:
    """The tensors of a file, in float64."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError where a tensor is of a type that is not floating point, FailureError where the file is missing or damaged."""
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
        except FileNotFoundError as error:
            raise FailureError(f"{path} is missing; download or copy it again.") from error
        except SafetensorError as error:
            raise FailureError(f"{path} is truncated, or not safetensors ({error}); download or copy it again.") from error
        except OSError as error:
            raise FailureError(f"{path} cannot be read as a file ({error.strerror or error}); download or copy it again.") from error
        self.stored: dict[str, Stored] = {}
        for name in self._file.keys():  # noqa: SIM118 - not a mapping
            part = self._file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise RequestError(f"{name!r} is stored as {part.get_dtype()}; only {', '.join(DTYPES)} can be converted.")
            self.stored[name] = Stored(DTYPES[part.get_dtype()], tuple(part.get_shape()))

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._file.get_tensor(name)
        return found.double()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        found: Tensor = self._file.get_slice(name)[start:stop]
        return found.double()


class TensorWriter:
    """A file whose tensors are known beforehand by name, type and shape, and are filled in any order. Leaving it checks that all are."""

    def __init__(self, path: Path, layout: Mapping[str, Stored]) -> None:
        self._layout = layout
        self._missing: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        header, offset = {}, 0
        for name, (dtype, shape) in layout.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._starts[name], self._missing[name] = offset, shape[0]
            offset = end
        text = json.dumps(header).encode("utf-8")
        text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight bytes
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._starts = {name: start + 8 + len(text) for name, start in self._starts.items()}

    def write(self, name: str, values: Tensor, row: int = 0) -> None:
        """Write `values` from the row `row` of a tensor on, rounded to its type.

        Raises:
            FailureError: a value is beyond the range of the type.
        """
        dtype, shape = self._layout[name]
        assert values.shape[1:] == shape[1:] and row + len(values) <= shape[0], name
        rounded = values.to(dtype).contiguous()
        if not all(math.isfinite(extreme) for extreme in torch.aminmax(rounded)):  # a NaN is both of them
            raise FailureError(f"{name!r} has a value that {dtype} cannot hold; nothing was written.")
        self._file.seek(self._starts[name] + row * math.prod(shape[1:]) * dtype.itemsize)
        self._file.write(rounded.view(torch.uint8).numpy().data)
        self._missing[name] -= len(values)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        unwritten = [name for name, rows in self._missing.items() if rows]
        assert error is not None or not unwritten, unwritten
