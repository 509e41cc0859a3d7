"""The shapes of published models with Attention Residuals, as configurations of this library.

Kimi Linear 48B-A3B: the technical report (arXiv 2510.26692) and the released configuration; 27 layers, full attention at 4, 8, ..., 24 and
27 (from 1). With Attention Residuals it is the large run of that paper (arXiv 2603.15031, section 5.2): blocks of 6 sub-layers.

Kimi K3: the released configuration and its modelling code; 93 layers, 69 with KDA and 24 with gated latent attention, the last two among
them; blocks of 12 layers. Routed experts work in a latent width, MLPs and experts have the bounded activation.

Neither has positions: KDA carries the order. Learning rates, the rate at which the experts are balanced and the standard deviation of the
initial weights are not published for these shapes; the defaults stand in.
"""

from __future__ import annotations

from depthroute.model.bodies import ExpertsConfig, KDAConfig, MixerName, MLAConfig
from depthroute.model.config import ModelConfig
from depthroute.residual import ResidualConfig

PATTERN: tuple[MixerName, ...] = ("kda", "kda", "kda", "mla")
LINEAR_LAYERS_PER_BLOCK, K3_LAYERS_PER_BLOCK = 3, 12  # of the models that were trained


def kimi_linear_48b(residual: ResidualConfig, context: int = 4_096) -> ModelConfig:
    """Kimi Linear 48B-A3B: 48B parameters, 3B active. `context`: that of the run with Attention Residuals; it was 32,768 after it."""
    return ModelConfig(
        vocabulary=163_840,
        width=2_304,
        layers=27,
        heads=32,
        head_width=128,
        mlp_width=9_216,
        context=context,
        mixers=PATTERN,
        last_mixer="mla",
        kda=KDAConfig(convolution=4),
        mla=MLAConfig(latent=512, shared_key=64),
        experts=ExpertsConfig(number=256, chosen=8, width=1_024, shared=1, dense_layers=1, scaling=2.446),
        tied_embeddings=False,
        norm_eps=1e-5,
        memory_dtype="compute",
        residual=residual,
    )


def kimi_k3(residual: ResidualConfig, context: int = 1 << 20) -> ModelConfig:
    """Kimi K3: 2.78T parameters, 104B active."""
    return ModelConfig(
        vocabulary=163_840,
        width=7_168,
        layers=93,
        heads=96,
        head_width=128,
        mlp_width=33_792,
        context=context,
        mixers=PATTERN,
        last_mixer="mla",
        kda=KDAConfig(convolution=4, decay_floor=-5.0, output_gate="full"),
        mla=MLAConfig(latent=512, shared_key=64, query_latent=1_536, output_gate=True),
        experts=ExpertsConfig(number=896, chosen=16, width=3_072, shared=2, dense_layers=1, scaling=1.0, latent=3_584),
        activation="situ",
        tied_embeddings=False,
        norm_eps=1e-5,
        memory_dtype="compute",
        residual=residual,
    )
