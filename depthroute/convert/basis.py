"""The span of route queries, and an orthogonal basis that has it in its last coordinates (Low-Rank AttnRes, Appendix B).

Shapes: T queries, D width, K joint rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Basis:
    """Orthonormal coordinates of the residual stream: x becomes R x, and the queries then use only the last K coordinates.

    `rotation`: R [D, D], float64; None is the identity. `joint_rank`: K, 0 if every query is zero. `singular_values`: of the queries,
    descending. `tolerance`: those above it count for K.
    """

    rotation: Tensor | None
    joint_rank: int
    singular_values: Tensor
    tolerance: float

    def columns(self, weight: Tensor) -> Tensor:
        """W R^T: the weight [..., D] of what reads the stream, and every vector of the stream as a row."""
        return weight if self.rotation is None else weight @ self.rotation.T

    def rows(self, weight: Tensor) -> Tensor:
        """R W: the weight [D, ...] of what writes to the stream."""
        return weight if self.rotation is None else self.rotation @ weight


def query_basis(queries: Tensor) -> Basis:
    """The basis for queries [T, D] as the scores use them: key gains and scales folded in, float64.

    K counts the singular values above max(T, D) x 2^-52 x the largest, which is what float64 can tell from zero. The rounding of stored
    values is not forgiven: queries that depend on each other but for it are independent.

    Queries that already use the last K coordinates only keep their coordinates, so that a second conversion changes no weight.
    """
    count, width = queries.shape
    _, values, directions = torch.linalg.svd(queries, full_matrices=False)
    tolerance = max(count, width) * torch.finfo(queries.dtype).eps * (values[0].item() if len(values) else 0.0)
    rank = int((values > tolerance).sum())
    if not queries[:, : width - rank].any():
        return Basis(None, rank, values, tolerance)
    # Householder reflections: the complement is orthogonal to the span to rounding, whatever the singular values are
    complete, _ = torch.linalg.qr(directions[:rank].T, mode="complete")
    rotation = torch.cat((complete[:, rank:], complete[:, :rank]), dim=1).T.contiguous()
    return Basis(rotation, rank, values, tolerance)
