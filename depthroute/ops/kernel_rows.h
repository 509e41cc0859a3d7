/* Rows and vectors for kernel.c. Vectors are written out with the types that gcc and clang share: left to themselves, compilers vectorise the
 * loop over the sources instead, with gathers, and add up a vector's lanes one after the other.
 *
 * `load` and `store` convert between storage and arithmetic: float32 for float16, bfloat16 and float32, float64 for itself. `_part` takes
 * the first n elements of a vector and leaves the others zero, or alone. `stream` stores past the caches, to addresses of whole lines.
 */
#ifndef ROWS

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MASKS 1
#else
#define MASKS 0
#endif

typedef int64_t i64;
static inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
enum { TILE = 4, LINE = 64, AHEAD_BYTES = 4096 }; /* TILE vectors of columns are summed in registers */
enum { WRITE = 0, ADD = 1, STREAM = 2 }; /* how a row is stored */

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
static inline f32x16 load_part_f32(const float *x, i64 n) {
#if MASKS
  return (f32x16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), x);
#else
  f32x16 v = {0};
  memcpy(&v, x, n * sizeof *x);
  return v;
#endif
}
static inline void store_part_f32(float *x, f32x16 v, i64 n) {
#if MASKS
  _mm512_mask_storeu_ps(x, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  memcpy(x, &v, n * sizeof *x);
#endif
}
static inline void stream_f32(float *x, f32x16 v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(x, (__m512)v);
#elif defined(__AVX__)
  const union { f32x16 whole; f32x8 half[2]; } a = {v};
  _mm256_stream_ps(x, (__m256)a.half[0]);
  _mm256_stream_ps(x + 8, (__m256)a.half[1]);
#else
  store_f32(x, v);
#endif
}
static inline float sum_f32(f32x16 v) {
  union { f32x16 whole; f32x8 half[2]; } a = {v};
  union { f32x8 whole; f32x4 half[2]; } b = {a.half[0] + a.half[1]};
  const f32x4 c = b.half[0] + b.half[1];
  return (c[0] + c[1]) + (c[2] + c[3]);
}

static inline f64x8 load_f64(const double *x) { f64x8 v; memcpy(&v, x, sizeof v); return v; }
static inline void store_f64(double *x, f64x8 v) { memcpy(x, &v, sizeof v); }
static inline f64x8 load_part_f64(const double *x, i64 n) {
  f64x8 v = {0};
  memcpy(&v, x, n * sizeof *x);
  return v;
}
static inline void store_part_f64(double *x, f64x8 v, i64 n) { memcpy(x, &v, n * sizeof *x); }
static inline void stream_f64(double *x, f64x8 v) { store_f64(x, v); } /* nobody trains in float64 */
static inline double sum_f64(f64x8 v) {
  union { f64x8 whole; f64x4 half[2]; } a = {v};
  union { f64x4 whole; f64x2 half[2]; } b = {a.half[0] + a.half[1]};
  const f64x2 c = b.half[0] + b.half[1];
  return c[0] + c[1];
}

/* Sixteen halves of either kind */
static inline u16x16 load_halves(const void *x, i64 n) {
  u16x16 v = {0};
#if MASKS
  v = (u16x16)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), x);
#else
  memcpy(&v, x, n * sizeof(uint16_t));
#endif
  return v;
}
static inline void store_halves(void *x, u16x16 v, i64 n) {
#if MASKS
  _mm256_mask_storeu_epi16(x, (__mmask16)((1u << n) - 1), (__m256i)v);
#else
  memcpy(x, &v, n * sizeof(uint16_t));
#endif
}
static inline void stream_halves(void *x, u16x16 v) {
#ifdef __AVX__
  _mm256_stream_si256(x, (__m256i)v);
#else
  memcpy(x, &v, sizeof v);
#endif
}

