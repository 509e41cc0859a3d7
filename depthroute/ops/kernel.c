/* Depth attention on the CPU, one pass a token. Plain C, no headers of torch; called through ctypes.
 *
 * N tokens, D width, S sources, M queries, H heads, R key rank; W weights, S and one more for a prior. Sources, keys and prior
 * outputs are rows with a stride each; everything else is contiguous. A token's S rows are read once from memory and stay in the first-level
 * cache for the second look at them, so the traffic is the S rows in and M rows out. Statistics are float32 (float64 for float64 rows) and
 * token-major: rstd [N, S]; scores [N, M, H, S]; weights [N, M, H, W]; max and sum, a tensor a query, [N, H].
 *
 * The vector code is in kernel_rows.h. Both files are included once per storage type. Reductions over tokens go through a fixed number of
 * chunks that depends on N alone and are added in order, so the result does not depend on the number of threads.
 */
#ifndef STORE

#include "kernel_rows.h"

#include <stdlib.h>

/* Tokens are worked on TOGETHER, so that one need not wait for the square roots and exponentials of the other. */
enum { MAX_CHUNKS = 256, CACHE_BYTES = 24 << 20, TOGETHER = 2 };

/* Tokens a chunk: at least 16, and at most MAX_CHUNKS chunks. */
static i64 chunk_tokens(i64 tokens) {
  i64 size = (tokens + MAX_CHUNKS - 1) / MAX_CHUNKS;
  return size < 16 ? 16 : size;
}
i64 depth_chunks(i64 tokens) { return (tokens + chunk_tokens(tokens) - 1) / chunk_tokens(tokens); }

/* Whether a pass streams what it stores: it moves more bytes than the caches keep, and rows begin and end with whole vectors. */
static inline int streams(i64 bytes, i64 row_bytes, void *const *tensors, i64 count) {
  int whole = row_bytes % LINE == 0;
  for (i64 i = 0; i < count; i++) whole = whole && (uintptr_t)tensors[i] % LINE == 0;
  return whole && bytes > CACHE_BYTES;
}

enum { KEY_NORM_NONE = 0, KEY_NORM_SLICE = 1, KEY_NORM_FULL = 2 };

#define ACC float
#define EXACT_SUFFIX _f32
#define EXP expf
#define SQRT sqrtf

#define SUFFIX _f32
#define STORE float
#define STORE_IS_ACC 1
#include "kernel.c"
#undef SUFFIX
#undef STORE
#undef STORE_IS_ACC
#define STORE_IS_ACC 0

#define SUFFIX _bf16
#define STORE uint16_t
#include "kernel.c"
#undef SUFFIX
#undef STORE

#ifdef __FLT16_MAX__
#define SUFFIX _f16
#define STORE _Float16
#include "kernel.c"
#undef SUFFIX
#undef STORE
#endif

#undef STORE_IS_ACC
#undef ACC
#undef EXACT_SUFFIX
#undef EXP
#undef SQRT

#define ACC double
#define EXACT_SUFFIX _f64
#define EXP exp
#define SQRT sqrt
#define SUFFIX _f64
#define STORE double
#define STORE_IS_ACC 1
#include "kernel.c"

#else /* one storage type */

#define ROWS
#include "kernel_rows.h"
#undef ROWS

/* What both passes read. keys == NULL: the last R coordinates of each source. gain [D] and prior may be NULL, and prior_sum is for the
 * sigmoid. */
#define OPERANDS                                                                                                                         \
  i64 N, i64 D, i64 S, i64 M, i64 R, i64 H, int key_norm, int sigmoid, STORE *const *sources, const i64 *source_strides,                 \
      STORE *const *keys, const i64 *key_strides, const ACC *queries, const ACC *gain, STORE *const *prior, const i64 *prior_strides,    \
      ACC *const *prior_sum

/* The mixture of one query at one token, from its `weight` [H, W]. */
#define MIXTURE(combine, out, how) \
  for (i64 h = 0; h < H; h++) combine(out, how, h *Dh, Dh, 0, 0, rows, weight + h * W, 1, W, 0, 0, 0, 0, 0)

