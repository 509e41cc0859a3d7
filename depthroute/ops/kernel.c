/* Depth attention on the CPU, one pass a token. Plain C, no headers of torch; called through ctypes.
 *
 * N tokens, D width, S sources, M queries, R key rank. Sources and outputs are [N, D] rows; keys are the last R coordinates of a source,
 * or rows [N, R] of their own. A token's S rows are read once from memory and stay in the first-level cache for the second look at
 * them, so the traffic is the S rows in and M rows out. Statistics are float32 (float64 for float64 rows), token-major:
 * rstd [N, S]; scores, weights [N, M, S].
 *
 * Vectors are written out with the vector types that gcc and clang share. Left to themselves, compilers vectorise the loop over the
 * sources instead, with gathers, and add up a vector's lanes one after the other.
 *
 * The file includes itself once per storage type. Reductions over tokens go through a fixed number of chunks that depends on N alone and
 * are added in order, so the result does not depend on the number of threads.
 */
#ifndef STORE

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
enum { TILE = 4, MAX_CHUNKS = 256, AHEAD_BYTES = 1024 }; /* TILE vectors of columns are summed in registers */

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef double f64x2 __attribute__((vector_size(16)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static inline f32x16 load_f32(const float *x) { f32x16 v; memcpy(&v, x, sizeof v); return v; }
static inline void store_f32(float *x, f32x16 v) { memcpy(x, &v, sizeof v); }
static inline float get_f32(const float *x) { return *x; }
static inline void put_f32(float *x, float v) { *x = v; }
static inline float sum_f32(f32x16 v) {
  union { f32x16 whole; f32x8 half[2]; } a = {v};
  union { f32x8 whole; f32x4 half[2]; } b = {a.half[0] + a.half[1]};
  const f32x4 c = b.half[0] + b.half[1];
  return (c[0] + c[1]) + (c[2] + c[3]);
}

static inline f64x8 load_f64(const double *x) { f64x8 v; memcpy(&v, x, sizeof v); return v; }
static inline void store_f64(double *x, f64x8 v) { memcpy(x, &v, sizeof v); }
static inline double get_f64(const double *x) { return *x; }
static inline void put_f64(double *x, double v) { *x = v; }
static inline double sum_f64(f64x8 v) {
  union { f64x8 whole; f64x4 half[2]; } a = {v};
  union { f64x4 whole; f64x2 half[2]; } b = {a.half[0] + a.half[1]};
  const f64x2 c = b.half[0] + b.half[1];
  return c[0] + c[1];
}

/* bfloat16: the upper half of a float32; stored by rounding to nearest even, NaN staying NaN */
static inline f32x16 load_bf16(const uint16_t *x) {
  u16x16 v;
  memcpy(&v, x, sizeof v);
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
}
static inline void store_bf16(uint16_t *x, f32x16 v) {
  const u32x16 bits = (u32x16)v;
  const u32x16 nan = (u32x16)((bits & 0x7fffffffu) > 0x7f800000u);
  const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u16x16 out = __builtin_convertvector((nan & ((bits >> 16) | 64u)) | (~nan & rounded), u16x16);
  memcpy(x, &out, sizeof out);
}
static inline float get_bf16(const uint16_t *x) {
  union { uint32_t u; float f; } v = {(uint32_t)*x << 16};
  return v.f;
}
static inline void put_bf16(uint16_t *x, float value) {
  union { float f; uint32_t u; } v = {value};
  const uint32_t rounded = (v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16;
  *x = (v.u & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((v.u >> 16) | 64u) : (uint16_t)rounded;
}

/* Tokens a chunk: at least 16, and at most MAX_CHUNKS chunks. */
i64 depth_chunk_tokens(i64 tokens) {
  i64 size = (tokens + MAX_CHUNKS - 1) / MAX_CHUNKS;
  return size < 16 ? 16 : size;
}

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(stem) PASTE(stem, SUFFIX)
#define EXACT(stem) PASTE(stem, EXACT_SUFFIX)

#define ACC float
#define VEC f32x16
#define EXACT_SUFFIX _f32
#define EXP expf
#define LOG logf
#define SQRT sqrtf

#define SUFFIX _f32
#define STORE float
#include "kernel.c"
#undef SUFFIX
#undef STORE

#define SUFFIX _bf16
#define STORE uint16_t
#include "kernel.c"
#undef SUFFIX
#undef STORE

#undef ACC
#undef VEC
#undef EXACT_SUFFIX
#undef EXP
#undef LOG
#undef SQRT

#define ACC double
#define VEC f64x8
#define EXACT_SUFFIX _f64
#define EXP exp
#define LOG log
#define SQRT sqrt
#define SUFFIX _f64
#define STORE double
#include "kernel.c"

#else /* one storage type */

#define WIDE ((i64)(sizeof(VEC) / sizeof(ACC)))

static inline ACC NAME(sum_of_squares)(const STORE *x, i64 n) {
  VEC total = {0};
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) {
    const VEC v = NAME(load)(x + j);
    total += v * v;
  }
  ACC sum = EXACT(sum)(total);
  for (; j < n; j++) sum += NAME(get)(x + j) * NAME(get)(x + j);
  return sum;
}

static inline i64 NAME(tokens_ahead)(i64 D) { return 1 + AHEAD_BYTES / (D * (i64)sizeof(STORE)); }

/* Ask for a row some tokens ahead: S streams at once are more than the hardware follows on its own. */
static inline void NAME(ask_for)(const STORE *x, i64 n) {
  for (i64 j = 0; j < n; j += 64 / (i64)sizeof(STORE)) __builtin_prefetch(x + j);
}

/* <x, q>, and the sum of squares of x in the same pass */
static inline ACC NAME(dot_and_squares)(const STORE *x, const ACC *q, i64 n, ACC *squares) {
  VEC total = {0}, square = {0};
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) {
    const VEC v = NAME(load)(x + j);
    total += v * EXACT(load)(q + j);
    square += v * v;
  }
  ACC sum = EXACT(sum)(total), sum_square = EXACT(sum)(square);
  for (; j < n; j++) {
    sum += NAME(get)(x + j) * q[j];
    sum_square += NAME(get)(x + j) * NAME(get)(x + j);
  }
  *squares = sum_square;
  return sum;
}

static inline ACC NAME(dot)(const STORE *x, const ACC *q, i64 n) {
  VEC total = {0};
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) total += NAME(load)(x + j) * EXACT(load)(q + j);
  ACC sum = EXACT(sum)(total);
  for (; j < n; j++) sum += NAME(get)(x + j) * q[j];
  return sum;
}

static inline ACC NAME(dot_rows)(const STORE *x, const STORE *y, i64 n) {
  VEC total = {0};
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) total += NAME(load)(x + j) * NAME(load)(y + j);
  ACC sum = EXACT(sum)(total);
  for (; j < n; j++) sum += NAME(get)(x + j) * NAME(get)(y + j);
  return sum;
}

