"""Every residual method against loops written from its paper's equations, over a body that is written out too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from depthroute.model import Decoder
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.denseformer import DenseFormerConfig
from depthroute.residual.depth_attention import DepthAttentionConfig
from depthroute.residual.dynamic import DynamicQueryConfig
from depthroute.residual.highway import HighwayConfig
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.laurel import LaurelConfig
from depthroute.residual.layerscale import LayerScaleConfig
from depthroute.residual.linear import LinearDepthConfig
from depthroute.residual.mhc import MHCConfig
from depthroute.residual.mrla import MRLAConfig
from depthroute.residual.muddformer import MUDDFormerConfig
from depthroute.residual.postnorm import PostNormConfig
from depthroute.residual.rezero import ReZeroConfig
from depthroute.residual.skips import SkipsConfig
from depthroute.residual.static import StaticMixConfig
from depthroute.residual.values import ValueResidualConfig

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing by itself
import literal_banks as banks
import literal_layers as layered
import literal_streams as streams
from literal_body import network

Make = Callable[..., Decoder]


class Case(NamedTuple):
    config: ResidualConfig
    literal: Callable[..., Tensor]
    settings: dict[str, Any]  # of the literal method
    fields: dict[str, Any]  # of the model


def case(config: ResidualConfig, literal: Callable[..., Tensor], fields: dict[str, Any] | None = None, **settings: Any) -> Case:
    return Case(config, literal, settings, fields or {})


GROUPED = {"heads": 6, "key_value_heads": 3, "head_width": 4, "qk_norm": True}
FULL, FOUR, THREE, TWO = (1, 2, 3, 4, 5, 6), (4, 6), (3, 6), (2, 4, 6)  # the last sub-layer of every block, in three layers


def attnres(ends: tuple[int, ...], rank: int = 12, **settings: Any) -> Case:
    """A member of the AttnRes family whose configuration and literal function take the same settings."""
    blocks = {} if ends == FULL else {"ends": ends}
    return case(AttnResConfig(rank=rank, **blocks, **settings), banks.attnres, ends=ends, rank=rank, **settings)


CASES: dict[str, Case] = {
    # The body by itself, so that a failure below is the method's.
    "prenorm": case(PreNormConfig(), streams.prenorm),
    "prenorm grouped": case(PreNormConfig(), streams.prenorm, GROUPED),
    "postnorm": case(PostNormConfig(), streams.postnorm),
    "deepnorm": case(PostNormConfig(deep=True), streams.deepnorm),
    **{f"rezero {kept}": case(ReZeroConfig(prenorm=kept), streams.rezero, prenorm=kept) for kept in (False, True)},
    "layerscale": case(LayerScaleConfig(), streams.layerscale),
    **{
        f"highway {gate} {coupled}": case(HighwayConfig(gate=gate, coupled=coupled), streams.highway, gate=gate, coupled=coupled)
        for gate in ("full", "diagonal", "scalar")
        for coupled in (True, False)
    },
    **{
        f"laurel {rw} {rank} {k}": case(LaurelConfig(weights=rw, rank=rank, previous=k), streams.laurel, rw=rw, rank=rank, previous=k)
        for rw, rank, k in ((True, None, 0), (False, 3, 0), (False, None, 3), (True, 3, 2), (False, None, 1))
    },
    **{
        f"skips {embedding} {unet} {layers}": case(
            SkipsConfig(embedding=embedding, unet=unet), streams.skips, {"layers": layers}, embedding=embedding, unet=unet
        )
        for embedding, unet in ((True, False), (False, True), (True, True))
        for layers in (3, 4)
    },
    **{
        f"static hyper-connections {n}": case(HyperConnectionsConfig(streams=n, dynamic=False), streams.hyper, streams=n, dynamic=False)
        for n in (1, 2, 4)
    },
    **{
        f"hyper-connections {tanh} {gain}": case(
            HyperConnectionsConfig(streams=2, tanh=tanh, norm_gain=gain), streams.hyper, streams=2, dynamic=True, tanh=tanh
        )
        for tanh in (True, False)
        for gain in (True, False)
    },
    **{
        f"mhc {n} {iterations} {numerics} {head}": case(
            MHCConfig(streams=n, iterations=iterations, numerics=numerics, head=head),
            streams.mhc, streams=n, iterations=iterations, numerics=numerics,
        )
        for n, iterations in ((4, 20), (2, 1))  # one iteration: where the order of rows and columns shows most
        for numerics in ("paper", "released")
        for head in ("hyper", "mean")
    },
    **{
        f"denseformer {k}x{p} {layers}": case(
            DenseFormerConfig(dilation=k, period=p), layered.denseformer, {"layers": layers}, dilation=k, period=p
        )
        for k, p, layers in ((1, 1, 3), (2, 1, 3), (2, 3, 3), (4, 5, 10), (3, 2, 8))
    },
    **{
        f"muddformer {prepost} {norms} {rounded}": case(
            MUDDFormerConfig(prepost=prepost, separate_norms=norms, rounded=rounded), layered.muddformer,
            prepost=prepost, separate_norms=norms,
        )
        for prepost, norms, rounded in ((False, False, True), (False, True, False), (True, False, False), (True, True, False))
    },
    **{
        f"mrla {light} {stage} {layers}": case(
            MRLAConfig(light=light, stage=stage, head_width=4), layered.mrla, {"layers": layers}, light=light, stage=stage, heads_width=4
        )
        for light in (False, True)
        for stage, layers in ((None, 3), (2, 3), (2, 4))  # a last stage of one layer, and of two
    },
    "value residual": case(ValueResidualConfig(), layered.value_residual),
    "value residual constant": case(ValueResidualConfig(first=2.0, own=1.0), layered.value_residual, first=2.0, own=1.0),
    "value residual learned": case(ValueResidualConfig(learned=True), layered.value_residual, GROUPED),
    "value residual late": case(
        ValueResidualConfig(first=5.0, own=1.0, start=2), layered.value_residual, first=5.0, own=1.0, from_layer=2
    ),
    "svformer": case(ValueResidualConfig(shared=True), layered.svformer),
    "svformer grouped": case(ValueResidualConfig(shared=True), layered.svformer, GROUPED),
    **{
        f"depth attention {stride} {window} {number}": case(
            DepthAttentionConfig(stride=stride, window=window), layered.depth_attention, {"layers": 4} | fields,
            stride=stride, window=window,
        )
        for number, (stride, window, fields) in enumerate(((1, 0, {}), (2, 0, {}), (4, 0, {}), (2, 1, {}), (3, 2, {}), (1, 0, GROUPED)))
    },
    "attnres full": attnres(FULL),
    "attnres block": attnres(FOUR),
    "attnres low rank": attnres(FOUR, 5),
    "attnres full norm": attnres(FOUR, 5, key_norm="full"),
    "attnres decoupled": attnres(THREE, roles="decoupled"),
    "attnres separate": attnres(THREE, roles="separate"),
    "attnres separate low rank": attnres(FULL, 5, roles="separate", scaled=True),
    **{f"attnres no key norm {len(ends)}": attnres(ends, key_norm="none") for ends in (FULL, FOUR)},
    **{f"attnres heads {len(ends)}": attnres(ends, heads=3) for ends in (FULL, FOUR)},
    "attnres heads full norm": attnres(FOUR, 6, heads=3, key_norm="full"),
    "attnres heads decoupled": attnres(THREE, heads=2, roles="decoupled"),
    **{f"attnres sigmoid {len(ends)}": attnres(ends, weighting="sigmoid") for ends in (FULL, FOUR, TWO)},
    **{f"attnres window {window}": attnres(FULL, window=window) for window in (1, 2, 3, 99)},
    **{f"attnres window {window} of blocks": attnres(TWO, window=window) for window in (1, 2)},
    "attnres window, heads, prior": attnres(TWO, window=2, heads=2, count_prior=0.5),
    **{
        f"attnres normed {scaled} {len(ends)}": attnres(ends, values="normed", scaled=scaled)
        for scaled in (True, False)
        for ends in (FULL, TWO)
    },
    **{f"attnres {summary} {len(ends)}": attnres(ends, summary=summary) for summary in ("mean", "rms") for ends in (TWO, FOUR)},
    **{f"attnres count prior {len(ends)}": attnres(ends, count_prior=0.7) for ends in (TWO, (1, 4, 6))},
    "attnres learned count prior": attnres((1, 4, 6), count_prior=0.7, learned_count_prior=True),
    "attnres learned count prior of roles": attnres((2, 6), count_prior=0.7, learned_count_prior=True, roles="separate"),
    **{
        f"static {raw} {len(ends)}": case(StaticMixConfig(raw=raw, ends=ends), banks.static, raw=raw, ends=ends)
        for raw in (False, True)
        for ends in (FULL, FOUR)
    },
    **{
        f"dynamic query {origin} {query_rank} {rank} {len(ends)}": case(
            DynamicQueryConfig(query_from=origin, query_rank=query_rank, rank=rank, ends=ends),
            banks.dynamic, query_from=origin, rank=rank, ends=ends,
        )
        for origin in ("latest", "block")
        for query_rank, rank in ((None, 12), (3, 5))
        for ends in (FULL, FOUR, TWO)
    },
    **{
        f"delta {gate} {ends and len(ends)}": case(DeltaConfig(gate=gate, ends=ends), banks.delta, gate=gate, ends=ends)
        for gate in ("none", "sigmoid", "alpha")
        for ends in (None, FOUR, TWO)
    },
    **{f"linear {rank}": case(LinearDepthConfig(rank=rank), banks.linear, rank=rank) for rank in (12, 5)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_library_computes_the_equations(decoder: Make, tokens: Tensor, case: Case) -> None:
    model = decoder(case.config, scattered=True, **case.fields)
    inputs = tokens[:, :-1]
    parameters = dict(model.residual.named_parameters())
    expected = case.literal(network(model), model.embedding(inputs), parameters, **case.settings)
    torch.testing.assert_close(model(inputs), expected, rtol=1e-11, atol=1e-11)
