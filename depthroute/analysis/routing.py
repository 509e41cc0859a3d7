"""What a trained model reads at each site: mean source weights, effective sources, and how far its roles differ.

Shapes: S sources, B batch, T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.common.files import write_json
from depthroute.data import evaluation_windows
from depthroute.model import Decoder
from depthroute.residual import Memory
from depthroute.train import load_trained
from depthroute.train.run_data import run_data

TOKENS = 32_768


def write_routing(run: Path, *, data: Path | None = None, tokens: int = TOKENS) -> None:
    """Write RUN/routing.json from the last checkpoint and the validation split; nothing where the method has no source weights.

    Args:
        run: a run folder with a checkpoint.
        data: the folder of its token shards; None is the one that its configuration names.
        tokens: how many validation tokens to average over.

    Raises:
        RequestError: no run, no checkpoint or no such data.
        FailureError: a truncated checkpoint or shard.
    """
    config, model = load_trained(run)
    dataset = run_data(run, config, data)
    totals = RoutingTotals(model)
    model.eval()
    with torch.no_grad():
        for windows in evaluation_windows(dataset.held_out(limit=tokens).tokens, config.model.context):
            model(torch.from_numpy(windows[:, :-1]), observe=totals.observe)
    found = totals.summary()
    if found is not None:
        write_json(run / "routing.json", found)


def effective_sources(weights: Tensor) -> Tensor:
    """exp of the entropy of the weights [S, ...] over their sources, [...] (Low-Rank AttnRes, Eq. 14); 1 to S."""
    return _entropy(weights).exp()


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence of two distributions [S, ...] over their sources, [...] in nats; 0 to ln 2."""
    return (_entropy((first + second) / 2) - (_entropy(first) + _entropy(second)) / 2).clamp_min(0)


def _entropy(weights: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(weights).sum(0)  # its 0 log 0 is 0
    return entropy


class RoutingTotals:
    """Sums over tokens in float64, so that memory does not grow with them. `observe` goes to the decoder's forward pass."""

    def __init__(self, model: Decoder) -> None:
        self.residual = model.residual
        self.tokens = 0
        self._sums: dict[tuple[int, str], dict[str, Tensor]] = defaultdict(dict)
        self._divergence: dict[int, Tensor] = {}

    def observe(self, site: int, memory: Memory) -> None:
        roles = {role: weights.double().flatten(1) for role, weights in self.residual.source_weights(memory, site).items()}
        shares = {role: weights / weights.sum(0) for role, weights in roles.items()}  # the weights themselves, unless they are sigmoids
        for role, weights in roles.items():
            count = effective_sources(shares[role])
            self._add(self._sums[site, role], weights=weights.sum(1), count=count.sum(), square=count.square().sum())
            if (site, role) == next(iter(self._sums)):
                self.tokens += weights.shape[1]
        pairs = [(share, shares[role.replace("query_key", "value")]) for role, share in shares.items() if role.startswith("query_key")]
        if pairs:  # one, or one a head, of which this is the mean
            nats = torch.stack([jensen_shannon(*pair).sum() for pair in pairs]).mean()
            self._divergence[site] = self._divergence.get(site, torch.zeros_like(nats)) + nats

    def summary(self) -> dict[str, Any] | None:
        """The content of routing.json, or None where the method has no source weights."""
        if not self._sums:
            return None
        sites = []
        for site in sorted({site for site, _ in self._sums}):
            last = site == self.residual.body.sublayers
            roles = {role: self._role(sums) for (place, role), sums in self._sums.items() if place == site}
            sites.append({
                "site": site,
                "kind": "output" if last else ("attention", "mlp")[site % 2],
                "layer": site // 2 - (1 if last else 0),
                "sources": list(self.residual.source_names(site)),
                "roles": roles,
            })  # fmt: skip
        divergence = [{"layer": site // 2, "nats": (total / self.tokens).item()} for site, total in sorted(self._divergence.items())]
        return {"tokens": self.tokens, "sites": sites, "divergence": divergence}

    def _role(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        mean = (sums["count"] / self.tokens).item()
        variance = max((sums["square"] / self.tokens).item() - mean * mean, 0.0)
        weights = (sums["weights"] / self.tokens).tolist()
        return {"weights": weights, "effective_sources": mean, "effective_sources_sd": variance**0.5}

    @staticmethod
    def _add(sums: dict[str, Tensor], **values: Tensor) -> None:
        for name, value in values.items():
            sums[name] = sums[name] + value if name in sums else value
