"""What a body has in place of softmax attention and dense MLPs, in words. Reports need it too, and they load no torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

MIXER_NAMES = {"softmax": "softmax", "kda": "KDA", "mla": "MLA"}


def body_facts(model: Mapping[str, Any]) -> dict[str, str]:
    """Of the JSON of a `ModelConfig`: `mixers`, `experts`, `activation` and `documents`, each where it is not the usual one.

    A field that is not there, as one that the arms of a study do not share, says nothing.
    """
    facts = {}
    mixers = model.get("mixers")
    if mixers and (model.get("kda") is not None or model.get("mla") is not None):
        facts["mixers"] = mixers_in_words(mixers, model.get("layers"), model.get("last_mixer"))
    if model.get("experts"):
        facts["experts"] = experts_in_words(model["experts"])
    if model.get("activation", "swiglu") != "swiglu":
        facts["activation"] = str(model["activation"])
    if model.get("document_end") is not None:
        facts["documents"] = "do not see each other"
    return facts


def mixers_in_words(mixers: list[str], layers: int | None, last: str | None) -> str:
    """The mixers in the order in which they repeat, such as "3 KDA : 1 MLA", and the last one where it is another."""
    runs = [(MIXER_NAMES.get(name, name), len(list(run))) for name, run in groupby(mixers)]
    words = " : ".join(f"{count} {name}" for name, count in runs) if len(runs) > 1 else runs[0][0]
    usual = mixers[(layers - 1) % len(mixers)] if layers else None
    return words if last in (None, usual) else f"{words}, last {MIXER_NAMES.get(str(last), last)}"


def experts_in_words(experts: Mapping[str, Any]) -> str:
    """Such as "8 of 256 + 1 shared x 1,024", and what else is not as usual."""
    shared = f" + {experts['shared']} shared" if experts.get("shared") else ""
    latent = f" in a latent width of {experts['latent']:,}" if experts.get("latent") else ""
    dense = f", behind {experts['dense_layers']} dense" if experts.get("dense_layers") else ""
    return f"{experts['chosen']} of {experts['number']}{shared} x {experts['width']:,}{latent}{dense}"
