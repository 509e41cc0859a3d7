/* Vectors and rows for kernel.c. They are written out with the vector types that gcc and clang share: left to themselves, compilers vectorise the
 * loop over the sources instead, with gathers, and add up a vector's lanes one after the other.
 *
 * `load` and `store` convert between storage and arithmetic: float32 for float16, bfloat16 and float32, float64 for itself.
 */
#ifndef ROWS

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
enum { TILE = 4, AHEAD_BYTES = 1024 }; /* TILE vectors of columns are summed in registers */

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

#ifdef __FLT16_MAX__
typedef _Float16 f16x16 __attribute__((vector_size(32)));
static inline f32x16 load_f16(const _Float16 *x) {
  f16x16 v;
  memcpy(&v, x, sizeof v);
  return __builtin_convertvector(v, f32x16);
}
static inline void store_f16(_Float16 *x, f32x16 v) {
  const f16x16 out = __builtin_convertvector(v, f16x16);
  memcpy(x, &out, sizeof out);
}
static inline float get_f16(const _Float16 *x) { return (float)*x; }
static inline void put_f16(_Float16 *x, float v) { *x = (_Float16)v; }
#endif

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(stem) PASTE(stem, SUFFIX)
#define EXACT(stem) PASTE(stem, EXACT_SUFFIX)
#define VEC_f32 f32x16
#define VEC_f64 f64x8

/* out[j] (+)= self * row[j] + sum over k of w[k * step] * rows[k][j] + sum over m of u[m * step_u] * q[m * R + j] for the n columns from
 * `first`. `row` and `q` may be NULL. IN and OUT: the suffixes of what `rows` and `out` store. */
#define DEFINE_COMBINE(name, IN_TYPE, IN, OUT_TYPE, OUT)                                                                                \
  static inline void name(OUT_TYPE *out, int add, i64 first, i64 n, const STORE *row, ACC self, const IN_TYPE *const *rows,             \
                          const ACC *w, i64 step, i64 count, const ACC *q, i64 R, const ACC *u, i64 step_u, i64 M) {                    \
    const i64 end = first + n;                                                                                                          \
    i64 d = first;                                                                                                                      \
    COMBINE_COLUMNS(TILE, IN, OUT)                                                                                                      \
    COMBINE_COLUMNS(2, IN, OUT)                                                                                                         \
    COMBINE_COLUMNS(1, IN, OUT)                                                                                                         \
    for (; d < end; d++) {                                                                                                              \
      ACC total = add ? PASTE(get, OUT)(out + d) : 0;                                                                                   \
      if (row) total += self * NAME(get)(row + d);                                                                                      \
      for (i64 k = 0; k < count; k++) total += w[k * step] * PASTE(get, IN)(rows[k] + d);                                               \
      if (q)                                                                                                                            \
        for (i64 m = 0; m < M; m++) total += u[m * step_u] * q[m * R + d];                                                              \
      PASTE(put, OUT)(out + d, total);                                                                                                  \
    }                                                                                                                                   \
  }
#define COMBINE_COLUMNS(vectors, IN, OUT)                                                                                               \
  for (; d + (vectors) * WIDE <= end; d += (vectors) * WIDE) {                                                                          \
    VEC total[vectors];                                                                                                                 \
    for (int v = 0; v < (vectors); v++) total[v] = add ? PASTE(load, OUT)(out + d + v * WIDE) : (VEC){0};                               \
    if (row)                                                                                                                            \
      for (int v = 0; v < (vectors); v++) total[v] += self * NAME(load)(row + d + v * WIDE);                                            \
    for (i64 k = 0; k < count; k++)                                                                                                     \
      for (int v = 0; v < (vectors); v++) total[v] += w[k * step] * PASTE(load, IN)(rows[k] + d + v * WIDE);                            \
    if (q)                                                                                                                              \
      for (i64 m = 0; m < M; m++)                                                                                                       \
        for (int v = 0; v < (vectors); v++) total[v] += u[m * step_u] * EXACT(load)(q + m * R + d + v * WIDE);                          \
    for (int v = 0; v < (vectors); v++) PASTE(store, OUT)(out + d + v * WIDE, total[v]);                                                \
  }

#else /* one storage type */

#define VEC PASTE(VEC, EXACT_SUFFIX)
#define WIDE ((i64)(sizeof(VEC) / sizeof(ACC)))