/* bfloat16: the upper half of a float32; rounded to nearest even, NaN staying NaN */
static inline f32x16 from_bf16(u16x16 v) { return (f32x16)(__builtin_convertvector(v, u32x16) << 16); }
static inline u16x16 to_bf16(f32x16 v) {
  const u32x16 bits = (u32x16)v;
  const u32x16 nan = (u32x16)((bits & 0x7fffffffu) > 0x7f800000u);
  const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector((nan & ((bits >> 16) | 64u)) | (~nan & rounded), u16x16);
}
#define DEFINE_HALVES(KIND, TYPE)                                                                                     \
  static inline f32x16 load_##KIND(const TYPE *x) {                                                                   \
    u16x16 v;                                                                                                         \
    memcpy(&v, x, sizeof v);                                                                                          \
    return from_##KIND(v);                                                                                            \
  }                                                                                                                   \
  static inline void store_##KIND(TYPE *x, f32x16 v) {                                                                \
    const u16x16 out = to_##KIND(v);                                                                                  \
    memcpy(x, &out, sizeof out);                                                                                      \
  }                                                                                                                   \
  static inline f32x16 load_part_##KIND(const TYPE *x, i64 n) { return from_##KIND(load_halves(x, n)); }              \
  static inline void store_part_##KIND(TYPE *x, f32x16 v, i64 n) { store_halves(x, to_##KIND(v), n); }                \
  static inline void stream_##KIND(TYPE *x, f32x16 v) { stream_halves(x, to_##KIND(v)); }
DEFINE_HALVES(bf16, uint16_t)

#ifdef __FLT16_MAX__
typedef _Float16 f16x16 __attribute__((vector_size(32)));
static inline f32x16 from_f16(u16x16 v) { return __builtin_convertvector((f16x16)v, f32x16); }
static inline u16x16 to_f16(f32x16 v) { return (u16x16)__builtin_convertvector(v, f16x16); }
DEFINE_HALVES(f16, _Float16)
#endif

/* Streamed rows are in memory before anyone else may look at them. */
static inline void end_of_stream(void) {
#ifdef __AVX__
  _mm_sfence();
#endif
}

/* Rows are asked for some tokens ahead: S streams at once are more than the hardware follows on its own. Into the second-level cache: the
 * first has too few misses in flight to keep up. */
static inline void ask_for(const char *x, i64 bytes) {
  for (i64 i = 0; i < bytes; i += LINE) __builtin_prefetch(x + i, 0, 2);
}

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(stem) PASTE(stem, SUFFIX)
#define EXACT(stem) PASTE(stem, EXACT_SUFFIX)
#define VEC_f32 f32x16
#define VEC_f64 f64x8

/* how: out[j] = or += self * row[j] + sum over k of w[k * step] * rows[k][j] + sum over m of u[m * step_u] * q[m * R + j] for the n columns
 * from `first`. `row` and `q` may be NULL. IN and OUT: the suffixes of what `rows` and `out` store. */
#define DEFINE_COMBINE(name, IN_TYPE, IN, OUT_TYPE, OUT)                                                                                \
  static inline void name(OUT_TYPE *out, int how, i64 first, i64 n, const STORE *row, ACC self, const IN_TYPE *const *rows,             \
                          const ACC *w, i64 step, i64 count, const ACC *q, i64 R, const ACC *u, i64 step_u, i64 M) {                    \
    const i64 end = first + n;                                                                                                          \
    i64 d = first;                                                                                                                      \
    COMBINE_COLUMNS(TILE, IN, OUT)                                                                                                      \
    COMBINE_COLUMNS(1, IN, OUT)                                                                                                         \
    if (d < end) {                                                                                                                      \
      const i64 some = end - d;                                                                                                         \
      VEC total = {0};                                                                                                                  \
      if (how == ADD) total = PASTE(load_part, OUT)(out + d, some);                                                                     \
      if (row) total += self * NAME(load_part)(row + d, some);                                                                          \
      for (i64 k = 0; k < count; k++) total += w[k * step] * PASTE(load_part, IN)(rows[k] + d, some);                                   \
      if (q)                                                                                                                            \
        for (i64 m = 0; m < M; m++) total += u[m * step_u] * EXACT(load_part)(q + m * R + d, some);                                     \
      PASTE(store_part, OUT)(out + d, total, some);                                                                                     \
    }                                                                                                                                   \
  }
