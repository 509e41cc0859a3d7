"""A wrong setting is refused before anything is built, by its field, its value and what is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.model import ModelConfig
from depthroute.residual import Adaptation, Body, Method, PreNormConfig, Trace, parse_residual, register
from depthroute.residual.protocol import METHODS
from depthroute.residual.registry import SPECIFICATIONS

BODY = Body(width=12, layers=3, attention_activation=12, mlp_activation=20)


@pytest.mark.parametrize(
    ("specification", "match"),
    [
        ("layerscale,initial=0", "residual.initial = 0.0 is not allowed; it must be positive"),
        ("highway,gate=wide", "gate: unknown value 'wide'"),
        ("laurel-lr,rank=0", "residual.rank = 0 is not allowed"),
        ("laurel-pa,previous=-1", "residual.previous = -1 is not allowed"),
        ("laurel-pa,previous=0", "laurel needs a part"),
        ("x0,embedding=false", "skips needs residual.embedding = true or residual.unet = true"),
        ("denseformer,dilation=0", "residual.dilation = 0 is not allowed"),
        ("denseformer,period=0", "residual.period = 0 is not allowed"),
        ("mrla-base,head_width=0", "residual.head_width = 0 is not allowed"),
        ("mrla-base,stage=1", "residual.stage = 1 is not allowed; it takes 2 layers or more"),
        ("hc-static,norm_gain=true", "residual.tanh and residual.norm_gain belong to the dynamic part"),
        ("hc-static,tanh=false", "residual.tanh and residual.norm_gain belong to the dynamic part"),
        ("x0,unet_initial=0.5", "it needs residual.unet = true"),
        ("static,eps=1e-3", "residual.eps is for residual.summary = 'rms' here"),
        ("hc:0", "residual.streams = 0 is not allowed"),
        ("mhc:0", "residual.streams = 0 is not allowed"),
        ("mhc,iterations=0", "residual.iterations = 0 is not allowed"),
        ("mhc,eps=0", "residual.eps = 0.0 is not allowed"),
        ("window,window=0", "residual.window = 0 is not allowed"),
        ("mhar,heads=0", "residual.heads = 0 is not allowed"),
        ("block:2,learned_count_prior=true", "residual.learned_count_prior needs residual.count_prior"),
        ("dynamic-query,query_rank=0", "residual.query_rank = 0 is not allowed"),
        ("linear-depth,rank=0", "residual.rank = 0 is not allowed"),
        ("linear-depth,eps=0", "residual.eps = 0.0 is not allowed"),
        ("value-residual,start=0", "residual.start = 0 is not allowed"),
        ("svformer,learned=true", "residual.shared = true takes the first layer's values alone"),
        ("depth-attention:0", "residual.stride = 0 is not allowed"),
        ("depth-attention,window=-1", "residual.window = -1 is not allowed"),
    ],
)
def test_a_wrong_setting(specification: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        parse_residual(specification)


@pytest.mark.parametrize(
    ("specification", "match"),
    [
        ("value-residual,start=3", "residual.start = 3 is behind the last of 3 layers"),
        ("laurel-lr,rank=13", "residual.rank = 13 is larger than the width 12"),
        ("denseformer-4x5", "residual.period = 5 is more than the 3 layers"),
        ("mrla-base,head_width=5", "residual.head_width = 5 does not divide the width 12"),
        ("mhar,heads=5", "residual.heads = 5 does not divide the width 12"),
        ("mhar,heads=4,rank=6", "residual.heads = 4 does not divide the width 12 and the key rank 6"),
        ("dynamic-query,query_rank=13", "residual.query_rank = 13 is larger than the width 12"),
        ("linear-depth,rank=13", "residual.rank = 13 is larger than the width 12"),
        ("block,ends=[2,4]", r"ends = \[2, 4\] is not allowed; it rises from 1 or more to 6"),
    ],
)
def test_a_setting_that_does_not_fit_the_body(specification: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        parse_residual(specification).check(BODY)


@pytest.mark.parametrize(
    ("specification", "match"),
    [
        ("postnorm", r"Trace\(inputs=...\)"),
        ("highway", r"Trace\(inputs=...\)"),
        ("value-residual", r"Trace\(kept=...\)"),
        ("depth-attention", r"Trace\(kept=...\)"),
        ("full,rank=4,keys=projected", r"Trace\(activation=...\)"),
    ],
)
def test_a_loop_of_ones_own_that_leaves_out_what_a_method_needs(specification: str, match: str) -> None:
    residual, x = parse_residual(specification).build(BODY), torch.randn(2, 12)
    with pytest.raises(RequestError, match=match):
        residual.write(residual.open(x), 0, x, Trace())


def test_postnorm_needs_the_norm_in_the_read() -> None:
    residual = parse_residual("postnorm").build(BODY)
    with pytest.raises(RequestError, match="with the norm, which lies on its trunk"):
        residual.read(residual.open(torch.randn(2, 12)), 0)


@pytest.mark.parametrize("norms", ["post", "hybrid"])
def test_separate_norms_need_norms_before_attention(norms: str) -> None:
    with pytest.raises(RequestError, match=rf"model\.norms = '{norms}' has none there"):
        parse_residual("muddformer,separate_norms=true").check(replace(BODY, norms=norms))
    residual = parse_residual("muddformer,separate_norms=true").build(BODY)
    memory = residual.open(torch.randn(2, 12))
    for site in (0, 1):
        memory = residual.write(memory, site, torch.randn(2, 12))
    with pytest.raises(RequestError, match="with separate norms needs read"):
        residual.read(memory, 2)


def test_a_site_without_parameters_is_an_error() -> None:
    """A part of the module that was left out is not a first read."""
    residual = parse_residual("full").build(BODY)
    del residual.sites["3"]
    with pytest.raises(RequestError, match="no parameters for site 3; it has those of 1, 2, 4, 5, 6"):
        residual.read(residual.open(torch.randn(2, 12)), 3)


def test_a_body_knows_the_matrices_that_a_method_scales() -> None:
    class Misspelt(PreNormConfig):
        def adaptation(self, body: Body) -> Adaptation:
            return Adaptation(initial_scale={"quary": 2.0})

    with pytest.raises(RequestError, match="unknown projection 'quary'; perhaps you meant 'query'"):
        ModelConfig(vocabulary=5, width=4, layers=1, heads=1, mlp_width=4, context=4, residual=Misspelt())


def test_a_name_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Method = SPECIFICATIONS["rezero"]
    with pytest.raises(RequestError, match="'rezero' is there already"):
        register(taken)
    assert SPECIFICATIONS["rezero"] is taken and METHODS["prenorm"] is PreNormConfig