/* bias [M, S] may be NULL. */
void NAME(depth_forward)(OPERANDS, ACC *const *prior_max, const ACC *bias, double eps, double output_eps, STORE *const *outputs,
                         ACC *const *maxima, ACC *const *sums, ACC *weights, ACC *scores, ACC *rstd, ACC *output_rstd) {
  const i64 chunk = chunk_tokens(N), chunks = depth_chunks(N), Dh = D / H, Rh = R / H, W = S + (prior != 0);
  const int whole = !keys && R == D; /* the first look at a row, for its key, sees all of it and asks for what it sees */
  const i64 row_bytes = D * (i64)sizeof(STORE);
  const int how = Dh % WIDE == 0 && streams(N * row_bytes * (W + M), row_bytes, (void *const *)outputs, M) ? STREAM : WRITE;
#pragma omp parallel if (chunks > 1)
  {
    ACC *mixture = gain ? malloc(sizeof(ACC) * D) : 0;
#pragma omp for schedule(static)
    for (i64 c = 0; c < chunks; c++) {
      const i64 end = smaller((c + 1) * chunk, N), ahead = NAME(tokens_ahead)(D);
      const STORE *rows[W];
      for (i64 begin = c * chunk; begin < end; begin += TOGETHER) {
        const i64 stop = smaller(begin + TOGETHER, end);
        for (i64 t = begin; t < stop; t++)
          for (i64 s = 0; s < S; s++) {
            const STORE *row = sources[s] + t * source_strides[s];
            const STORE *key = keys ? keys[s] + t * key_strides[s] : row + (D - R);
            const i64 next = t + ahead < N ? ahead * source_strides[s] : 0;
            if (next && !whole) ask_for((const char *)(row + next), row_bytes);
            ACC *score = scores + t * M * H * S + s;
            ACC square = 0;
            for (i64 h = 0; h < H; h++)
              square += NAME(dots_and_squares)(key + h * Rh, queries + h * Rh, R, Rh, M, score + h * S, H * S, whole ? next : 0);
            if (!key_norm) continue;
            const int full = key_norm == KEY_NORM_FULL;
            if (full) square += NAME(sum_of_squares)(row, D - R);
            const ACC r = rstd[t * S + s] = 1 / SQRT(square / (full ? D : R) + (ACC)eps);
            for (i64 i = 0; i < M * H; i++) score[i * S] *= r;
          }
        for (i64 t = begin; t < stop; t++)
          for (i64 i = 0; i < M * H; i++) {
            const i64 m = i / H, at = t * H + i % H;
            const ACC *score = scores + (t * M * H + i) * S;
            ACC *p = weights + (t * M * H + i) * W, largest = -INFINITY, total = 0;
            for (i64 s = 0; s < S; s++) p[s] = score[s] + (bias ? bias[m * S + s] : 0);
            if (sigmoid) {
              for (i64 s = 0; s < S; s++) p[s] = 1 / (1 + EXP(-p[s]));
              if (prior) p[S] = 1;
              continue;
            }
            for (i64 s = 0; s < S; s++) largest = p[s] > largest ? p[s] : largest;
            if (prior && prior_max[m][at] > largest) largest = prior_max[m][at];
            for (i64 s = 0; s < S; s++) total += p[s] = EXP(p[s] - largest);
            if (prior) total += p[S] = prior_sum[m][at] * EXP(prior_max[m][at] - largest);
            for (i64 w = 0; w < W; w++) p[w] /= total;
            maxima[m][at] = largest;
            sums[m][at] = total;
          }
        for (i64 t = begin; t < stop; t++) {
          for (i64 s = 0; s < S; s++) rows[s] = sources[s] + t * source_strides[s];
          for (i64 m = 0; m < M; m++) {
            const ACC *weight = weights + (t * M + m) * H * W;
            if (prior) rows[S] = prior[m] + t * prior_strides[m];
            STORE *out = outputs[m] + t * D;
            if (!gain) {
              MIXTURE(NAME(combine), out, how);
              continue;
            }
            MIXTURE(NAME(combine_exact), mixture, WRITE);
            const ACC r = 1 / SQRT(EXACT(sum_of_squares)(mixture, D) / D + (ACC)output_eps);
            output_rstd[t * M + m] = r;
            NAME(scale)(out, r, mixture, gain, D);
          }
        }
      }
    }
    if (how == STREAM) end_of_stream();
    free(mixture);
  }
}

/* The same with its arguments in one place, for programs of prepared steps. */
struct NAME(depth_read) {
  i64 N, D, S, M, R, H, key_norm, sigmoid;
  STORE *const *sources; const i64 *source_strides;
  const ACC *queries, *gain;
  STORE *const *prior; const i64 *prior_strides;
  ACC *const *prior_sum, *const *prior_max;
  const ACC *bias;
  double eps, output_eps;
  STORE *const *outputs;
  ACC *const *maxima, *const *sums, *weights, *scores, *rstd, *output_rstd;
};
void NAME(depth_step)(const struct NAME(depth_read) *a) {
  NAME(depth_forward)(a->N, a->D, a->S, a->M, a->R, a->H, (int)a->key_norm, (int)a->sigmoid, a->sources, a->source_strides, 0, 0, a->queries,
                      a->gain, a->prior, a->prior_strides, a->prior_sum, a->prior_max, a->bias, a->eps, a->output_eps, a->outputs, a->maxima,
                      a->sums, a->weights, a->scores, a->rstd, a->output_rstd);
}

