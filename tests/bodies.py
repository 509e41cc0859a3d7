"""Bodies that tests run everything on: fields of a `ModelConfig` beside its usual sizes."""

from __future__ import annotations

from typing import Any

from depthroute.model.bodies import ExpertsConfig, KDAConfig, MLAConfig

# Kimi Linear: two layers in three with KDA, the last with latent attention, a dense first layer, experts behind it.
KIMI: dict[str, Any] = {
    "mixers": ("kda", "mla"),
    "last_mixer": "mla",
    "kda": KDAConfig(convolution=3),
    "mla": MLAConfig(latent=10, shared_key=4),
    "experts": ExpertsConfig(number=5, chosen=2, width=7),
}
# Kimi K3: bounded decays, gates of full rank, latent queries, latent experts, the bounded activation.
K3: dict[str, Any] = {
    "mixers": ("kda", "mla"),
    "kda": KDAConfig(convolution=2, decay_floor=-5.0, output_gate="full"),
    "mla": MLAConfig(latent=10, shared_key=4, query_latent=9, output_gate=True),
    "experts": ExpertsConfig(number=5, chosen=3, width=7, shared=2, latent=8, scaling=2.0),
    "activation": "situ",
}
BODIES: dict[str, dict[str, Any]] = {"dense": {}, "kimi": KIMI, "k3": K3}
