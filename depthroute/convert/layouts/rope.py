"""Rotary positions as the configurations of transformers give them, old (rope_theta, rope_scaling) and new (rope_parameters)."""

from __future__ import annotations

from depthroute.common.errors import RequestError, choose
from depthroute.convert.foreign import Fields
from depthroute.model.rotary import RopeScaling

KINDS = ("default", "linear", "llama3")


def rotary(fields: Fields, *, context: int, theta: float | None = 10_000.0) -> tuple[float, RopeScaling | None]:
    """The base of the frequencies and what slows them down.

    `context`: max_position_embeddings, which "llama3" takes where it names no original context. `theta`: the layout's default; None: it
    must be there.

    Raises:
        RequestError: a kind of scaling, or a part of one, that our decoder does not have; no base.
    """
    scaling, parameters = fields.take("rope_scaling"), fields.take("rope_parameters")
    top, partial = fields.take("rope_theta"), fields.take("partial_rotary_factor")
    given = scaling or parameters or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise fields.refused("rope_parameters", given, "one object for all layers, with rope_type and rope_theta")
    inner = Fields({"rope_theta": top, "partial_rotary_factor": partial, **given}, f"the rope_parameters of {fields.where}")
    base = inner.number("rope_theta", theta)
    inner.only("partial_rotary_factor", 1, 1.0)
    old, kind = inner.take("type"), inner.take("rope_type")
    kind = kind or old or "default"
    if kind not in KINDS:
        raise RequestError(f"{inner.where}: {choose('rope_type', str(kind), KINDS)}")
    inner.only("attention_factor", 1, 1.0)
    found = None
    if kind == "linear":
        found = RopeScaling(kind="linear", factor=inner.number("factor"))
    elif kind == "llama3":
        found = RopeScaling(
            kind="llama3", factor=inner.number("factor"), original_context=inner.whole("original_max_position_embeddings", context),
            low_frequency=inner.number("low_freq_factor"), high_frequency=inner.number("high_freq_factor"),
        )  # fmt: skip
    inner.ignore("original_max_position_embeddings", *(() if found else ("factor",)))
    inner.finish()
    return base, found
