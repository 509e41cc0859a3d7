"""How large things are by depth: what sub-layers write, what sites read, and the gradients of what was written.

Magnitudes are root mean squares over coordinates and tokens. A plain stream's reads grow with depth and its early outputs get the largest
gradients; with routing both stay bounded (Attention Residuals, Fig. 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthroute.analysis.watch import place, watching
from depthroute.common.errors import RequestError
from depthroute.model import Decoder
from depthroute.residual import Inputs, Memory, Norm


class MagnitudeTotals:
    """Sums of squares in float64 while a model runs: `observe` goes to its forward pass, which runs within `watching`.

    What the first site reads is the embedding.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        sites = model.config.body.sublayers
        self.written = torch.zeros(sites, dtype=torch.float64)
        self.read, self.carried = torch.zeros(sites + 1, dtype=torch.float64), torch.zeros(sites + 1, dtype=torch.float64)
        self.tokens = 0
        self.readable = True

    def on_write(self, site: int, output: Tensor) -> None:
        self.written[site] += mean_square(output)

    def observe(self, site: int, memory: Memory) -> None:
        if not self.readable:
            return
        try:
            inputs = self.model.residual.read(memory, site)
        except RequestError:  # its norm lies on the trunk: there is no read without it
            self.readable = False
            return
        reads = [inputs] if isinstance(inputs, Tensor) else list(dict.fromkeys(inputs))
        self.read[site] += sum(mean_square(one) for one in reads) / len(reads)
        newest = self.model.residual.newest(memory)
        self.carried[site] += mean_square(reads[0] if newest is None else newest)
        if site == self.model.config.body.sublayers:
            self.tokens += reads[0][..., 0].numel()

    def summary(self, gradients: list[float] | None = None) -> list[dict[str, Any]]:
        """A row a site: `output_rms` is None at the last one, `read_rms` and `carried_rms` where a method has no read before its norm.

        `carried_rms` is of what the sub-layers so far hand on: the newest source, as the open block's sum; of a stream, what is read.
        """
        sublayers = self.model.config.body.sublayers
        tokens = max(self.tokens, 1)
        rows = []
        for site in range(sublayers + 1):
            written = (self.written[site] / tokens).sqrt().item() if site < sublayers and self.tokens else None
            read, carried = ((one[site] / tokens).sqrt().item() if self.readable else None for one in (self.read, self.carried))
            gradient = gradients[site] if gradients is not None and site < sublayers else None
            sizes = {"output_rms": written, "read_rms": read, "carried_rms": carried, "output_gradient_rms": gradient}
            rows.append({**place(site, sublayers), **sizes})
        return rows


@torch.no_grad()
def magnitudes(model: Decoder, batches: Iterable[Tensor]) -> MagnitudeTotals:
    """Totals over `batches` of token ids [B, T + 1] (int64), of which the last is a target alone."""
    totals = MagnitudeTotals(model)
    with watching(model.residual, on_write=totals.on_write):
        for batch in batches:
            model(batch[:, :-1], observe=totals.observe)
    return totals


def mean_square(x: Tensor) -> float:
    """The mean square of a row's coordinates, summed over rows."""
    return x.detach().float().square().mean(-1).sum(dtype=torch.float64).item()


def output_gradients(model: Decoder, batches: Iterable[Tensor]) -> list[float]:
    """The root mean square, over coordinates and tokens, of the gradient of the summed NLL with respect to what each sub-layer writes.

    Args:
        batches: token ids [B, T + 1] (int64): inputs and targets.
    """
    sublayers = model.config.body.sublayers
    totals, tokens = torch.zeros(sublayers, dtype=torch.float64), 0

    def on_write(site: int, output: Tensor) -> None:
        def add(gradient: Tensor) -> None:
            totals[site] += mean_square(gradient)

        output.register_hook(add)  # type: ignore[no-untyped-call]  # torch's own

    with watching(model.residual, on_write=on_write):
        for batch in batches:
            model.loss(batch[:, :-1], batch[:, 1:]).objective.backward()  # type: ignore[no-untyped-call]  # torch's own
            tokens += batch[:, 1:].numel()
    model.zero_grad(set_to_none=True)
    return (totals / max(tokens, 1)).sqrt().tolist()


@torch.no_grad()
def logit_lens(model: Decoder, batches: Iterable[Tensor]) -> list[dict[str, Any]]:
    """What the head would say of every read: its NLL through the final norm and the head, and how often its likeliest token is the
    model's own.

    With a plain stream this is the logit lens; with routing the reads are those of the sites, so that their scale is comparable by the
    norm alone.

    Args:
        batches: token ids [B, T + 1] (int64): inputs and targets.
    """
    residual, sublayers = model.residual, model.config.body.sublayers
    original = residual.read
    nll, agrees, tokens = torch.zeros(sublayers + 1, dtype=torch.float64), torch.zeros(sublayers + 1, dtype=torch.float64), 0
    for batch in batches:
        inputs, targets = batch[:, :-1], batch[:, 1:].flatten()
        reads: list[Tensor] = []

        def look(memory: Memory, site: int, norm: Norm | None, reads: list[Tensor] = reads) -> Inputs:
            found = original(memory, site, model.norm)
            reads.append(found if isinstance(found, Tensor) else found.query)
            return original(memory, site, norm)

        with watching(residual, read=look):
            model(inputs)
        final: Tensor | None = None
        for site, read in reversed(list(enumerate(reads))):  # the last one first: the others are compared with it
            logits = F.linear(read.flatten(0, -2), model.head_weight).float()
            likeliest = logits.argmax(-1)
            final = likeliest if final is None else final
            nll[site] += F.cross_entropy(logits, targets, reduction="sum").item()
            agrees[site] += (likeliest == final).sum().item()
        tokens += targets.numel()
    means = zip((nll / tokens).tolist(), (agrees / tokens).tolist(), strict=True)
    return [{**place(site, sublayers), "nll": loss, "agrees": share} for site, (loss, share) in enumerate(means)]