/* sum[j] += weight * x[j] in the exact type */
static inline void NAME(add_scaled)(ACC *sum, ACC weight, const STORE *x, i64 n) {
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) EXACT(store)(sum + j, EXACT(load)(sum + j) + weight * NAME(load)(x + j));
  for (; j < n; j++) sum[j] += weight * NAME(get)(x + j);
}

/* out[j] = self * row[j] + sum over k of w[k * step] * rows[k][j] + sum over m of u[m * step_u] * q[m * R + j], for n columns. `row` and
 * `q` may be NULL. */
static inline void NAME(combine)(STORE *out, i64 n, const STORE *row, ACC self, const STORE *const *rows, const ACC *w, i64 step, i64 count,
                                 const ACC *q, i64 R, const ACC *u, i64 step_u, i64 M) {
  i64 d = 0;
#define COLUMNS(vectors)                                                                                          \
  for (; d + (vectors) * WIDE <= n; d += (vectors) * WIDE) {                                                      \
    VEC total[vectors];                                                                                           \
    for (int v = 0; v < (vectors); v++) total[v] = row ? self * NAME(load)(row + d + v * WIDE) : (VEC){0};        \
    for (i64 k = 0; k < count; k++)                                                                               \
      for (int v = 0; v < (vectors); v++) total[v] += w[k * step] * NAME(load)(rows[k] + d + v * WIDE);           \
    if (q)                                                                                                        \
      for (i64 m = 0; m < M; m++)                                                                                 \
        for (int v = 0; v < (vectors); v++) total[v] += u[m * step_u] * EXACT(load)(q + m * R + d + v * WIDE);    \
    for (int v = 0; v < (vectors); v++) NAME(store)(out + d + v * WIDE, total[v]);                                \
  }
  COLUMNS(TILE)
  COLUMNS(2)
  COLUMNS(1)
#undef COLUMNS
  for (; d < n; d++) {
    ACC total = row ? self * NAME(get)(row + d) : 0;
    for (i64 k = 0; k < count; k++) total += w[k * step] * NAME(get)(rows[k] + d);
    if (q)
      for (i64 m = 0; m < M; m++) total += u[m * step_u] * q[m * R + d];
    NAME(put)(out + d, total);
  }
}

