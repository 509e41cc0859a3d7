/* Depth attention on the CPU, one pass a token. Plain C, no headers of torch; called through ctypes.
 *
 * N tokens, D width, S sources, M queries, R key rank. Sources and outputs are [N, D] rows; keys are the last R coordinates of a source,
 * or rows [N, R] of their own. A token's S rows are read once from memory and stay in the first-level cache for the second look at
 * them, so the traffic is the S rows in and M rows out. Statistics are float32 (float64 for float64 rows), token-major:
 * rstd [N, S]; scores, weights [N, M, S].
 *
 * The file includes itself once per storage type. Reductions over tokens go through a fixed number of chunks that depends on N alone and
 * are added in order, so the result does not depend on the number of threads.
 */
#ifndef STORE

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
enum { TILE = 64, MAX_CHUNKS = 256 };

static inline float bf16_load(uint16_t x) {
  union { uint32_t u; float f; } v = {(uint32_t)x << 16};
  return v.f;
}

static inline uint16_t bf16_store(float x) { /* round to nearest even; NaN stays NaN */
  union { float f; uint32_t u; } v = {x};
  uint32_t rounded = (v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16;
  return (v.u & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((v.u >> 16) | 64u) : (uint16_t)rounded;
}

/* Tokens a chunk: at least 16, and at most MAX_CHUNKS chunks. */
i64 depth_chunk_tokens(i64 tokens) {
  i64 size = (tokens + MAX_CHUNKS - 1) / MAX_CHUNKS;
  return size < 16 ? 16 : size;
}

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(stem) PASTE(stem, SUFFIX)

#define SUFFIX _f32
#define STORE float
#define ACC float
#define LOAD(x) (x)
#define PUT(x) (x)
#define EXP expf
#define LOG logf
#define SQRT sqrtf
#include "kernel.c"
#undef SUFFIX
#undef STORE
#undef ACC
#undef LOAD
#undef PUT
#undef EXP
#undef LOG
#undef SQRT

#define SUFFIX _bf16
#define STORE uint16_t
#define ACC float
#define LOAD(x) bf16_load(x)
#define PUT(x) bf16_store(x)
#define EXP expf
#define LOG logf
#define SQRT sqrtf
#include "kernel.c"
#undef SUFFIX
#undef STORE
#undef ACC
#undef LOAD
#undef PUT
#undef EXP
#undef LOG
#undef SQRT

#define SUFFIX _f64
#define STORE double
#define ACC double
#define LOAD(x) (x)
#define PUT(x) (x)
#define EXP exp
#define LOG log
#define SQRT sqrt
#include "kernel.c"

#else /* one storage type */

static inline ACC NAME(sum_of_squares)(const STORE *x, i64 n) {
  ACC total = 0;
#pragma omp simd reduction(+ : total)
  for (i64 j = 0; j < n; j++) total += LOAD(x[j]) * LOAD(x[j]);
  return total;
}

static inline ACC NAME(dot)(const STORE *x, const ACC *q, i64 n) {
  ACC total = 0;
#pragma omp simd reduction(+ : total)
  for (i64 j = 0; j < n; j++) total += LOAD(x[j]) * q[j];
  return total;
}

/* <x, q>, and the sum of squares of x in the same pass */
static inline ACC NAME(dot_and_squares)(const STORE *x, const ACC *q, i64 n, ACC *squares) {
  ACC total = 0, square = 0;
#pragma omp simd reduction(+ : total, square)
  for (i64 j = 0; j < n; j++) {
    total += LOAD(x[j]) * q[j];
    square += LOAD(x[j]) * LOAD(x[j]);
  }
  *squares = square;
  return total;
}

static inline ACC NAME(dot_rows)(const STORE *x, const STORE *y, i64 n) {
  ACC total = 0;
#pragma omp simd reduction(+ : total)
  for (i64 j = 0; j < n; j++) total += LOAD(x[j]) * LOAD(y[j]);
  return total;
}

static inline __attribute__((always_inline)) void NAME(tile)(ACC *total, const int width, i64 d, const STORE *row, ACC self,
                                                             const STORE *const *rows, const ACC *w, i64 step, i64 count, const ACC *q,
                                                             i64 R, const ACC *u, i64 step_u, i64 M) {
  if (row) {
#pragma omp simd
    for (int j = 0; j < width; j++) total[j] = self * LOAD(row[d + j]);
  } else {
    for (int j = 0; j < width; j++) total[j] = 0;
  }
  for (i64 k = 0; k < count; k++) {
    const ACC weight = w[k * step];
    const STORE *x = rows[k] + d;
#pragma omp simd
    for (int j = 0; j < width; j++) total[j] += weight * LOAD(x[j]);
  }
  if (!q) return;
  for (i64 m = 0; m < M; m++) {
    const ACC weight = u[m * step_u];
    const ACC *x = q + m * R + d;
#pragma omp simd
    for (int j = 0; j < width; j++) total[j] += weight * x[j];
  }
}

/* out[j] = self * row[j] + sum over k of w[k * step] * rows[k][j] + sum over m of u[m * step_u] * q[m * R + j], for n columns, a tile at a
 * time so that the sums stay in registers. `row` and `q` may be NULL. */
static inline void NAME(combine)(STORE *out, i64 n, const STORE *row, ACC self, const STORE *const *rows, const ACC *w, i64 step, i64 count,
                                 const ACC *q, i64 R, const ACC *u, i64 step_u, i64 M) {
  i64 d = 0;
#define COLUMNS(width)                                                                 \
  {                                                                                    \
    ACC total[TILE];                                                                   \
    NAME(tile)(total, width, d, row, self, rows, w, step, count, q, R, u, step_u, M);  \
    _Pragma("omp simd") for (int j = 0; j < (width); j++) out[d + j] = PUT(total[j]);  \
  }
  for (; d + TILE <= n; d += TILE) COLUMNS(TILE)
  for (; d + TILE / 4 <= n; d += TILE / 4) COLUMNS(TILE / 4)
  if (d < n) COLUMNS((int)(n - d))
#undef COLUMNS
}

/* keys == NULL: the last R coordinates of each source (with keys, full is 0). bias [M, S] or NULL. full: normalise by the RMS of all D coordinates. */
void NAME(depth_forward)(i64 N, i64 D, i64 S, i64 M, i64 R, STORE *const *sources, STORE *const *keys, const ACC *queries,
                         const ACC *bias, int full, double eps, STORE *const *outputs, ACC *rstd, ACC *scores, ACC *weights, ACC *lse) {
  const i64 chunk = depth_chunk_tokens(N), chunks = (N + chunk - 1) / chunk;
#pragma omp parallel for schedule(static)
  for (i64 c = 0; c < chunks; c++) {
    const i64 end = (c + 1) * chunk < N ? (c + 1) * chunk : N;
    for (i64 t = c * chunk; t < end; t++) {
      const STORE *rows[S];
      for (i64 s = 0; s < S; s++) {
        rows[s] = sources[s] + t * D;
        const STORE *key = keys ? keys[s] + t * R : rows[s] + (D - R);
        ACC square;
        const ACC first = NAME(dot_and_squares)(key, queries, R, &square);
        if (full) square = NAME(sum_of_squares)(rows[s], D);
        const ACC r = 1 / SQRT(square / (full ? D : R) + (ACC)eps);
        rstd[t * S + s] = r;
        scores[t * M * S + s] = r * first;
        for (i64 m = 1; m < M; m++) scores[(t * M + m) * S + s] = r * NAME(dot)(key, queries + m * R, R);
      }
      for (i64 m = 0; m < M; m++) {
        const ACC *score = scores + (t * M + m) * S;
        ACC *weight = weights + (t * M + m) * S;
        ACC largest = -INFINITY, total = 0;
        for (i64 s = 0; s < S; s++) {
          weight[s] = score[s] + (bias ? bias[m * S + s] : 0);
          if (weight[s] > largest) largest = weight[s];
        }
        for (i64 s = 0; s < S; s++) total += weight[s] = EXP(weight[s] - largest);
        for (i64 s = 0; s < S; s++) weight[s] /= total;
        lse[t * M + m] = largest + LOG(total);
        NAME(combine)(outputs[m] + t * D, D, 0, 0, rows, weight, 1, S, 0, 0, 0, 0, 0);
      }
    }
  }
}

/* Gradients of everything, from the gradients of the M outputs. dsources[s] and dkeys may be NULL. partial: [chunks, M * R + M * S] scratch;
 * dqueries [M, R] and dbias [M, S] are its sums. */
void NAME(depth_backward)(i64 N, i64 D, i64 S, i64 M, i64 R, STORE *const *sources, STORE *const *keys, const ACC *queries, int full,
                          STORE *const *grads, const ACC *rstd, const ACC *scores, const ACC *weights, STORE *const *dsources,
                          STORE *const *dkeys, ACC *partial, ACC *dqueries, ACC *dbias) {
  const i64 chunk = depth_chunk_tokens(N), chunks = (N + chunk - 1) / chunk, slots = M * R + M * S;
#pragma omp parallel for schedule(static)
  for (i64 c = 0; c < chunks; c++) {
    ACC *dq = partial + c * slots, *db = dq + M * R;
    memset(dq, 0, sizeof(ACC) * slots);
    const i64 end = (c + 1) * chunk < N ? (c + 1) * chunk : N;
    ACC dscore[M * S], pull[M];
    for (i64 t = c * chunk; t < end; t++) {
      const STORE *grad[M];
      for (i64 m = 0; m < M; m++) {
        grad[m] = grads[m] + t * D;
        const ACC *p = weights + (t * M + m) * S;
        ACC mean = 0;
        for (i64 s = 0; s < S; s++) {
          dscore[m * S + s] = NAME(dot_rows)(grad[m], sources[s] + t * D, D);
          mean += p[s] * dscore[m * S + s];
        }
        for (i64 s = 0; s < S; s++) {
          const ACC d = p[s] * (dscore[m * S + s] - mean);
          dscore[m * S + s] = d;
          db[m * S + s] += d;
        }
      }
      for (i64 s = 0; s < S; s++) {
        const STORE *row = sources[s] + t * D;
        const STORE *key = keys ? keys[s] + t * R : row + (D - R);
        const ACC r = rstd[t * S + s];
        ACC along = 0; /* <d score / d key-hat, key-hat>: the part that the normalisation removes */
        for (i64 m = 0; m < M; m++) along += dscore[m * S + s] * scores[(t * M + m) * S + s];
        for (i64 m = 0; m < M; m++) {
          const ACC w = dscore[m * S + s] * r;
          ACC *out = dq + m * R;
#pragma omp simd
          for (i64 j = 0; j < R; j++) out[j] += w * LOAD(key[j]);
        }
        const ACC shrink = -r * r * along / (full ? D : R);
        const ACC *p = weights + t * M * S + s;
        for (i64 m = 0; m < M; m++) pull[m] = r * dscore[m * S + s];
        STORE *out = dsources[s] ? dsources[s] + t * D : 0;
        if (keys && dkeys[s])
          NAME(combine)(dkeys[s] + t * R, R, key, shrink, 0, 0, 0, 0, queries, R, pull, 1, M);
        if (!out) continue;
        /* columns from `first` on are also the key; the others feel the score only through a full-width RMS */
        const i64 first = keys ? D : D - R;
        const STORE *gradient[M];
        for (i64 m = 0; m < M; m++) gradient[m] = grad[m] + first;
        NAME(combine)(out, first, full ? row : 0, shrink, grad, p, S, M, 0, 0, 0, 0, 0);
        if (!keys) NAME(combine)(out + first, R, key, shrink, gradient, p, S, M, queries, R, pull, 1, M);
      }
    }
  }
  for (i64 j = 0; j < slots; j++) {
    ACC total = 0;
    for (i64 c = 0; c < chunks; c++) total += partial[c * slots + j];
    *(j < M * R ? dqueries + j : dbias + (j - M * R)) = total;
  }
}

#endif
