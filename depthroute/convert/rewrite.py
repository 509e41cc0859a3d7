"""What every tensor of a trained AttnRes model becomes in a basis where its route queries use few coordinates.

The residual stream x becomes R x with an orthogonal R (Low-Rank AttnRes, Appendix B, Eqs. 17-19). RMS norms without a gain commute with R,
and so do sums, means, windows, selections and mixtures with the same weights. Gains do not, and are absorbed first:

    key gain g_t         query          q_t -> (R (g_t * w_t)), last r coordinates          (Eq. 17)
    norm before, gain g  query, key, value, gate, up   W -> W diag(g) R^T, and the gain one
    output, down                                       W -> R W, and a bias b -> R b; biases elsewhere stay
    embedding                                          E -> E R^T
    final norm, gain g   head                          H -> H diag(g) R^T, and the gain one

A tied head cannot absorb the final gain, since the embedding must not have it: the head of the converted model is then a matrix of its own.
Where that gain is one number it stays in its norm, and the tie stays too. A norm behind a sub-layer (`norms` "post", "sandwich") has
nothing behind it that could absorb its gain: such a model converts only where each of these gains is one number.

What is inside a sub-layer never meets R: heads, rotary positions, norms by head, SwiGLU.

Shapes: D width, V vocabulary, r rank, K joint rank.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from depthroute.common.errors import FailureError, RequestError
from depthroute.convert.basis import query_basis
from depthroute.convert.tensor_file import Stored, TensorReader
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnRes, AttnResConfig
from depthroute.train.checkpoint import model_tensors

READ_BY = {"query": "attention", "key": "attention", "value": "attention", "gate": "mlp", "up": "mlp"}  # and the norm before it
WRITE = ("output", "down")
QUERIES = ("query", "key_query", "value_query")


class Rewrite:
    """The tensors of the converted model, in float64, from those of the stored one."""

    def __init__(self, config: ModelConfig, source: TensorReader, rank: int | None = None) -> None:
        """`rank`: r of the converted model; None is its joint rank K, at least 1.

        Raises:
            RequestError: an assumption of the conversion fails, with its field or tensor; or r is below K or above the width.
            FailureError: the stored tensors are not those of the configuration.
        """
        self.config, self.source = config, source
        self.residual = _accepted(config)
        self._check_tensors()
        with torch.device("meta"):
            routing = AttnRes(self.residual, config.body)
        self._scale = routing.rank**-0.5 if self.residual.scaled else 1.0
        sigmoid = self.residual.weighting == "sigmoid"
        active = [f"residual.sites.{site}." for site in routing.sites if len(routing.counts(int(site))) > 1 or sigmoid]
        names = [name for name in source.stored if name.startswith(tuple(active)) and name.rpartition(".")[2] in QUERIES]
        self.queries = len(names)
        self.basis = query_basis(torch.stack([self._query(name) for name in names]))
        smallest = max(self.basis.joint_rank, 1)
        self.rank = smallest if rank is None else rank
        if not smallest <= self.rank <= config.width:
            raise RequestError(
                f"rank = {rank} is not allowed: the {self.queries} route queries have the joint rank {self.basis.joint_rank}; "
                f"the smallest rank that keeps every score is {smallest}, the largest is the width, {config.width}."
            )
        self.unties_head = config.tied_embeddings and not _one_number(source.tensor("norm.weight"))
        self.target = dataclasses.replace(
            config, tied_embeddings=config.tied_embeddings and not self.unties_head,
            residual=dataclasses.replace(
                self.residual, rank=self.rank, key_gain=False, scaled=False,
                key_norm="none" if self.residual.key_norm == "none" else "full",
            ),
        )  # fmt: skip

    def layout(self) -> dict[str, Stored]:
        """The tensors of the converted model: each in the type that what it is made of is stored in."""
        with torch.device("meta"):
            tensors = model_tensors(Decoder(self.target))
        stored = self.source.stored
        return {name: Stored(stored[name if name in stored else "embedding.weight"].dtype, tuple(t.shape)) for name, t in tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """A tensor of the converted model, float64."""
        parts = name.split(".")
        owner, local = parts[-2], parts[-1]
        if name in ("embedding.weight", "head.weight"):
            return self.rows(name, 0, self.config.vocabulary)
        if name.startswith("residual."):
            return self._in_basis(self._query(name)) if local in QUERIES else self.source.tensor(name)
        if local == "bias":
            bias = self.source.tensor(name)
            return self.basis.rows(bias) if owner in WRITE else bias
        if owner in READ_BY:
            norm = ".".join((*parts[:2], f"{READ_BY[owner]}_norm", "weight"))
            weight = self.source.tensor(name)
            return self.basis.columns(weight * self.source.tensor(norm) if norm in self.source.stored else weight)
        if owner in WRITE:
            return self.basis.rows(self.source.tensor(name))
        gain = self.source.tensor(name)
        absorbed = owner in ("attention_norm", "mlp_norm") or (name == "norm.weight" and not self.target.tied_embeddings)
        return torch.ones_like(gain) if absorbed else gain

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of the converted embedding or head: [stop - start, D], float64."""
        weight = self.source.rows(name if name in self.source.stored else "embedding.weight", start, stop)
        return self.basis.columns(weight * self.source.tensor("norm.weight") if name == "head.weight" else weight)

    def _query(self, name: str) -> Tensor:
        """A query as the scores use it, [D]: gain and scale folded in, zero where it has no coordinates."""
        gain = f"{name.rpartition('.')[0]}.key_gain"
        query = self.source.tensor(name) * self._scale
        if gain in self.source.stored:
            query = query * self.source.tensor(gain)
        return torch.nn.functional.pad(query, (self.config.width - len(query), 0))

    def _in_basis(self, query: Tensor) -> Tensor:
        """The query's last r coordinates in the new basis. All but the last K are exact zeros, so that the joint rank stays what it is."""
        rotated = self.basis.columns(query)[-self.rank :].clone()
        rotated[: self.rank - self.basis.joint_rank] = 0.0
        return rotated

    def _check_tensors(self) -> None:
        with torch.device("meta"):
            expected = model_tensors(Decoder(self.config))
        stored = self.source.stored
        for name in sorted(stored.keys() - expected.keys()):
            raise FailureError(f"the checkpoint has {name!r}, which the model of its configuration does not.")
        for name, tensor in expected.items():
            if name not in stored or stored[name].shape != tuple(tensor.shape):
                found = f"is {list(stored[name].shape)}" if name in stored else "is missing"
                raise FailureError(f"{name!r} {found} in the checkpoint; the model of its configuration has {list(tensor.shape)}.")
            if name.endswith("output_norm.weight") and not _one_number(self.source.tensor(name)):
                raise RequestError(
                    f"model.norms = {self.config.norms!r}: the gain {name!r} differs from channel to channel, and nothing behind that norm "
                    "can absorb it. Only norms whose gain is one number can be behind a sub-layer."
                )


def _accepted(config: ModelConfig) -> AttnResConfig:
    """The residual method, if a rotation of the residual stream leaves its scores and mixtures as they are."""
    residual = config.residual
    if type(residual) is not AttnResConfig:
        raise RequestError(f"residual.method = {residual.name!r} has no route queries that are the same for all tokens; only attnres has.")
    if residual.keys != "slice":
        raise RequestError(
            f"residual.keys = {residual.keys!r}: projected keys have coordinates of their own, {residual.rank} already; there is nothing "
            "to convert."
        )
    if residual.heads != 1:
        raise RequestError(
            f"residual.heads = {residual.heads}: groups of channels are mixed apart, and a rotation mixes channels. Only 1 converts."
        )
    if residual.key_norm == "slice" and residual.rank not in (None, config.width):
        raise RequestError(
            f"residual.key_norm = 'slice' with residual.rank = {residual.rank} of {config.width}: the RMS of some coordinates is not "
            "that of the rotated ones. Keys of the full width, or with key_norm 'full' or 'none', can be converted."
        )
    return residual


def _one_number(gain: Tensor) -> bool:
    return bool((gain == gain[0]).all())
