"""Activations that a training step keeps for its backward pass, in bytes per token.

What counts is what autograd saves in eager mode with fused kernels: each tensor once, however many steps need it. The attention is a fused
one (queries, keys, values, output and a log-sum-exp a head), the norms keep their input and a root. On a CPU (`on_cpu`) PyTorch also keeps
the rows that a norm divides, and the attention's output twice: as its kernel leaves it and as the projection takes it. Gradients and what
lives only for a moment are not activations and are not here; the loss is not counted.

In mixed precision (`mixed`: float32 parameters under autocast to bfloat16) a projection whose input is float32 keeps a rounded copy of its
own, so that an attention keeps three of its input and an MLP two.

For the AttnRes family there are formulas; every other method is run without storage and counted. So is what lies inside KDA, latent
attention and experts (`depthroute.cost.inside`), where nothing but attention's kernel is taken to be fused and norms keep what they keep
on a CPU: off it, this is more than there is. A method that makes the values of an attention is counted as if it did so in place of it.
In mixed precision these bodies are met to 5 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from depthroute.cost.inside import Inside, has_formula
from depthroute.cost.reads import site_reads
from depthroute.cost.recorded import bytes_of, copies_of_input, has_norm, recorded
from depthroute.model import ModelConfig
from depthroute.residual import AttnResConfig

EXACT = 4  # bytes of float32


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes per token over the whole depth."""

    sublayers: int
    """Inside attentions and MLPs, their inputs and that of the head included."""
    sources: int
    """What the residual method carries and its backward needs: sources, streams, partial sums."""
    mixtures: int
    """What reads keep beside: mixtures before a norm, reads ahead."""
    statistics: int
    """Scores, weights, roots, coefficients."""

    @property
    def total(self) -> int:
        return self.sublayers + self.sources + self.mixtures + self.statistics


