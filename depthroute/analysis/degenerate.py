"""Does a residual method become another one where it says so? Two small networks in float64, compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import Degenerate, Method
from depthroute.residual.method import CASE_WIDTH
from depthroute.train import initialise

TOLERANCE = 1e-9  # in float64, with norms whose epsilon is out of the way
BODY = ModelConfig(
    vocabulary=29, width=CASE_WIDTH, layers=5, heads=2, mlp_width=24, context=12, init_std=0.3, norm_eps=1e-30
)  # fmt: skip


class Verified(NamedTuple):
    """The largest difference of the logits, and of a body gradient relative to its largest entry."""

    case: Degenerate
    logits: float
    gradients: float

    @property
    def holds(self) -> bool:
        return self.logits < TOLERANCE and self.gradients < TOLERANCE

    @property
    def facts(self) -> dict[str, Any]:
        return {"case": self.case.says, "holds": self.holds, "logits": self.logits, "gradients": self.gradients}


def verify(method: Method) -> list[Verified]:
    """Build every degenerate case that `method` states, and what it should equal, and compare outputs and gradients of the shared body."""
    return [_verify(case) for case in method.degenerate]


def _verify(case: Degenerate) -> Verified:
    body = Decoder(replace(BODY, **case.body, residual=case.equals))
    found = Decoder(replace(BODY, **case.body, residual=case.config))
    for model in (body, found):
        initialise(model, 0)
        model.double()
    with torch.no_grad():
        shared = dict(body.named_parameters())
        for name, parameter in found.named_parameters():  # a method may start its body otherwise
            if name in shared and not name.startswith("residual."):
                parameter.copy_(shared[name])
        case.adjust(found.residual)
        case.adjust_other(body.residual)
    tokens = torch.randint(BODY.vocabulary, (2, BODY.context + 1), generator=torch.Generator().manual_seed(1))
    (ours, our_gradients), (theirs, their_gradients) = _run(found, tokens), _run(body, tokens)
    differences = [torch.zeros((), dtype=torch.float64)]
    for name, gradient in our_gradients.items():
        if name in their_gradients and (case.ignoring is None or case.ignoring not in name):
            theirs_here = their_gradients[name]
            differences.append((gradient - theirs_here).abs().max() / theirs_here.abs().max())
    # The maximum of a tensor is not a number where one of its entries is none, and that does not hold.
    return Verified(case, (ours - theirs).abs().max().item(), torch.stack(differences).max().item())


def _run(model: Decoder, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()  # type: ignore[no-untyped-call]  # torch's own
    body = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith("residual.")]
    gradients = {name: torch.full_like(parameter, torch.nan) if parameter.grad is None else parameter.grad for name, parameter in body}
    return model.logits(tokens[:, :-1]).detach(), gradients
