"""The routing tensors of any safetensors checkpoint: found by their names, read alone.

Route queries and the gains of their key norms are a few megabytes of a checkpoint that may have terabytes. Names come from the index, or
from the headers of the files; only files with a routing tensor are opened for values, and no other tensor is read.

Shapes: R key rank, the width where keys are whole sources.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json
from depthroute.train import checkpoint

INDEX = "model.safetensors.index.json"
KINDS = {"output": ("output", "final"), "attention": ("attn", "attention"), "mlp": ("mlp", "ffn", "feed", "moe")}  # in this order
ROLE_ORDER = ("shared", "query_key", "query", "key", "value")
# Ours stores `query` at every site; what it reads for depends on which others there are beside it.
OUR_ROLES = {
    frozenset({"query"}): {"query": "shared"},
    frozenset({"query", "value_query"}): {"query": "query_key", "value_query": "value"},
    frozenset({"query", "key_query", "value_query"}): {"query": "query", "key_query": "key", "value_query": "value"},
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a project names its routing tensors.

    `query`, `gain`: regular expressions that match whole names. A query and a gain belong together where the named groups that both
    expressions have say the same; None is a layout without gains. Groups with a meaning:

    `site`: counted like sub-layers from 0, even before attention, odd before an MLP; the last one, if even, is the output read.
    `layer` and `kind`: instead of `site`; the kind says attention or attn, mlp or ffn, output or final. Without a kind the site is the one
    read of its layer, without a layer it is the output read.
    `role`: what a query reads for, where a site has several.

    `contains`: text in every such name, a quick test for indices of many names. `gain_required`: no query goes without a gain.
    """

    name: str
    query: str
    gain: str | None = None
    contains: str = ""
    gain_required: bool = True


LAYOUTS = (
    Layout(
        name="depthroute",
        query=r"(?:.*\.)?residual\.sites\.(?P<site>\d+)\.(?P<role>(?:key_|value_)?query)",
        gain=r"(?:.*\.)?residual\.sites\.(?P<site>\d+)\.key_gain",
        contains="residual.sites.",
        gain_required=False,
    ),
    Layout(
        name="Kimi K3",
        query=r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<kind>self_attention|mlp)_res_proj\.weight|(?:.*\.)?output_attn_res_proj\.weight",
        gain=r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<kind>self_attention|mlp)_res_norm\.weight|(?:.*\.)?output_attn_res_norm\.weight",
        contains="_res_",
    ),
    Layout(
        name="flash-linear-attention",
        query=r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<kind>attn|mlp)_res_proj\.weight|(?!.*layers\.)(?:.*\.)?res_proj\.weight",
        gain=r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<kind>attn|mlp)_res_norm\.weight|(?!.*layers\.)(?:.*\.)?res_norm\.weight",
        contains="res_",
    ),
)