#define COMBINE_COLUMNS(vectors, IN, OUT)                                                                                               \
  for (; d + (vectors) * WIDE <= end; d += (vectors) * WIDE) {                                                                          \
    VEC total[vectors];                                                                                                                 \
    for (int v = 0; v < (vectors); v++) total[v] = how == ADD ? PASTE(load, OUT)(out + d + v * WIDE) : (VEC){0};                        \
    if (row)                                                                                                                            \
      for (int v = 0; v < (vectors); v++) total[v] += self * NAME(load)(row + d + v * WIDE);                                            \
    for (i64 k = 0; k < count; k++)                                                                                                     \
      for (int v = 0; v < (vectors); v++) total[v] += w[k * step] * PASTE(load, IN)(rows[k] + d + v * WIDE);                            \
    if (q)                                                                                                                              \
      for (i64 m = 0; m < M; m++)                                                                                                       \
        for (int v = 0; v < (vectors); v++) total[v] += u[m * step_u] * EXACT(load)(q + m * R + d + v * WIDE);                          \
    if (how == STREAM)                                                                                                                  \
      for (int v = 0; v < (vectors); v++) PASTE(stream, OUT)(out + d + v * WIDE, total[v]);                                             \
    else                                                                                                                                \
      for (int v = 0; v < (vectors); v++) PASTE(store, OUT)(out + d + v * WIDE, total[v]);                                              \
  }

#else /* one storage type */

#define VEC PASTE(VEC, EXACT_SUFFIX)
#define WIDE ((i64)(sizeof(VEC) / sizeof(ACC)))
/* The body for every whole vector of columns 0..n, with LOAD, EXACT_LOAD and the like, then for the part that is left. */
#define EVERY_VECTOR(n, BODY)                                                                                         \
  {                                                                                                                   \
    i64 j = 0;                                                                                                        \
    for (; j + WIDE <= (n); j += WIDE) {                                                                              \
      const i64 part = 0;                                                                                             \
      BODY                                                                                                            \
    }                                                                                                                 \
    if (j < (n)) {                                                                                                    \
      const i64 part = (n) - j;                                                                                       \
      BODY                                                                                                            \
    }                                                                                                                 \
  }
#define GET(x) (part ? NAME(load_part)((x) + j, part) : NAME(load)((x) + j))
#define GET_EXACT(x) (part ? EXACT(load_part)((x) + j, part) : EXACT(load)((x) + j))
#define PUT(x, v) (part ? NAME(store_part)((x) + j, v, part) : NAME(store)((x) + j, v))
#define PUT_EXACT(x, v) (part ? EXACT(store_part)((x) + j, v, part) : EXACT(store)((x) + j, v))

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

static inline ACC NAME(sum_of_squares)(const STORE *x, i64 n) {
  VEC total = {0};
  EVERY_VECTOR(n, const VEC v = GET(x); total += v * v;)
  return EXACT(sum)(total);
}

/* <x, y>, asking for the columns `ahead` of x; in two sums, because one would wait for itself */
static inline ACC NAME(dot)(const STORE *x, const ACC *y, i64 n, i64 ahead) {
  VEC total[2] = {{0}};
  i64 j = 0;
  for (; j + 2 * WIDE <= n; j += 2 * WIDE)
    for (int v = 0; v < 2; v++) {
      if (ahead) __builtin_prefetch(x + j + v * WIDE + ahead, 0, 2);
      total[v] += NAME(load)(x + j + v * WIDE) * EXACT(load)(y + j + v * WIDE);
    }
  for (; j < n; j += WIDE) {
    const i64 part = n - j < WIDE ? n - j : 0;
    if (ahead) __builtin_prefetch(x + j + ahead, 0, 2);
    total[0] += GET(x) * GET_EXACT(y);
  }
  return EXACT(sum)(total[0] + total[1]);
}

