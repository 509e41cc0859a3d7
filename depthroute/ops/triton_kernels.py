# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The GPU kernels of depth attention, in Triton: a program per token forward, a program per run of tokens backward.

Shapes: N tokens, S sources, M queries, H heads, D width, R key rank. A row lies in registers as a tile [1, BH, BG] of heads by the
G = D/H channels of each; what each query has of its own as [BM, BH, BG] or [BM, BH]. BM, BH, BG, BK and BS are the powers of two that hold
M, H, D/H, R/H and S. Tuples over the sources have length BS, with padding at the end, or length 1 if the sources do not differ.

KEYS says where the key of a source is: "row", the last R coordinates of the row's tile; "slice", the same coordinates in a tile [1, BH, BK]
of their own, because with several heads a key coordinate and the channel it lies in can belong to different heads; "projected", a tensor
of its own.
"""

import triton
import triton.language as tl


@triton.jit
def _chosen(options, index):
    """options[index] for a number, or a block of them, known only when it runs: Triton has no other way into a tuple."""
    found = tl.where(index == 0, options[0], options[0])
    for j in tl.static_range(1, len(options)):
        found = tl.where(index == j, options[j], found)
    return found


@triton.jit
def _base(tensors, index):
    """The pointer to tensors[index]. It is chosen as a number: Triton 3.6 cannot choose between pointers on ROCm, and 3.9
    forgets their alignment."""
    found = tl.where(index == 0, tensors[0].to(tl.int64), tensors[0].to(tl.int64))
    for j in tl.static_range(1, len(tensors)):
        found = tl.where(index == j, tensors[j].to(tl.int64), found)
    return tl.multiple_of(found.to(tensors[0].dtype), 16)


@triton.jit
def _row(bases, strides, s, S, token, place, mask, UNIT: tl.constexpr):
    """Row `token` of tensor s as it is stored, or zeros for s = S. Strides come as 2 x units + 3, see `triton_backend._Rows`."""
    stride = ((_chosen(strides, s) - 3) >> 1).to(tl.int64) * UNIT
    return tl.load(_base(bases, s) + token * stride + place, tl.where(s < S, mask, False), other=0.0)


@triton.jit
def _channels(D: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BG: tl.constexpr):
    """The channel of each place of a row's tile, and which places are real: [1, BH, BG] both."""
    h, g = tl.arange(0, BH)[None, :, None], tl.arange(0, BG)[None, None, :]
    return h * (D // H) + g, (h < H) & (g < D // H)


@triton.jit
def _coordinates(
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The key coordinate of each place of a key's tile, and which places are real: [1, BH, BG] for "row", else [1, BH, BK]."""
    if KEYS == "row":
        channel, in_row = _channels(D, H, BH, BG)
        coordinate = channel - (D - R)
        real = in_row & (coordinate >= 0)
    else:
        coordinate, real = _channels(R, H, BH, BK)
    return coordinate, real


@triton.jit
def _key(row, keys, key_strides, s, S, token, coordinate, in_key, D, R, KEYS: tl.constexpr, UNIT: tl.constexpr):
    if KEYS == "row":
        key = tl.where(in_key, row, 0.0)
    else:
        place = coordinate + (D - R) if KEYS == "slice" else coordinate
        key = _row(keys, key_strides, s, S, token, place, in_key, UNIT).to(row.dtype)
    return key


@triton.jit(do_not_specialize=["S"])
def forward_kernel(
    sources, strides, keys, key_strides, queries, bias, gain, prior_outputs, prior_maxima, prior_sums,
    outputs, maxima, sums, weights, scores, rstd, output_rstd, M, S,
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BG: tl.constexpr,
    BK: tl.constexpr, KEYS: tl.constexpr, NORM: tl.constexpr, SOFTMAX: tl.constexpr, EPS: tl.constexpr, OUTPUT_EPS: tl.constexpr,
    UNIT: tl.constexpr, KEY_UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BM of the queries of one token. Sources are read once, and added up by an online softmax."""
    EXACT: tl.constexpr = queries.dtype.element_ty
    parts = tl.cdiv(M, BM)
    token = (tl.program_id(0) // parts).to(tl.int64)
    m, h = tl.program_id(0) % parts * BM + tl.arange(0, BM), tl.arange(0, BH)
    channel, in_row = _channels(D, H, BH, BG)
    coordinate, in_key = _coordinates(D, R, H, BH, BG, BK, KEYS)
    wanted = (m < M)[:, None] & (h < H)[None, :]
    in_rows = (m < M)[:, None, None] & in_row
    at_head = token * H + h[None, :]
    at_query = (token * M + m[:, None]) * H + h[None, :]  # a row of scores or weights

    query = tl.load(queries + m[:, None, None] * R + coordinate, (m < M)[:, None, None] & in_key, other=0.0)
    mixed = tl.zeros([BM, BH, BG], EXACT)
    largest = tl.full([BM, BH], float("-inf"), EXACT)
    total = tl.zeros([BM, BH], EXACT)
    if SOFTMAX and prior_outputs is not None:
        prior_max = tl.load(_base(prior_maxima, m)[:, None] + at_head, wanted, other=0.0)
        prior_sum = tl.load(_base(prior_sums, m)[:, None] + at_head, wanted, other=1.0)
        largest, total = prior_max, prior_sum

    for s in tl.range(0, S, num_stages=STAGES):
        row = _row(sources, strides, s, S, token, channel, in_row, UNIT).to(EXACT)
        key = _key(row, keys, key_strides, s, S, token, coordinate, in_key, D, R, KEYS, KEY_UNIT)
        score = tl.sum(query * key, 2)
        if NORM != "none":
            square = tl.sum(row * row) / D if NORM == "full" else tl.sum(key * key) / R
            scale = tl.rsqrt(square + EPS)
            tl.store(rstd + token * S + s, scale)
            # Fused with nothing: the product and the bias's sum as one operation would be rounded otherwise than the score that is stored.
            score = tl.fma(score, scale, 0.0)
        tl.store(scores + at_query * S + s, score, wanted)
        if bias is not None:
            score += tl.load(bias + m[:, None] * S + s, (m < M)[:, None], other=0.0)
        if SOFTMAX:
            raised = tl.maximum(largest, score)
            shift = tl.where(raised == float("-inf"), 0.0, raised)  # nothing but sources with a bias of minus infinity so far
            faded, share = tl.exp(largest - shift), tl.exp(score - shift)
            total = total * faded + share
            mixed = mixed * faded[:, :, None] + share[:, :, None] * row
            largest = raised
        else:
            mixed += _sigmoid(score)[:, :, None] * row

    if SOFTMAX:
        mixed *= (1.0 / total)[:, :, None]
        tl.store(_base(maxima, m)[:, None] + at_head, largest, wanted)
        tl.store(_base(sums, m)[:, None] + at_head, total, wanted)
    W = S if prior_outputs is None else S + 1
    if prior_outputs is not None:
        prior_weight = tl.full([BM, BH], 1.0, EXACT)
        if SOFTMAX:
            prior_weight = _ratio(tl.exp(prior_max - largest) * prior_sum, total)
        tl.store(weights + at_query * W + S, prior_weight, wanted)
        prior = tl.load(_base(prior_outputs, m)[:, None, None] + token * D + channel, in_rows, other=0.0).to(EXACT)
        mixed += prior_weight[:, :, None] * prior
    if gain is not None:
        output_scale = tl.rsqrt(tl.sum(tl.sum(mixed * mixed, 2), 1) / D + OUTPUT_EPS)
        tl.store(output_rstd + token * M + m, output_scale, m < M)
        mixed *= output_scale[:, None, None] * tl.load(gain + channel, in_row, other=0.0)
    places = _base(outputs, m)[:, None, None] + token * D + channel
    tl.store(places, mixed.to(outputs[0].dtype.element_ty), in_rows)

    tl.debug_barrier()  # the scores are read back by other threads than those that wrote them
    for start in range(0, S, 8):
        some = start + tl.arange(0, 8)[None, None, :]
        present = wanted[:, :, None] & (some < S)
        found = tl.load(scores + at_query[:, :, None] * S + some, present, other=float("-inf"))
        if bias is not None:
            found += tl.load(bias + m[:, None, None] * S + some, (m < M)[:, None, None] & (some < S), other=0.0)
        weight = _ratio(tl.exp(found - largest[:, :, None]), total[:, :, None]) if SOFTMAX else _sigmoid(found)
        tl.store(weights + at_query[:, :, None] * W + some, weight, present)


@triton.jit
def _ratio(x, y):
    """Rounded as IEEE asks, which the usual division of float32 is not: x / x is 1."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def _sigmoid(x):
    """Without overflow at either end."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit(do_not_specialize=["N", "first", "count", "S", "tokens_each", "slots", "gain_slot"])
def backward_kernel(
    sources, strides, keys, key_strides, queries, gain, prior_outputs, prior_sums, sums, weights, scores, rstd, output_rstd,
    output_gradients, sum_gradients, weight_gradients, into, into_exact, flags, key_gradients, prior_gradients, prior_sum_gradients,
    partial, spare, N, first, count, M, S, tokens_each, slots, gain_slot,
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BG: tl.constexpr,
    BK: tl.constexpr, BS: tl.constexpr, KEYS: tl.constexpr, NORM: tl.constexpr, SOFTMAX: tl.constexpr, BIAS: tl.constexpr,
    ALONE: tl.constexpr, ADD_TO_KEYS: tl.constexpr, UNIT: tl.constexpr, KEY_UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients at queries first to first + count of `tokens_each` tokens; those of queries, bias and gain summed over these tokens.

    A first look at a token's rows remakes the mixture, whose product with the upstream gradient is what softmax and output norm need. The
    second look, when the rows are still in the cache, finds the gradients of scores and sources.
    """
    EXACT: tl.constexpr = queries.dtype.element_ty
    STORED: tl.constexpr = sources[0].dtype.element_ty
    PRIOR: tl.constexpr = prior_outputs is not None
    MIXTURE: tl.constexpr = SOFTMAX or gain is not None
    program = tl.program_id(0).to(tl.int64)
    m, h, bucket = tl.arange(0, BM), tl.arange(0, BH), tl.arange(0, BS)
    channel, in_row = _channels(D, H, BH, BG)
    coordinate, in_key = _coordinates(D, R, H, BH, BG, BK, KEYS)
    wanted = (m < count)[:, None] & (h < H)[None, :]
    in_rows = (m < count)[:, None, None] & in_row
    in_keys = (m < count)[:, None, None] & in_key
    at_slot = (first + m)[:, None, None] * R + coordinate
    W = S + 1 if PRIOR else S

    query = tl.load(queries + at_slot, in_keys, other=0.0)
    of_query = tl.zeros_like(query)
    if BIAS:
        of_bias = tl.zeros([BM, BS], EXACT)
    if gain is not None:
        of_gain = tl.zeros([1, BH, BG], EXACT)
        gains = tl.load(gain + channel, in_row, other=0.0)

    start = program * tokens_each
    for offset in range(tl.minimum(tokens_each, N - start).to(tl.int32)):
        token = start + offset
        at_head = token * H + h[None, :]
        at_query = (token * M + first + m[:, None]) * H + h[None, :]
        upstream = tl.load(_base(output_gradients, m)[:, None, None] + token * D + channel, in_rows, other=0.0).to(EXACT)

        # ---- the mixture, and what depends on it ----
        mixed = tl.zeros([BM, BH, BG], EXACT)
        mean = tl.zeros([BM, BH], EXACT)  # over the weights, of their gradients
        if MIXTURE:
            for s in tl.range(0, S, num_stages=STAGES):
                row = _row(sources, strides, s, S, token, channel, in_row, UNIT).to(EXACT)
                weight = tl.load(weights + at_query * W + s, wanted, other=0.0)
                mixed += weight[:, :, None] * row
                if weight_gradients is not None:
                    mean += weight * tl.load(weight_gradients + at_query * W + s, wanted, other=0.0)
        if PRIOR:
            prior = tl.load(_base(prior_outputs, m)[:, None, None] + token * D + channel, in_rows, other=0.0).to(EXACT)
            prior_weight = tl.load(weights + at_query * W + S, wanted, other=0.0)
            mixed += prior_weight[:, :, None] * prior
        if gain is not None:
            output_scale = tl.load(output_rstd + token * M + first + m, m < count, other=0.0)[:, None, None]
            normalised = mixed * output_scale
            of_gain += tl.sum(upstream * normalised, 0)[None]
            upstream *= gains
            upstream = output_scale * (upstream - normalised * (tl.sum(tl.sum(upstream * normalised, 2), 1) / D)[:, None, None])
        of_sum = tl.zeros([BM, BH], EXACT)
        if SOFTMAX:
            mean += tl.sum(upstream * mixed, 2)
            if sum_gradients is not None:
                of_sum = tl.load(_base(sum_gradients, m)[:, None] + at_head, wanted, other=0.0)
                of_sum *= tl.load(_base(sums, m)[:, None] + at_head, wanted, other=0.0)
        if PRIOR:
            if SOFTMAX:
                of_weight = tl.sum(upstream * prior, 2)
                if weight_gradients is not None:
                    at_prior = tl.load(weight_gradients + at_query * W + S, wanted, other=0.0)
                    of_weight += at_prior
                    mean += prior_weight * at_prior
                prior_sum = tl.load(_base(prior_sums, m)[:, None] + at_head, wanted, other=1.0)
                of_prior_sum = prior_weight * (of_weight - mean + of_sum) / prior_sum
                tl.store(_base(prior_sum_gradients, m)[:, None] + at_head, of_prior_sum, wanted)
            of_prior = prior_weight[:, :, None] * upstream
            tl.store(_base(prior_gradients, m)[:, None, None] + token * D + channel, of_prior.to(STORED), in_rows)

        # ---- scores, queries and sources ----
        ahead = _row(sources, strides, 0, S, token, channel, in_row, UNIT)
        for s in range(S):
            row = ahead.to(EXACT)
            ahead = _row(sources, strides, s + 1, S, token, channel, in_row, UNIT)  # on its way while this one is worked on
            before = _before(into, into_exact, flags, s, token * D + channel, in_row)
            key = _key(row, keys, key_strides, s, S, token, coordinate, in_key, D, R, KEYS, KEY_UNIT)
            weight = tl.load(weights + at_query * W + s, wanted, other=0.0)
            of_score = tl.sum(upstream * row, 2)
            if weight_gradients is not None:
                of_score += tl.load(weight_gradients + at_query * W + s, wanted, other=0.0)
            if ALONE:  # one source has the weight 1 whatever its score is, and rounding must not say otherwise
                of_score = weight * of_sum
            elif SOFTMAX:
                of_score = weight * (of_score - mean + of_sum)
            else:
                of_score = weight * (1.0 - weight) * of_score
            if BIAS:
                of_bias += tl.where(bucket[None, :] == s, tl.sum(of_score, 1)[:, None], 0.0)

            pull = of_score
            if NORM != "none":
                scale = tl.load(rstd + token * S + s)
                score = tl.load(scores + at_query * S + s, wanted, other=0.0)
                shrink = scale * scale * tl.sum(of_score * score) / (D if NORM == "full" else R)
                pull *= scale
            of_query += pull[:, :, None] * key
            of_row = tl.sum(weight[:, :, None] * upstream, 0)[None]
            of_key = tl.sum(pull[:, :, None] * query, 0)[None]
            if NORM == "full":
                of_row -= shrink * row
            elif NORM == "slice":
                of_key -= shrink * key
            if KEYS == "row":
                of_row += of_key
            elif KEYS == "slice":
                of_row += _moved(of_key, spare + program * R, coordinate, channel - (D - R), in_key, in_row)
            else:
                places = _base(key_gradients, s) + token * R + coordinate
                if ADD_TO_KEYS:
                    of_key += tl.load(places, in_key, other=0.0)
                tl.store(places, of_key.to(key_gradients[0].dtype.element_ty), in_key)
            _put(before + of_row, into, into_exact, flags, s, token * D + channel, in_row)

    tl.store(partial + program * slots + at_slot, of_query, in_keys)
    if BIAS:
        inside = (m < count)[:, None] & (bucket < S)[None, :]
        bias_slot = (M * R + (first + m)[:, None] * S) + bucket[None, :]
        tl.store(partial + program * slots + bias_slot, of_bias, inside)
    if gain is not None:
        tl.store(partial + program * slots + gain_slot + channel, of_gain, in_row)


@triton.jit
def _moved(of_key, spare, coordinate, wished, in_key, in_row):
    """A key's tile in the places of its row's: threads hand values to each other through memory."""
    tl.store(spare + coordinate, of_key, in_key)
    tl.debug_barrier()
    moved = tl.load(spare + wished, in_row & (wished >= 0), other=0.0)
    tl.debug_barrier()
    return moved


@triton.jit
def _before(into, into_exact, flags, s, place, mask):
    """What a source's gradient is added to: zero unless its flag says so. For the flags see `triton_backend._flags`."""
    flag = _chosen(flags, s // 8) >> (s % 8)
    adding = tl.where((flag & 512) != 0, mask, False)
    if into[0].dtype == into_exact[0].dtype:
        found = tl.load(_base(into_exact, s) + place, adding, other=0.0)
    else:
        found = tl.load(_base(into_exact, s) + place, tl.where((flag & 2) != 0, adding, False), other=0.0)
        found += tl.load(_base(into, s) + place, tl.where((flag & 2) != 0, False, adding), other=0.0).to(found.dtype)
    return found


@triton.jit
def _put(tile, into, into_exact, flags, s, place, mask):
    """Write a source's gradient, in the rows' dtype or in the exact one."""
    if into[0].dtype == into_exact[0].dtype:
        tl.store(_base(into_exact, s) + place, tile, mask)
    else:
        is_exact = ((_chosen(flags, s // 8) >> (s % 8)) & 2) != 0
        tl.store(_base(into_exact, s) + place, tile, tl.where(is_exact, mask, False))
        tl.store(_base(into, s) + place, tile.to(into[0].dtype.element_ty), tl.where(is_exact, False, mask))