@dataclass(frozen=True, kw_only=True)
class RouteQuery:
    """One query of a site, as it is stored.

    `kind`: "attention", "mlp", "output", or "layer" where a layer has one read. `layer`: None at the output. `role`: "shared", or what the
    site reads for: "query_key", "query", "key", "value", or what a pattern calls it. `active`: whether there is anything to choose. The
    read before the first attention has one source, the embedding: released models store its query and never execute it.

    `query` [R] and `gain` [R], None without one, in the stored dtype, with the names of their tensors.
    """

    kind: str
    layer: int | None
    role: str
    active: bool
    query: Tensor
    gain: Tensor | None
    query_name: str
    gain_name: str | None

    @property
    def site(self) -> str:
        """Where the query reads: `attention 3`, `output`."""
        return self.kind if self.layer is None else f"{self.kind} {self.layer}"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The route queries of a checkpoint by depth: a layer's attention before its MLP, the output last, the roles of a site together.

    `parameters`: how many numbers the routing tensors hold, gains that roles share counted once. `files`: how many files were opened for
    values.
    """

    layout: str
    queries: tuple[RouteQuery, ...]
    parameters: int
    files: int

    @property
    def width(self) -> int:
        """R, the length of every query."""
        return self.queries[0].query.numel()


def read_routing(path: Path, layout: Layout | None = None) -> Routing:
    """The routing tensors of a run folder's last checkpoint, of a safetensors file, of an index of shards, or of a folder with either.

    Args:
        layout: None recognises depthroute, Kimi K3 and flash-linear-attention by their names.

    Raises:
        RequestError: no safetensors, or no routing tensors in them; a pattern that is not one, or has no fitting groups; a query without a
            gain or the reverse; two queries of one role of a site; queries or gains of different lengths, or not vectors.
        FailureError: a file is truncated or missing, or lacks what the index says; values that are not finite floating-point numbers.
    """
    located = locate_tensors(path)
    layout, found = _recognise(path, located, LAYOUTS if layout is None else (layout,))
    wanted = [name for pair in found for name in (pair.query, pair.gain) if name is not None]
    tensors = _load(list(dict.fromkeys(wanted)), located)
    queries = tuple(
        RouteQuery(
            kind=pair.kind, layer=pair.layer, role=pair.role, active=pair.layer != 0 or pair.kind == "mlp",
            query=tensors[pair.query], gain=None if pair.gain is None else tensors[pair.gain], query_name=pair.query, gain_name=pair.gain,
        )
        for pair in found
    )  # fmt: skip
    width = queries[0].query.numel()
    for one in queries:
        if one.query.numel() != width:
            raise RequestError(f"{one.query_name!r} has {one.query.numel()} numbers and {queries[0].query_name!r} has {width}; "
                               "the queries of one model have one length. A query pattern can tell two models apart.")  # fmt: skip
        if one.gain is not None and one.gain.numel() != width:
            raise RequestError(f"{one.gain_name!r} has {one.gain.numel()} numbers and its query {one.query_name!r} has {width}.")
    return Routing(
        layout=layout.name,
        queries=queries,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        files=len({located[name] for name in tensors}),
    )


class _Pair(NamedTuple):
    """The names of a query and its gain, and what they are."""

    kind: str
    layer: int | None
    role: str
    query: str
    gain: str | None


def _recognise(path: Path, names: Iterable[str], layouts: tuple[Layout, ...]) -> tuple[Layout, list[_Pair]]:
    """The layout with most queries among the names, and these by depth. Kimi K3 and flash-linear-attention share the names of MLP sites."""
    names = list(names)
    matched = [(layout, _matches(layout.query, layout, names)) for layout in layouts]
    layout, queries = max(matched, key=lambda pair: len(pair[1]))
    if not queries:
        looked_for = "; ".join(f"{layout.name}: {layout.query}" for layout in layouts)
        raise RequestError(f"{path} has no routing tensors among its {len(names)}. Looked for, as regular expressions of a whole name: "
                           f"{looked_for}. Another layout takes a query pattern of its own (--query-pattern).")  # fmt: skip
    return layout, _paired(layout, queries, {} if layout.gain is None else _matches(layout.gain, layout, names))


def _matches(pattern: str, layout: Layout, names: list[str]) -> dict[str, dict[str, str | None]]:
    """The names that a pattern matches whole, with its groups."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise RequestError(f"{pattern!r} is not a regular expression ({error}).") from error
    if not {"site", "layer"} & set(expression.groupindex):
        raise RequestError(f"the pattern {pattern!r} does not say where a tensor belongs; it takes a named group, (?P<site>\\d+) or "
                           "(?P<layer>\\d+) with (?P<kind>...).")  # fmt: skip
    matches = ((name, expression.fullmatch(name)) for name in names if layout.contains in name)
    return {name: match.groupdict() for name, match in matches if match is not None}


def _paired(layout: Layout, queries: dict[str, dict[str, Any]], gains: dict[str, dict[str, Any]]) -> list[_Pair]:
    """Queries with their gains, by depth."""
    shared = sorted(next(iter(queries.values())).keys() & next(iter(gains.values()), {}).keys())
    if gains and not shared:
        raise RequestError(f"{layout.query!r} and {layout.gain!r} have no named group in common, so no gain can be told to be a query's.")
    gain_of: dict[tuple[str | None, ...], str] = {}
    for name, groups in gains.items():
        key = tuple(groups[group] for group in shared)
        if key in gain_of:
            raise RequestError(f"{gain_of[key]!r} and {name!r} are gains of the same site; a gain pattern can tell them apart.")
        gain_of[key] = name
    left = dict(gain_of)
    end = max((_number(name, "site", groups["site"]) for name, groups in queries.items() if groups.get("site") is not None), default=1)
    places: dict[tuple[str, int | None, str], _Pair] = {}
    for name, groups in queries.items():
        key = tuple(groups[group] for group in shared)
        gain = gain_of.get(key)
        left.pop(key, None)
        if gain is None and layout.gain is not None and layout.gain_required:
            raise RequestError(f"{name!r} has no gain of its key norm; it should match {layout.gain}.")
        kind, layer = _place(name, groups, end)
        place = (kind, layer, groups.get("role") or "shared")
        if place in places:
            site = kind if layer is None else f"{kind} {layer}"
            raise RequestError(f"{places[place].query!r} and {name!r} are both a query of {site}; a query pattern can tell them apart.")
        places[place] = _Pair(*place, name, gain)
    if left:
        raise RequestError(f"{next(iter(left.values()))!r} is the gain of a key norm without a query; it should match {layout.query}.")
    return sorted(_named_roles(places.values()), key=_depth)


def _named_roles(pairs: Iterable[_Pair]) -> list[_Pair]:
    roles: dict[tuple[str, int | None], set[str]] = defaultdict(set)
    for pair in pairs:
        roles[pair.kind, pair.layer].add(pair.role)
    names = {site: OUR_ROLES.get(frozenset(of_site), {}) for site, of_site in roles.items()}
    return [pair._replace(role=names[pair.kind, pair.layer].get(pair.role, pair.role)) for pair in pairs]