/* Gradients of everything from those of the M outputs and, where they are not NULL, of the sums and the weights. `into`: a tensor a source,
 * of ACC where `exact`, which the gradient is added to where `add`. dprior: M outputs, then M sums. partial: [chunks, M * R + M * S + D],
 * scratch; dqueries [M, R], dbias [M, S] and dgain [D] are its sums. */
void NAME(depth_backward)(OPERANDS, ACC *const *sums, const ACC *weights, const ACC *scores, const ACC *rstd, const ACC *output_rstd,
                          STORE *const *grads, ACC *const *dsums, const ACC *dweights, void *const *into,
                          const char *exact, const char *add, STORE *const *dkeys, void *const *dprior, ACC *partial, ACC *dqueries,
                          ACC *dbias, ACC *dgain) {
  const i64 chunk = chunk_tokens(N), chunks = depth_chunks(N), Dh = D / H, Rh = R / H, W = S + (prior != 0);
  const i64 slots = M * R + M * S + (gain ? D : 0);
  const int full = key_norm == KEY_NORM_FULL, converts = gain || !STORE_IS_ACC;
  const i64 row_bytes = D * (i64)sizeof(STORE);
  const int aligned = H == 1 || (Dh % WIDE == 0 && Rh % WIDE == 0 && (D - R) % WIDE == 0);
  const int spills = aligned && streams(N * row_bytes * (2 * S + M), row_bytes, into, S);
  const int prior_how = prior && Dh % WIDE == 0 && streams(N * row_bytes * (2 * S + 3 * M), row_bytes, dprior, M) ? STREAM : WRITE;
  /* With one head, a key that begins within a vector begins where the vector does, with zeros for what is not key. */
  const i64 first = keys ? D : D - R, edge = H == 1 && !keys ? first % WIDE : 0, begin = first - edge, length = R + edge;
#pragma omp parallel
  {
    int how[S];
    for (i64 s = 0; s < S; s++) how[s] = add[s] ? ADD : spills ? STREAM : WRITE;
    /* Upstream gradients of a token's M mixtures in the exact type, and a row to spare. */
    ACC *scratch = converts ? malloc(sizeof(ACC) * (M + 1) * D) : 0, *spare = scratch + M * D;
    ACC *padded = edge ? calloc((M + 1) * length, sizeof(ACC)) : 0;
    const ACC *query = edge ? padded : queries;
    STORE *own_key = (STORE *)(padded + M * length);
    for (i64 m = 0; edge && m < M; m++) memcpy(padded + m * length + edge, queries + m * R, sizeof(ACC) * R);
#pragma omp for schedule(static)
    for (i64 c = 0; c < chunks; c++) {
      ACC *dq = partial + c * slots, *db = dq + M * R, *dg = db + M * S;
      memset(dq, 0, sizeof(ACC) * slots);
      const i64 end = smaller((c + 1) * chunk, N), ahead = NAME(tokens_ahead)(D);
      const STORE *rows[W], *key_rows[S];
      const ACC *grad[M];
      ACC dscore[M * H * S], pull[M * H * S], dots[W];
      for (i64 t = c * chunk; t < end; t++) {
        for (i64 s = 0; s < S; s++) {
          rows[s] = sources[s] + t * source_strides[s];
          key_rows[s] = keys ? keys[s] + t * key_strides[s] : rows[s] + (D - R);
        }
        for (i64 m = 0; m < M; m++) {
          const STORE *given = grads[m] + t * D;
          if (prior) rows[S] = prior[m] + t * prior_strides[m];
          const ACC *weight = weights + (t * M + m) * H * W;
          if (converts) {
            ACC *own = scratch + m * D;
            if (gain) {
              MIXTURE(NAME(combine_exact), spare, WRITE);
              NAME(norm_backward)(own, given, spare, gain, output_rstd[t * M + m], D, dg);
            } else {
              NAME(widen)(own, given, D);
            }
            grad[m] = own;
          } else {
            grad[m] = (const ACC *)given;
          }
          for (i64 h = 0; h < H; h++) {
            const ACC *p = weight + h * W, *g = grad[m] + h * Dh, *dp = dweights ? dweights + ((t * M + m) * H + h) * W : 0;
            ACC *d = dscore + (m * H + h) * S, mean = 0;
            for (i64 w = 0; w < W; w++) {
              const i64 next = m == 0 && w < S && t + ahead < N ? ahead * source_strides[w] : 0;
              dots[w] = NAME(dot)(rows[w] + h * Dh, g, Dh, next) + (dp ? dp[w] : 0);
              mean += p[w] * dots[w];
            }
            if (dsums) mean -= dsums[m][t * H + h] * sums[m][t * H + h];
            for (i64 s = 0; s < S; s++) {
              d[s] = p[s] * (sigmoid ? (1 - p[s]) * dots[s] : dots[s] - mean);
              db[m * S + s] += d[s];
            }
            if (!prior) continue;
            NAME(store_scaled)((STORE *)dprior[m] + t * D + h * Dh, prior_how, p[S], g, Dh);
            if (!sigmoid) ((ACC *)dprior[M + m])[t * H + h] = p[S] * (dots[S] - mean) / prior_sum[m][t * H + h];
          }
        }
        for (i64 i = 0; i < M * H; i++)
          for (i64 s = 0; s < S; s++) pull[i * S + s] = (key_norm ? rstd[t * S + s] : 1) * dscore[i * S + s];
        for (i64 m = 0; m < M; m++)
          for (i64 h = 0; h < H; h++)
            NAME(combine_exact)(dq + m * R, ADD, h * Rh, Rh, 0, 0, key_rows, pull + (m * H + h) * S, 1, S, 0, 0, 0, 0, 0);
        for (i64 s = 0; s < S; s++) {
          ACC shrink = 0; /* what the normalisation removes: the part of the score's gradient that is along the key */
          if (key_norm) {
            for (i64 i = 0; i < M * H; i++) shrink += dscore[i * S + s] * scores[(t * M * H + i) * S + s];
            shrink *= -rstd[t * S + s] * rstd[t * S + s] / (full ? D : R);
          }
          if (keys)
            for (i64 h = 0; h < H; h++)
              NAME(combine)(dkeys[s] + t * R, WRITE, h * Rh, Rh, key_rows[s], shrink, 0, 0, 0, 0, queries, R, pull + h * S + s, H * S, M);
          /* Columns from `begin` on are also the key; the others feel the score only through a full RMS. A stretch of columns ends where
           * a head of the values or of the keys does. */
          const i64 out_bytes = D * (exact[s] ? (i64)sizeof(ACC) : (i64)sizeof(STORE));
          if (how[s] == ADD && t + ahead < N) ask_for((const char *)into[s] + (t + ahead) * out_bytes, out_bytes);
          const STORE *key = rows[s];
          if (edge && !full) {
            memcpy(own_key + edge, rows[s] + first, sizeof(STORE) * R);
            key = own_key - begin;
          }
          for (i64 d = 0; d < D;) {
            const i64 h = d / Dh, k = d < begin ? -1 : (d - begin) / (Rh + edge);
            const i64 stop = smaller((h + 1) * Dh, k < 0 ? begin : begin + (k + 1) * (Rh + edge)), n = stop - d;
            const STORE *row = k >= 0 ? key : full ? rows[s] : 0;
            const ACC *p = weights + (t * M * H + h) * W + s, *q = k < 0 ? 0 : query - begin, *u = pull + (k < 0 ? 0 : k) * S + s;
            if (STORE_IS_ACC || !exact[s])
              NAME(combine_grads)((STORE *)into[s] + t * D, how[s], d, n, row, shrink, grad, p, H * W, M, q, length, u, H * S, M);
            else
              NAME(combine_grads_exact)((ACC *)into[s] + t * D, how[s], d, n, row, shrink, grad, p, H * W, M, q, length, u, H * S, M);
            d = stop;
          }
        }
      }
    }
    if (spills || prior_how == STREAM) end_of_stream();
    free(padded);
    free(scratch);
  }
  for (i64 j = 0; j < slots; j++) {
    ACC total = 0;
    for (i64 c = 0; c < chunks; c++) total += partial[c * slots + j];
    if (j < M * R) dqueries[j] = total;
    else if (j < M * R + M * S) dbias[j - M * R] = total;
    else dgain[j - M * R - M * S] = total;
  }
}

#undef MIXTURE
#undef OPERANDS
#undef WIDE
#undef VEC
#endif