def training_activations(
    model: ModelConfig, *, checkpointed: bool = False, mixed: bool = False, on_cpu: bool = False
) -> Activations:
    """What a training step keeps per token, in float32 or in mixed precision.

    `checkpointed`: every read and the norm behind it are computed again in the backward pass. What sub-layers get stays, and so does what
    the residual method carries from site to site; for the AttnRes family reads ahead are computed again too.
    """
    heads, values = model.heads * model.resolved_head_width, model.resolved_key_value_heads * model.resolved_head_width
    compute, copies = 2 if mixed else EXACT, 2 if on_cpu else 1
    normed = roots = 0  # an attention's own norms: numbers and roots
    if model.qk_norm or model.norms == "hybrid":
        normed, roots = heads + values, model.heads + model.resolved_key_value_heads
    if model.norms == "hybrid":
        normed, roots = normed + values, roots + model.resolved_key_value_heads
    inside = numbers = 0  # bytes, and numbers of statistics
    for site in range(2 * model.layers):
        if model.norms in ("post", "sandwich"):
            inside, numbers = inside + EXACT * copies * model.width, numbers + 1
        if site % 2 == 0 and model.mixer(site // 2) != "kda":
            numbers += model.heads
        if not has_formula(model, site):
            continue
        if site % 2:
            inside += compute * 4 * model.mlp_width
        else:
            inside, numbers = inside + compute * copies * heads + EXACT * copies * normed, numbers + roots
    if isinstance(model.residual, AttnResConfig):
        found = _attnres(model.residual, model, checkpointed, mixed)
    else:
        found = _run(model, checkpointed, mixed)
    return Activations(
        sublayers=inside + found.inside + found.handed + found.attended,
        sources=found.sources,
        mixtures=found.mixtures + (EXACT * found.normed * model.width if on_cpu else 0),
        statistics=found.statistics + EXACT * (numbers + found.normed),
    )


@dataclass
class _Found:
    """Bytes per token, and a number of rows."""

    sources: int = 0
    mixtures: int = 0
    statistics: int = 0
    handed: int = 0  # to sub-layers, behind the norm
    attended: int = 0  # queries, keys and values
    inside: int = 0  # of sub-layers without a formula
    normed: int = 0  # rows that a norm of its own has normalised


def _attnres(method: AttnResConfig, model: ModelConfig, checkpointed: bool, mixed: bool) -> _Found:
    """Every write makes one source or partial sum, and every read hands on what its fused norm puts out."""
    width, sublayers = model.width, 2 * model.layers
    ends = (0, *method.block_ends(sublayers))
    compute = 2 if mixed else EXACT
    memory = compute if model.memory_dtype == "compute" else EXACT
    values = model.resolved_key_value_heads * model.resolved_head_width
    softmax = sum(has_formula(model, site) for site in range(0, sublayers, 2))
    attended = compute * softmax * (model.heads * model.resolved_head_width + 2 * values)
    found = _Found(sources=memory * (sublayers + 1) * width, attended=attended)
    if method.keys == "projected":
        found.sources += memory * (sublayers + 1) * (method.rank or width)
        found.handed += compute * width if memory != compute else 0  # the embedding, rounded for its own key
    if method.values == "normed":  # beside what is normalised; for a partial sum only until its read is over
        kept = len(ends) if checkpointed else sublayers + 1
        found.mixtures += EXACT * kept * width
        found.statistics += EXACT * kept
    if method.summary == "rms":  # each output is needed beside the sum of its block
        rows = sum(max(1, end - start - 1) for start, end in pairwise(ends)) if memory == EXACT else sublayers  # or a copy of each
        found.sources += EXACT * rows * width
        found.statistics += EXACT * sublayers
    inside = Inside(model, mixed)
    for site, read in enumerate(site_reads(method, sublayers)):
        norm = has_norm(model, site)
        fused = norm and not (method.roles == "average" and site % 2 == 0 and site < sublayers)  # an average is taken before its norm
        kind = EXACT if norm and not fused else memory  # of what is handed on
        copied = kind != compute and site < sublayers
        formula = site == sublayers or has_formula(model, site)
        if not formula:
            found.inside += inside.saved(site, torch.float32 if kind == EXACT else torch.bfloat16)
        if not copied:
            found.handed += kind * read.handed * width
        elif formula:
            found.handed += compute * copies_of_input(site) * width
        if checkpointed:
            continue
        if norm and not fused:
            found.mixtures += EXACT * width
            found.normed += 1
        if site == 0 and not method.first_read:  # a softmax of one score, by any query
            found.statistics += EXACT * (5 + fused)
            continue
        if read.merged:
            found.mixtures += memory * read.queries * width
        found.statistics += EXACT * read.queries * fused
        found.statistics += _scalars(method, read.queries, 1 if read.merged else read.sources, prior=read.merged)
        if read.ahead:
            found.statistics += _scalars(method, read.ahead, read.ahead_sources)
    return found


def _scalars(method: AttnResConfig, queries: int, sources: int, prior: bool = False) -> int:
    """Bytes of what one read keeps for its backward: scores, weights (with that of a `prior`), the softmax's maximum and sum, key roots."""
    scores = queries * method.heads * (2 * sources + prior + 2 * (method.weighting == "softmax"))
    return EXACT * (scores + sources * (method.key_norm != "none"))


def _run(model: ModelConfig, checkpointed: bool, mixed: bool) -> _Found:
    run, inside = recorded(model, checkpointed, mixed), Inside(model, mixed)
    found = _Found(
        handed=sum(map(bytes_of, run.handed.values())) + 2 * run.copied, attended=sum(map(bytes_of, run.attended.values())),
        normed=0 if checkpointed else run.normed, inside=sum(inside.saved(site, dtype) for site, dtype in run.unknown.items()),
    )  # fmt: skip
    for key, tensor in (run.saved | run.carried if checkpointed else run.saved).items():
        if key in run.handed or key in run.attended or key in run.projected:
            continue
        size = bytes_of(tensor)
        if size < model.resolved_head_width * tensor.element_size():
            found.statistics += size
        elif key in run.carried:
            found.sources += size
        else:
            found.mixtures += size
    return found