def _depth(pair: _Pair) -> tuple[float, bool, int, str]:
    order = ROLE_ORDER.index(pair.role) if pair.role in ROLE_ORDER else len(ROLE_ORDER)
    return (float("inf") if pair.layer is None else pair.layer, pair.kind == "mlp", order, pair.role)


def _place(name: str, groups: dict[str, Any], end: int) -> tuple[str, int | None]:
    """Kind and layer of a site. `end`: the highest `site` there is; if even, it is the output, for a model ends with an MLP."""
    if groups.get("site") is not None:
        site = _number(name, "site", groups["site"])
        return ("output", None) if site == end and end > 0 and end % 2 == 0 else (("attention", "mlp")[site % 2], site // 2)
    if groups.get("layer") is None:
        return "output", None
    layer = _number(name, "layer", groups["layer"])
    if groups.get("kind") is None:
        return "layer", layer
    for kind, words in KINDS.items():
        if any(word in groups["kind"].lower() for word in words):
            return kind, None if kind == "output" else layer
    known = ", ".join(word for words in KINDS.values() for word in words)
    raise RequestError(f"{name!r} is of the kind {groups['kind']!r} by its pattern; a kind has one of these in it: {known}.")


def _number(name: str, group: str, text: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{name!r} has {text!r} for its {group}; a {group} is a whole number from 0, (?P<{group}>\\d+).")
    return int(text)


def locate_tensors(path: Path) -> dict[str, Path]:
    """The file of every tensor by its name."""
    if path.name.endswith(".index.json") and path.exists():
        return _indexed(path)
    if path.is_file():
        return _inside([path])
    if not path.is_dir():
        raise RequestError(f"{path} does not exist; it takes a run folder, a safetensors file, or a folder of safetensors files.")
    if (path / "checkpoints").is_dir():
        found = checkpoint.latest(path)
        if found is None:
            raise RequestError(f"{path} has no checkpoint yet; train it first.")
        return _inside([checkpoint.model_file(found)])
    indices = [path / INDEX] if (path / INDEX).exists() else sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise RequestError(f"{path} has several indices ({', '.join(index.name for index in indices)}); name one of them.")
    files = sorted(path.glob("*.safetensors"))
    if not indices and not files:
        raise RequestError(f"{path} holds no safetensors. Other formats are not read: most of them run code when they are loaded.")
    return _indexed(indices[0]) if indices else _inside(files)


def _indexed(index: Path) -> dict[str, Path]:
    value = read_json(index)
    shards = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise FailureError(f"{index} has no weight_map from tensors to files; it was cut short or changed by hand.")
    files = {shard: index.parent / shard for shard in set(shards.values())}
    for shard in files:
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise FailureError(f"{index} names the shard {shard!r}, which lies outside its folder.")
    return {name: files[shard] for name, shard in shards.items()}


def _inside(files: list[Path]) -> dict[str, Path]:
    located: dict[str, Path] = {}
    for file in files:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # not a mapping
                if name in located:
                    raise RequestError(f"{name!r} is in {located[name]} and in {file.name}; name one of the files.")
                located[name] = file
    return located


def _load(names: list[str], located: dict[str, Path]) -> dict[str, Tensor]:
    """The tensors as vectors, every file opened once."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        by_file[located[name]].append(name)
    tensors = {}
    for file, inside in by_file.items():
        if not file.exists():
            raise FailureError(f"{file} is missing; by the index it holds {inside[0]!r}. Download that file again.")
        with _opened(file) as handle:
            present = set(handle.keys())
            for name in inside:
                if name not in present:
                    raise FailureError(f"{file} lacks {name!r}, which it has by the index; download both again.")
                tensors[name] = _vector(file, name, handle)
    return tensors


def _vector(file: Path, name: str, handle: Any) -> Tensor:
    shape = handle.get_slice(name).get_shape()  # before its values: a pattern may have matched a matrix of gigabytes
    if sum(size != 1 for size in shape) > 1 or 0 in shape or not shape:
        raise RequestError(f"{name!r} is {list(shape)}; a query or a gain is a vector, [R], [1, R] or [R, 1].")
    tensor: Tensor = handle.get_tensor(name).reshape(-1).clone()  # cloned: what was read is a window into the mapped file
    if not tensor.is_floating_point():
        raise FailureError(f"{name!r} in {file} is stored as {str(tensor.dtype).removeprefix('torch.')}, not as floating-point numbers.")
    if not tensor.double().isfinite().all():
        raise FailureError(f"{name!r} in {file} has values that are not finite.")
    return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(file, framework="pt")
    except (SafetensorError, ValueError) as error:
        raise FailureError(f"{file} is truncated, or not safetensors ({error}).") from error
    with handle:
        yield handle
