"""Parameter counts as closed formulas: the decoder, and what depth routing adds to it."""

from __future__ import annotations

from depthroute.common.errors import RequestError


def decoder_parameters(
    *, layers: int, width: int, mlp_width: int, vocabulary: int, tied: bool, key_value_width: int | None = None, qk_norm_width: int = 0
) -> int:
    """Parameters of a bias-free SwiGLU decoder without any residual method.

    Role-Decoupled Attention Residuals, Table 4: vocabulary x width + layers x (4 width^2 + 3 width mlp_width) + (2 layers + 1) x width
    norm gains, with tied embeddings.

    Args:
        tied: whether the output head is the embedding; otherwise it is a second vocabulary x width matrix.
        key_value_width: total width of the keys, and of the values; `width` unless queries are grouped.
        qk_norm_width: width of one gain of QK-norm (the width of a head, as a rule); each layer has two. 0 without QK-norm.
    """
    key_value_width = width if key_value_width is None else key_value_width
    embeddings = (1 if tied else 2) * vocabulary * width
    attention = 2 * width * width + 2 * width * key_value_width + 2 * qk_norm_width
    return embeddings + layers * (attention + 3 * width * mlp_width) + (2 * layers + 1) * width


def routing_parameters(*, reads: int, width: int, rank: int, key_gains: int = 0, value_routes: int = 0) -> int:
    """Parameters of depth routing with unprojected keys: one query a read, and key-norm gains where the keys have them.

    Role-Decoupled Attention Residuals counts `2 layers + 1` reads, the first and the output site included, a gain for each, and one value
    route a layer that shares its site's gain. Low-Rank Attention Residuals (Appendix F, eq. 58) counts `2 layers` queries and no gain:
    the first read has one source and needs none.

    Args:
        reads: sites that hold a query.
        width: coordinates of a source.
        rank: coordinates of a query and of a gain; `width` for plain Attention Residuals.
        key_gains: sites with a key-norm gain of `rank` coordinates.
        value_routes: further queries, for reads in a second role.

    Raises:
        RequestError: a rank outside 1 to `width`.
    """
    check_rank(width, rank)
    return rank * (reads + key_gains + value_routes)


def projected_key_parameters(
    *, layers: int, width: int, mlp_width: int, rank: int, attention_width: int | None = None
) -> int:
    """Parameters of the key projections: rank x (layers x (width + mlp_width) + width) (Low-Rank AttnRes, Appendix F, eq. 54).

    `attention_width` is that of all heads together; None is `width`. Each projection is used once a token, so this is also
    `depthroute.cost.flops.projected_key_flops`. The queries come on top.

    Raises:
        RequestError: a rank outside 1 to `width`.
    """
    check_rank(width, rank)
    return rank * (layers * ((attention_width or width) + mlp_width) + width)


def check_rank(width: int, rank: int) -> None:
    """Refuse a key rank that the width does not hold."""
    if not 1 <= rank <= width:
        raise RequestError(f"rank = {rank} is not allowed; it takes 1 to {width}, the width of the model.")