/* out[m * step] = <x, q[m]> for M rows of q that are R apart, and the sum of squares of x in the same pass; asks for the columns `ahead` */
static inline ACC NAME(dots_and_squares)(const STORE *x, const ACC *q, i64 R, i64 n, i64 M, ACC *out, i64 step, i64 ahead) {
  VEC square[2] = {{0}}, total[2] = {{0}};
  i64 j = 0;
  for (; j + 2 * WIDE <= n; j += 2 * WIDE)
    for (int v = 0; v < 2; v++) {
      if (ahead) __builtin_prefetch(x + j + v * WIDE + ahead, 0, 2);
      const VEC row = NAME(load)(x + j + v * WIDE);
      square[v] += row * row;
      total[v] += row * EXACT(load)(q + j + v * WIDE);
    }
  for (; j < n; j += WIDE) {
    const i64 part = n - j < WIDE ? n - j : 0;
    const VEC row = GET(x);
    square[0] += row * row;
    total[0] += row * GET_EXACT(q);
  }
  out[0] = EXACT(sum)(total[0] + total[1]);
  i64 m = 1;
  for (; m + 2 <= M; m += 2) { /* two at a time, so that x is loaded half as often */
    const ACC *first = q + m * R, *second = first + R;
    VEC one = {0}, two = {0};
    EVERY_VECTOR(n, const VEC row = GET(x); one += row * GET_EXACT(first); two += row * GET_EXACT(second);)
    out[m * step] = EXACT(sum)(one);
    out[(m + 1) * step] = EXACT(sum)(two);
  }
  if (m < M) out[m * step] = NAME(dot)(x, q + m * R, n, 0);
  return EXACT(sum)(square[0] + square[1]);
}

/* out = r * x * gain */
static inline void NAME(scale)(STORE *out, ACC r, const ACC *x, const ACC *gain, i64 n) {
  EVERY_VECTOR(n, PUT(out, r * GET_EXACT(x) * GET_EXACT(gain));)
}

/* out = weight * x; a STREAM of whole vectors */
static inline void NAME(store_scaled)(STORE *out, int how, ACC weight, const ACC *x, i64 n) {
  if (how == STREAM)
    for (i64 j = 0; j < n; j += WIDE) NAME(stream)(out + j, weight * EXACT(load)(x + j));
  else
    EVERY_VECTOR(n, PUT(out, weight * GET_EXACT(x));)
}

static inline void NAME(widen)(ACC *out, const STORE *x, i64 n) { EVERY_VECTOR(n, PUT_EXACT(out, GET(x));) }

/* Through y = r x gain with r the reciprocal RMS of x: dx = r (g gain - x r^2 <g gain, x> / n), and dgain += g x r. */
static inline void NAME(norm_backward)(ACC *dx, const STORE *g, const ACC *x, const ACC *gain, ACC r, i64 n, ACC *dgain) {
  VEC along = {0};
  EVERY_VECTOR(n, const VEC up = GET(g); const VEC row = GET_EXACT(x); const VEC scaled = up * GET_EXACT(gain); along += scaled * row;
               PUT_EXACT(dx, r * scaled); PUT_EXACT(dgain, GET_EXACT(dgain) + r * (up * row));)
  const ACC back = -r * r * r * EXACT(sum)(along) / n;
  EVERY_VECTOR(n, PUT_EXACT(dx, GET_EXACT(dx) + back * GET_EXACT(x));)
}

#undef EVERY_VECTOR
#undef GET
#undef GET_EXACT
#undef PUT
#undef PUT_EXACT
#endif
