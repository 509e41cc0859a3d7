/* The steps of a decoding program beside depth reads: look-up, matrices times a few rows, attention of one token a row.
 *
 * A step is a function of one structure, whose pointers stay what they are from token to token. R rows of a batch, E head width.
 *
 * A product is as fast as its weights can be read, which BLAS libraries are not for one row: they read with one thread. Here every thread
 * reads one run of rows of the matrices. A row of x is summed in the same order however many there are, so that what a batch is made of
 * changes no result. What a step puts out is rounded to the storage type where a tensor would be.
 */
#include "kernel_rows.h"

enum { MOST_ROWS = 8, MATRICES = 3, AHEAD = 1024, CHUNK = 8 }; /* AHEAD: elements asked for before their use; CHUNK: outputs at a time */
enum { STORE_PRODUCT = 0, ADD_PRODUCT = 1, SWIGLU = 2 };

typedef void (*step)(const void *);
void run_steps(const step *steps, const void *const *arguments, i64 count) {
  for (i64 i = 0; i < count; i++) steps[i](arguments[i]);
}
i64 most_rows(void) { return MOST_ROWS; }

/* exp of 16 numbers to some 1e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Below -87 it is 0. */
static inline f32x16 exp_f32x16(f32x16 x) {
  typedef int32_t i32x16 __attribute__((vector_size(64)));
  const i32x16 below = x < -87.0f, above = x > 88.0f;
  x = (f32x16)((~(below | above) & (i32x16)x) | (above & (i32x16)((f32x16){0} + 88.0f)));
  const f32x16 scaled = x * 1.44269504088896341f;
  const i32x16 n = __builtin_convertvector(scaled + (f32x16)(0x3f000000 | ((i32x16)scaled & (int)0x80000000)), i32x16);
  const f32x16 whole = __builtin_convertvector(n, f32x16), r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i32x16 power = (n + 127) << 23;
  return (f32x16)(~below & (i32x16)(p * (f32x16)power));
}
static inline float silu(float x) { return x / (1 + expf(-x)); }

struct look_up { i64 rows, bytes; const char *table; const i64 *ids; char *out; };
void look_up(const struct look_up *a) {
  for (i64 r = 0; r < a->rows; r++) memcpy(a->out + r * a->bytes, a->table + a->ids[r] * a->bytes, a->bytes);
}

/* y_k = x W_k^T + b_k for K matrices of one input, rows `stride` apart; added to what is there; or silu(y_0) y_1, which is stored as y_0. */
struct product {
  i64 rows, inputs, count, kind;
  const void *weights[MATRICES], *biases[MATRICES];
  i64 outputs[MATRICES], stride[MATRICES];
  const void *x;
  void *y[MATRICES];
  float *widened; /* [R, inputs], scratch; NULL for float32 */
};

/* Attention of one new token a row. What precedes it (by-head norms, rotation, the entry into the cache) is part of the step. A token sees
 * the slots from `slots[0]`, or `first[r]` if that is later, to its own, `slots[1]`. */
struct attention {
  i64 rows, heads, key_value_heads, width;
  const void *query, *key, *value;
  i64 query_stride, key_stride, value_stride;
  const void *query_gain, *key_gain; /* [E] each, or NULL */
  double eps, scale;
  const float *cos, *sin; /* [R, E/2] */
  void *keys, *values;
  i64 row_stride, head_stride;
  const i64 *slots, *first;
  float *scores; /* scratch, [R * heads, capacity] */
  i64 capacity;
  void *out; /* [R, heads * E] */
};

static inline float from_f32(float x) { return x; }
static inline float to_f32(float x) { return x; }
static inline float one_from_bf16(uint16_t x) { return from_bf16((u16x16){x})[0]; }
static inline uint16_t one_to_bf16(float x) { return to_bf16((f32x16){x})[0]; }

#define KIND f32
#define TYPE float
#define FROM from_f32
#define TO to_f32
#include "steps_typed.h"
#undef KIND
#undef TYPE
#undef FROM
#undef TO
#define KIND bf16
#define TYPE uint16_t
#define FROM one_from_bf16
#define TO one_to_bf16
#include "steps_typed.h"
