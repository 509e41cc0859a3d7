/* The steps of steps.c for one storage type: TYPE, whose vectors KIND loads and whose numbers FROM and TO convert. */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define TYPED(name) JOIN(name, KIND)
#define LOAD TYPED(load)
#define ROUNDED(x) FROM(TO(x))

static inline __attribute__((always_inline)) void TYPED(dots)(const int R, const TYPE *w, const float *x, i64 inputs, float *found) {
  f32x16 even[MOST_ROWS] = {{0}}, odd[MOST_ROWS] = {{0}};
  i64 i = 0;
  for (; i + 32 <= inputs; i += 32) {
    __builtin_prefetch(w + i + AHEAD);
    if (sizeof(TYPE) == 4) __builtin_prefetch(w + i + AHEAD + 16);
    const f32x16 a = LOAD(w + i), b = LOAD(w + i + 16);
    for (int r = 0; r < R; r++) {
      even[r] += a * load_f32(x + r * inputs + i);
      odd[r] += b * load_f32(x + r * inputs + i + 16);
    }
  }
  for (int r = 0; r < R; r++) found[r] = sum_f32(even[r] + odd[r]);
  for (; i < inputs; i++)
    for (int r = 0; r < R; r++) found[r] += FROM(w[i]) * x[r * inputs + i];
}

/* Output o of matrix k for R rows, rounded. */
static inline __attribute__((always_inline)) void TYPED(outputs_of)(const int R, const struct product *a, i64 k, i64 o, const float *x, float *found) {
  TYPED(dots)(R, (const TYPE *)a->weights[k] + o * a->inputs, x, a->inputs, found);
  const float b = a->biases[k] ? FROM(((const TYPE *)a->biases[k])[o]) : 0;
  for (int r = 0; r < R; r++) found[r] = ROUNDED(found[r] + b);
}

static inline __attribute__((always_inline)) void TYPED(product_rows)(const int R, const struct product *a, const float *x) {
  const i64 matrices = a->kind == SWIGLU ? 1 : a->count;
  i64 total = 0;
  for (i64 k = 0; k < matrices; k++) total += a->outputs[k];
#pragma omp parallel for schedule(static)
  for (i64 c = 0; c < (total + CHUNK - 1) / CHUNK; c++) {
    i64 k = 0, first = 0;
    for (i64 at = c * CHUNK; at < smaller((c + 1) * CHUNK, total); at++) {
      while (at >= first + a->outputs[k]) first += a->outputs[k++];
      const i64 o = at - first;
      TYPE *y = (TYPE *)a->y[k] + o;
      float found[MOST_ROWS], other[MOST_ROWS];
      TYPED(outputs_of)(R, a, k, o, x, found);
      if (a->kind == SWIGLU) {
        TYPED(outputs_of)(R, a, 1, o, x, other);
        for (int r = 0; r < R; r++) found[r] = ROUNDED(silu(found[r])) * other[r];
      }
      for (int r = 0; r < R; r++) {
        TYPE *to = y + r * a->stride[k];
        *to = TO(a->kind == ADD_PRODUCT ? FROM(*to) + found[r] : found[r]);
      }
    }
  }
}

void TYPED(product)(const struct product *a) {
  const float *x = a->widened ? a->widened : a->x;
  for (i64 i = 0; a->widened && i < a->rows * a->inputs; i++) a->widened[i] = FROM(((const TYPE *)a->x)[i]);
  switch (a->rows) { /* a constant number of rows keeps the sums in registers */
    case 1: TYPED(product_rows)(1, a, x); break;
    case 2: TYPED(product_rows)(2, a, x); break;
    case 3: TYPED(product_rows)(3, a, x); break;
    case 4: TYPED(product_rows)(4, a, x); break;
    case 5: TYPED(product_rows)(5, a, x); break;
    case 6: TYPED(product_rows)(6, a, x); break;
    case 7: TYPED(product_rows)(7, a, x); break;
    case MOST_ROWS: TYPED(product_rows)(MOST_ROWS, a, x); break;
    default: break;
  }
}

static inline float TYPED(dot)(const TYPE *k, const float *q, i64 width) {
  f32x16 sum = {0};
  i64 i = 0;
  for (; i + 16 <= width; i += 16) sum += LOAD(k + i) * load_f32(q + i);
  float total = sum_f32(sum);
  for (; i < width; i++) total += FROM(k[i]) * q[i];
  return total;
}