/* keys == NULL: the last R coordinates of each source (with keys, full is 0). bias [M, S]. full: normalise by the RMS of all D
 * coordinates. */
void NAME(depth_forward)(i64 N, i64 D, i64 S, i64 M, i64 R, STORE *const *sources, STORE *const *keys, const ACC *queries,
                         const ACC *bias, int full, double eps, STORE *const *outputs, ACC *rstd, ACC *scores, ACC *weights, ACC *lse) {
  const i64 chunk = depth_chunk_tokens(N), chunks = (N + chunk - 1) / chunk;
#pragma omp parallel for schedule(static)
  for (i64 c = 0; c < chunks; c++) {
    const i64 end = (c + 1) * chunk < N ? (c + 1) * chunk : N;
    const STORE *rows[S];
    const i64 ahead = NAME(tokens_ahead)(D);
    for (i64 t = c * chunk; t < end; t++) {
      for (i64 s = 0; s < S; s++) {
        rows[s] = sources[s] + t * D;
        if (t + ahead < end) NAME(ask_for)(rows[s] + ahead * D, D);
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
          weight[s] = score[s] + bias[m * S + s];
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

/* Gradients of everything, from the gradients of the M outputs. dkeys is NULL where keys is. partial: [chunks, M * R + M * S] scratch;
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
    const i64 first = keys ? D : D - R; /* columns from here on are also the key; the others feel the score only through a full RMS */
    const STORE *grad[M], *tail[M];
    ACC dscore[M * S], pull[M];
    const i64 ahead = NAME(tokens_ahead)(D);
    for (i64 t = c * chunk; t < end; t++) {
      for (i64 m = 0; m < M; m++) {
        grad[m] = grads[m] + t * D;
        tail[m] = grad[m] + first;
        const ACC *p = weights + (t * M + m) * S;
        ACC mean = 0;
        for (i64 s = 0; s < S; s++) {
          if (m == 0 && t + ahead < end) NAME(ask_for)(sources[s] + (t + ahead) * D, D);
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
        const ACC *p = weights + t * M * S + s;
        const ACC r = rstd[t * S + s];
        ACC along = 0; /* <d score / d normalised key, normalised key>: the part that the normalisation removes */
        for (i64 m = 0; m < M; m++) {
          pull[m] = r * dscore[m * S + s];
          along += dscore[m * S + s] * scores[(t * M + m) * S + s];
          NAME(add_scaled)(dq + m * R, pull[m], key, R);
        }
        const ACC shrink = -r * r * along / (full ? D : R);
        if (keys) NAME(combine)(dkeys[s] + t * R, R, key, shrink, 0, 0, 0, 0, queries, R, pull, 1, M);
        STORE *out = dsources[s] + t * D;
        NAME(combine)(out, first, full ? row : 0, shrink, grad, p, S, M, 0, 0, 0, 0, 0);
        if (!keys) NAME(combine)(out + first, R, key, shrink, tail, p, S, M, queries, R, pull, 1, M);
      }
    }
  }
  for (i64 j = 0; j < slots; j++) {
    ACC total = 0;
    for (i64 c = 0; c < chunks; c++) total += partial[c * slots + j];
    *(j < M * R ? dqueries + j : dbias + (j - M * R)) = total;
  }
}

#undef WIDE
#endif
