"""The self-contained modelling file: of every method, without depthroute, the same logits."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from depthroute.common.errors import FailureError
from depthroute.hf.bundle import AUTO_MAP, MODELLING_FILE, modelling_source
from depthroute.hf.export import modelling_class
from depthroute.model import Decoder
from depthroute.residual import METHODS, SPECIFICATIONS, AttnResConfig, PreNormConfig, ResidualConfig

from .conftest import FAST, SIZED, MakeModel


def same_logits(model: torch.nn.Module, tokens: Tensor, folder: Path) -> None:
    """Of the model, and of what its own file makes of the folder."""
    model.save_pretrained(folder)  # type: ignore[operator]
    with modelling_class(folder) as written:
        assert written.__module__.startswith("depthroute_exported")
        again = written.from_pretrained(folder)
        assert {type(part).__module__.partition(".")[0] for part in again.modules()} <= {written.__module__, "torch"}
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", FAST)
def test_the_same_logits(make: MakeModel, tokens: Tensor, tmp_path: Path, method: str) -> None:
    same_logits(make(method), tokens, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", SPECIFICATIONS)
def test_the_same_logits_of_every_method(make: MakeModel, tokens: Tensor, tmp_path: Path, method: str) -> None:
    same_logits(make(SIZED.get(method, method), width=32, layers=6), tokens, tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_only_torch_and_transformers_are_imported(name: str) -> None:
    text = modelling_source(METHODS[name])
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= {"torch", "transformers", *sys.stdlib_module_names}
    assert not imported & {"ctypes", "subprocess", "tempfile", "triton", "socket", "urllib"}  # no kernels, nothing fetched
    assert "def save_pretrained" not in text and "type: ignore" not in text
    assert text.startswith('"""A decoder with the residual method')


def test_both_classes_are_in_the_one_file() -> None:
    text = modelling_source(AttnResConfig)
    for place in AUTO_MAP.values():
        module, _, name = place.partition(".")
        assert f"{module}.py" == MODELLING_FILE and f"\nclass {name}(" in text


OUTSIDE = '''
"""A method of somebody else, with names that are taken."""
from __future__ import annotations

import math as F
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from depthroute.residual.prenorm import PreNorm as Plain, PreNormConfig
from depthroute.residual.protocol import Body, NO_TRACE, ResidualConfig, Trace

Layer = 0.5


def band(x: Tensor, Layer: float) -> Tensor:
    return x * Layer


def project(x: Tensor) -> Tensor:
    return band(x, Layer=Layer) * F.sqrt(4.0)  # one


@dataclass(frozen=True, kw_only=True)
class PreNorm(ResidualConfig):
    name: ClassVar[str] = "outside"

    def module(self, body: Body) -> Other:
        return Other(body)


class Other(Plain):
    def write(self, memory: Tensor, site: int, output: Tensor, trace: Trace = NO_TRACE) -> Tensor:
        return super().write(memory, site, project(output), trace)
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], types.ModuleType]]:
    """A module from a text, on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str) -> types.ModuleType:
        (tmp_path / "outside_method.py").write_text(text, encoding="utf-8")
        return __import__("outside_method")

    yield make
    sys.modules.pop("outside_method", None)


def test_a_method_from_outside_with_names_that_are_taken(
    outside: Callable[[str], types.ModuleType], decoder: Callable[..., Decoder], tokens: Tensor, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from dataclasses import replace

    from depthroute.hf.export import around

    config: type[ResidualConfig] = outside(OUTSIDE).PreNorm
    monkeypatch.setitem(METHODS, "outside", config)
    plain = decoder("prenorm")
    model = Decoder(replace(plain.config, residual=config())).double()
    model.load_state_dict(plain.state_dict())
    wrapped = around(model.eval())
    wrapped.config.dtype = torch.float64
    same_logits(wrapped, tokens, tmp_path / "out")
    torch.testing.assert_close(wrapped(tokens).logits, plain.logits(tokens), rtol=1e-12, atol=1e-12)
    text = (tmp_path / "out" / MODELLING_FILE).read_text(encoding="utf-8")
    assert "def outside_method_band(x: Tensor, Layer: float)" in text and "return x * Layer\n" in text
    assert "outside_method_band(x, Layer=outside_method_Layer)" in text


def test_what_cannot_be_bundled_is_said(outside: Callable[[str], types.ModuleType]) -> None:
    with pytest.raises(FailureError, match="'outside' imports numpy"):
        modelling_source(outside(OUTSIDE.replace("import math as F", "import numpy as F")).PreNorm)


def test_what_no_exported_model_has_is_not_in_the_file() -> None:
    text = modelling_source(PreNormConfig)
    for word in ("delta_rule", "grouped_", "topk", "ShortConvolution", "latent_norm", "flex_attention", "varlen", "custom_op"):
        assert word not in text


def test_two_methods_do_not_share_a_file() -> None:
    assert "class AttnRes(" not in modelling_source(PreNormConfig)
    assert "class AttnRes(" in modelling_source(AttnResConfig)
