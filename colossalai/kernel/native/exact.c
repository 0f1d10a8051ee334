/* Products and attention in float32 whose results do not depend on the other rows, bit for bit.
 *
 * Every number is summed by itself, in one order: lane l of a vector adds up the products l, l + LANES, l + 2 LANES ... one after the
 * other, and the lanes are added pairwise.  Tiles only decide what is in registers at the same time. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "threads.h"

#define LANES 16
#define TILE 4
#define COLUMNS 64 /* that one part of the work computes */

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Vector whole(const float *x) { return *(const Unaligned *)x; }

static inline Vector partial(const float *x, int64_t count) {
    float filled[LANES] = {0};
    memcpy(filled, x, count * sizeof(float));
    return whole(filled);
}

/* sum + x * y, rounded once */
static inline Vector fused(Vector x, Vector y, Vector sum) {
    Vector result;
    for (int i = 0; i < LANES; ++i) result[i] = __builtin_fmaf(x[i], y[i], sum[i]);
    return result;
}

static inline float lanes(Vector v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) v[i] += v[i + width];
    return v[0];
}

static inline float dot(const float *x, const float *y, int64_t count) {
    Vector sum = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum = fused(whole(x + i), whole(y + i), sum);
    if (i < count) sum = fused(partial(x + i, count - i), partial(y + i, count - i), sum);
    return lanes(sum);
}

typedef struct {
    const float *a, *b, *bias;
    float *out;
    int64_t rows, columns, inner;
    int64_t a_batch, a_row, b_batch, b_column, bias_batch, bias_row, bias_column; /* strides; numbers along the inner dim are neighbours */
} Product;

static inline void put(const Product *p, int64_t batch, int64_t row, int64_t column, float value) {
    if (p->bias) value += p->bias[batch * p->bias_batch + row * p->bias_row + column * p->bias_column];
    p->out[(batch * p->rows + row) * p->columns + column] = value;
}

static inline __attribute__((always_inline)) void tile(const Product *p, int64_t batch, int64_t row, int64_t column, const int rows, const int columns) {
    const float *a = p->a + batch * p->a_batch + row * p->a_row, *b = p->b + batch * p->b_batch + column * p->b_column;
    Vector sum[TILE][TILE] = {{{0}}};
    int64_t i = 0;
    for (; i + LANES <= p->inner; i += LANES) {
        Vector y[TILE];
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) y[c] = whole(b + c * p->b_column + i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            Vector x = whole(a + r * p->a_row + i);
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) sum[r][c] = fused(x, y[c], sum[r][c]);
        }
    }
    int64_t rest = p->inner - i;
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) {
            Vector s = sum[r][c];
            if (rest) s = fused(partial(a + r * p->a_row + i, rest), partial(b + c * p->b_column + i, rest), s);
            put(p, batch, row + r, column + c, lanes(s));
        }
}

static void product_part(const void *work, int64_t number) {
    const Product *p = work;
    int64_t groups = (p->columns + COLUMNS - 1) / COLUMNS, batch = number / groups;
    int64_t first = number % groups * COLUMNS, last = first + COLUMNS < p->columns ? first + COLUMNS : p->columns;
    int64_t row = 0;
    for (; row + TILE <= p->rows; row += TILE) {
        int64_t column = first;
        for (; column + TILE <= last; column += TILE) tile(p, batch, row, column, TILE, TILE);
        for (; column < last; ++column) tile(p, batch, row, column, TILE, 1);
    }
    for (; row < p->rows; ++row) {
        int64_t column = first;
        for (; column + TILE <= last; column += TILE) tile(p, batch, row, column, 1, TILE);
        for (; column < last; ++column) tile(p, batch, row, column, 1, 1);
    }
}

void exact_product(const Product *p, int64_t batches, int64_t threads) {
    on_threads(product_part, p, batches * ((p->columns + COLUMNS - 1) / COLUMNS), threads);
}