DEFINE_COMBINE(NAME(combine), STORE, SUFFIX, STORE, SUFFIX)
#if STORE_IS_ACC
#define combine_exact_f32 combine_f32
#define combine_grads_f32 combine_f32
#define combine_grads_exact_f32 combine_f32
#define combine_exact_f64 combine_f64
#define combine_grads_f64 combine_f64
#define combine_grads_exact_f64 combine_f64
#else
DEFINE_COMBINE(NAME(combine_exact), STORE, SUFFIX, ACC, EXACT_SUFFIX)
DEFINE_COMBINE(NAME(combine_grads), ACC, EXACT_SUFFIX, STORE, SUFFIX)
DEFINE_COMBINE(NAME(combine_grads_exact), ACC, EXACT_SUFFIX, ACC, EXACT_SUFFIX)
#endif

static inline i64 NAME(tokens_ahead)(i64 D) { return 1 + AHEAD_BYTES / (D * (i64)sizeof(STORE)); }

/* Ask for a row some tokens ahead: S streams at once are more than the hardware follows on its own. */
static inline void NAME(ask_for)(const STORE *x, i64 n) {
  for (i64 j = 0; j < n; j += 64 / (i64)sizeof(STORE)) __builtin_prefetch(x + j);
}

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

/* <x, y> */
static inline ACC NAME(dot)(const STORE *x, const ACC *y, i64 n) {
  VEC total = {0};
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) total += NAME(load)(x + j) * EXACT(load)(y + j);
  ACC sum = EXACT(sum)(total);
  for (; j < n; j++) sum += NAME(get)(x + j) * y[j];
  return sum;
}

/* out[m * step] = r * <x, q[m]> for M rows of q that are R apart; two at a time, so that x is loaded half as often */
static inline void NAME(dots)(const STORE *x, const ACC *q, i64 R, i64 n, i64 M, ACC r, ACC *out, i64 step) {
  i64 m = 0;
  for (; m + 2 <= M; m += 2) {
    const ACC *first = q + m * R, *second = first + R;
    VEC one = {0}, two = {0};
    i64 j = 0;
    for (; j + WIDE <= n; j += WIDE) {
      const VEC v = NAME(load)(x + j);
      one += v * EXACT(load)(first + j);
      two += v * EXACT(load)(second + j);
    }
    ACC a = EXACT(sum)(one), b = EXACT(sum)(two);
    for (; j < n; j++) {
      a += NAME(get)(x + j) * first[j];
      b += NAME(get)(x + j) * second[j];
    }
    out[m * step] = r * a;
    out[(m + 1) * step] = r * b;
  }
  if (m < M) out[m * step] = r * NAME(dot)(x, q + m * R, n);
}

/* out = r * x * gain */
static inline void NAME(scale)(STORE *out, ACC r, const ACC *x, const ACC *gain, i64 n) {
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) NAME(store)(out + j, r * EXACT(load)(x + j) * EXACT(load)(gain + j));
  for (; j < n; j++) NAME(put)(out + j, r * x[j] * gain[j]);
}

static inline void NAME(store_scaled)(STORE *out, ACC weight, const ACC *x, i64 n) {
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) NAME(store)(out + j, weight * EXACT(load)(x + j));
  for (; j < n; j++) NAME(put)(out + j, weight * x[j]);
}

static inline void NAME(widen)(ACC *out, const STORE *x, i64 n) {
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) EXACT(store)(out + j, NAME(load)(x + j));
  for (; j < n; j++) out[j] = NAME(get)(x + j);
}

/* Through y = r x gain with r the reciprocal RMS of x: dx = r (g gain - x r^2 <g gain, x> / n), and dgain += g x r. */
static inline void NAME(norm_backward)(ACC *dx, const STORE *g, const ACC *x, const ACC *gain, ACC r, i64 n, ACC *dgain) {
  VEC along = {0};
  i64 j = 0;
  for (; j + WIDE <= n; j += WIDE) {
    const VEC up = NAME(load)(g + j), v = EXACT(load)(x + j), scaled = up * EXACT(load)(gain + j);
    along += scaled * v;
    EXACT(store)(dx + j, r * scaled);
    EXACT(store)(dgain + j, EXACT(load)(dgain + j) + r * (up * v));
  }
  ACC sum = EXACT(sum)(along);
  for (; j < n; j++) {
    const ACC up = NAME(get)(g + j);
    sum += up * gain[j] * x[j];
    dx[j] = r * up * gain[j];
    dgain[j] += r * up * x[j];
  }
  const ACC back = -r * r * r * sum / n;
  j = 0;
  for (; j + WIDE <= n; j += WIDE) EXACT(store)(dx + j, EXACT(load)(dx + j) + back * EXACT(load)(x + j));
  for (; j < n; j++) dx[j] += back * x[j];
}

#undef WIDE
#undef VEC
#endif