/* Of 16 columns of `count` rows, `stride` apart. Four sums, since one would wait for itself. */
static inline f32x16 TYPED(mixture)(const TYPE *rows, const float *weights, i64 count, i64 stride) {
  f32x16 a = {0}, b = {0}, c = {0}, d = {0};
  i64 t = 0;
  for (; t + 4 <= count; t += 4) {
    const TYPE *row = rows + t * stride;
    a += LOAD(row) * weights[t];
    b += LOAD(row + stride) * weights[t + 1];
    c += LOAD(row + 2 * stride) * weights[t + 2];
    d += LOAD(row + 3 * stride) * weights[t + 3];
  }
  for (; t < count; t++) a += LOAD(rows + t * stride) * weights[t];
  return (a + b) + (c + d);
}

/* A head as attention takes it: normalised where there is a gain, rotated, rounded. */
static void TYPED(turned)(const TYPE *given, const void *gain, const struct attention *a, i64 row, float *out) {
  const i64 width = a->width, half = width / 2;
  const float *cos = a->cos + row * half, *sin = a->sin + row * half;
  float x[width];
  for (i64 i = 0; i < width; i++) x[i] = FROM(given[i]);
  if (gain) {
    float square = 0;
    for (i64 i = 0; i < width; i++) square += x[i] * x[i];
    const float r = 1 / sqrtf(square / width + (float)a->eps);
    for (i64 i = 0; i < width; i++) x[i] = ROUNDED(x[i] * r * FROM(((const TYPE *)gain)[i]));
  }
  for (i64 i = 0; i < half; i++) {
    out[i] = ROUNDED(x[i] * cos[i] - x[half + i] * sin[i]);
    out[half + i] = ROUNDED(x[half + i] * cos[i] + x[i] * sin[i]);
  }
}

void TYPED(attention)(const struct attention *a) {
  const i64 width = a->width, group = a->heads / a->key_value_heads, own = a->slots[1];
#pragma omp parallel for schedule(static)
  for (i64 unit = 0; unit < a->rows * a->key_value_heads; unit++) {
    const i64 row = unit / a->key_value_heads, head = unit % a->key_value_heads;
    TYPE *keys = (TYPE *)a->keys + row * a->row_stride + head * a->head_stride;
    TYPE *values = (TYPE *)a->values + row * a->row_stride + head * a->head_stride;
    float turned[width];
    TYPED(turned)((const TYPE *)a->key + row * a->key_stride + head * width, a->key_gain, a, row, turned);
    for (i64 i = 0; i < width; i++) keys[own * width + i] = TO(turned[i]);
    memcpy(values + own * width, (const TYPE *)a->value + row * a->value_stride + head * width, sizeof(TYPE) * width);
    const i64 from = a->first && a->first[row] > a->slots[0] ? a->first[row] : a->slots[0], seen = own + 1 - from;
    for (i64 h = head * group; h < (head + 1) * group; h++) {
      float *p = a->scores + (row * a->heads + h) * a->capacity, largest = -INFINITY, total = 0, mixed[width];
      TYPED(turned)((const TYPE *)a->query + row * a->query_stride + h * width, a->query_gain, a, row, turned);
      for (i64 t = 0; t < seen; t++) {
        p[t] = TYPED(dot)(keys + (from + t) * width, turned, width) * (float)a->scale;
        largest = p[t] > largest ? p[t] : largest;
      }
      i64 t = 0;
      for (; t + 16 <= seen; t += 16) {
        const f32x16 e = exp_f32x16(load_f32(p + t) - largest);
        store_f32(p + t, e);
        total += sum_f32(e);
      }
      for (; t < seen; t++) total += p[t] = exp_f32x16((f32x16){0} + (p[t] - largest))[0];
      const TYPE *v = values + from * width;
      i64 i = 0;
      for (; i + 16 <= width; i += 16) store_f32(mixed + i, TYPED(mixture)(v + i, p, seen, width));
      for (; i < width; i++) {
        mixed[i] = 0;
        for (t = 0; t < seen; t++) mixed[i] += FROM(v[t * width + i]) * p[t];
      }
      TYPE *out = (TYPE *)a->out + (row * a->heads + h) * width;
      for (i64 i = 0; i < width; i++) out[i] = TO(mixed[i] / total);
    }
  }
}

#undef JOIN_
#undef JOIN
#undef TYPED
#undef LOAD
#undef ROUNDED