/* e to the x <= 0, the same in every place of a vector and alone: all steps are rounded once.  x = n ln 2 + r, and a polynomial in r. */
static inline float power(float x) {
    if (!(x > -87.0f)) return x != x ? x : 0.0f;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(n, -0.693145752f, x);
    r = __builtin_fmaf(n, -1.42860677e-6f, r);
    float y = 1.0f / 5040;
    y = __builtin_fmaf(y, r, 1.0f / 720);
    y = __builtin_fmaf(y, r, 1.0f / 120);
    y = __builtin_fmaf(y, r, 1.0f / 24);
    y = __builtin_fmaf(y, r, 1.0f / 6);
    y = __builtin_fmaf(y, r, 0.5f);
    y = __builtin_fmaf(y, r, 1.0f);
    y = __builtin_fmaf(y, r, 1.0f);
    union {
        int32_t bits;
        float value;
    } scale = {((int32_t)n + 127) << 23};
    return y * scale.value;
}

typedef struct {
    const float *query, *keys, *values, *mask, *slopes;
    float *out, *lse;
    const int32_t *table, *starts, *lengths;
    int64_t sequences, tokens, heads, shared, width, value_width, page_size;
    int64_t query_token, query_head, key_sequence, key_token, key_head, value_sequence, value_token, value_head; /* strides */
    int64_t mask_sequence, mask_head, mask_query, mask_key, table_row;
    int64_t causal, window; /* causal: 1 for the last queries of a sequence, 2 for the first ones */
    float scale;
} Attention;

static inline int64_t slot(const Attention *p, int64_t sequence, int64_t place) {
    if (!p->table) return place;
    return p->table[sequence * p->table_row + place / p->page_size] * p->page_size + place % p->page_size;
}

static void attention_part(const void *work, int64_t number) {
    const Attention *p = work;
    int64_t token = number / p->heads, head = number % p->heads, sequence = 0;
    while (p->starts[sequence + 1] <= token) ++sequence;
    int64_t own = head / p->shared, query = token - p->starts[sequence], queries = p->starts[sequence + 1] - p->starts[sequence];
    int64_t length = p->lengths[sequence], last = length - 1;
    if (p->causal) last = p->causal == 1 ? length - queries + query : query < length ? query : length - 1;
    int64_t first = last + 1 > p->window ? last + 1 - p->window : 0;
    const float *q = p->query + token * p->query_token + head * p->query_head;
    const float *keys = p->keys + own * p->key_head, *values = p->values + own * p->value_head;
    if (!p->table) keys += sequence * p->key_sequence, values += sequence * p->value_sequence;
    float *out = p->out + (token * p->heads + head) * p->value_width, *scores = malloc((last < first ? 1 : last - first + 1) * sizeof(float));
    float top = -INFINITY, total = 0;
    for (int64_t i = first; i <= last; ++i) {
        float score = dot(q, keys + slot(p, sequence, i) * p->key_token, p->width) * p->scale;
        if (p->slopes) score = __builtin_fmaf(p->slopes[head], (float)(i - last), score);
        if (p->mask) score += p->mask[sequence * p->mask_sequence + head * p->mask_head + query * p->mask_query + i * p->mask_key];
        scores[i - first] = score;
        top = score > top || score != score ? score : top;
    }
    memset(out, 0, p->value_width * sizeof(float));
    for (int64_t i = first; i <= last; ++i) {
        float share = top == -INFINITY ? 0 : power(scores[i - first] - top);
        const float *value = values + slot(p, sequence, i) * p->value_token;
        total += share;
        for (int64_t d = 0; d < p->value_width; ++d) out[d] = __builtin_fmaf(share, value[d], out[d]);
    }
    if (total != 0) /* also if it is no number */
        for (int64_t d = 0; d < p->value_width; ++d) out[d] /= total;
    if (p->lse) p->lse[number] = total != 0 ? top + logf(total) : -INFINITY;
    free(scores);
}

void exact_attention(const Attention *p, int64_t threads) {
    on_threads(attention_part, p, p->tokens * p->heads, threads);
}
