/* Adam on a row of elements, in one pass over memory: every array is read once and written once.
 *
 * One function for each kind of weights and of gradients, adam_WEIGHTS_GRADS:
 *
 *   f32    float32 weights, and nothing else
 *   bf16   float32 weights, and a copy rounded to bfloat16
 *   f16    float32 weights, and a copy rounded to float16
 *   split  bfloat16 weights and the 16 bits that they lack (see colossalai/kernel/split.py)
 *
 * The formula is at the top of colossalai/kernel/adam.py.  adam_on_threads runs one of these functions on many blocks, and
 * keeps what was there before, if it is asked to.
 */
#include <math.h>
#include "past_cache.h"
#include "threads.h"

typedef struct {
    float beta1, beta2, eps;
    float rate;      /* lr / c1 */
    float root;      /* 1 / sqrt(c2) */
    float shrink;    /* weights are multiplied by it first (AdamW) */
    float decay;     /* times the weights is added to the gradients (Adam) */
    float grad_scale;
} Options;

typedef union { float f; int32_t i; uint32_t u; } Bits;
typedef float f32;
typedef uint16_t bf16;
typedef _Float16 f16;

static inline float f32_of_f32(float x) { return x; }
static inline float f32_of_f16(f16 x) { return (float)x; }
static inline float f32_of_bf16(bf16 x) {
    Bits b;
    b.u = (uint32_t)x << 16;
    return b.f;
}

static inline f16 f16_of(float x) { return (f16)x; }
static inline bf16 bf16_of(float x) { /* to nearest, ties to even; a NaN stays one */
    Bits b;
    b.f = x;
    uint32_t rounded = (b.u + 0x7fff + ((b.u >> 16) & 1)) >> 16;
    return (bf16)(x != x ? 0x7fc0 : rounded);
}

#define GET_f32(w, other, i) w[i]
#define GET_bf16(w, other, i) w[i]
#define GET_f16(w, other, i) w[i]
#define GET_split(w, other, i) join(w[i], other[i])

#define PUT_f32(w, other, i, x) w[i] = (x)
#define PUT_bf16(w, other, i, x) (w[i] = (x), other[i] = bf16_of(x))
#define PUT_f16(w, other, i, x) (w[i] = (x), other[i] = f16_of(x))
#define PUT_split(w, other, i, x) (w[i] = upper((x)), other[i] = lower((x)))

static inline float join(bf16 half, int16_t tail) {
    Bits b;
    b.u = ((uint32_t)half << 16) + (uint32_t)(int32_t)tail;
    return b.f;
}
static inline bf16 upper(float x) {
    Bits b;
    b.f = x;
    return (bf16)((b.u + 0x8000) >> 16);
}
static inline int16_t lower(float x) {
    Bits b;
    b.f = x;
    return (int16_t)(b.u - (((b.u + 0x8000) >> 16) << 16));
}

#define DEFINE(WEIGHTS, GRADS, weight_t, other_t)                                                                    \
    void adam_##WEIGHTS##_##GRADS(weight_t *restrict w, other_t *restrict other, float *restrict m, float *restrict v, \
                                  const GRADS *restrict g, int64_t n, const Options *options) {                      \
        const Options o = *options;                                                                                  \
        for (int64_t i = 0; i < n; ++i) {                                                                            \
            float weight = GET_##WEIGHTS(w, other, i);                                                               \
            float grad = f32_of_##GRADS(g[i]) * o.grad_scale + (o.decay != 0 ? o.decay * weight : 0);                \
            float first = m[i] + (1 - o.beta1) * (grad - m[i]);                                                      \
            float second = v[i] * o.beta2 + (1 - o.beta2) * grad * grad;                                             \
            float next = weight * o.shrink - o.rate * first / (sqrtf(second) * o.root + o.eps);                      \
            m[i] = first;                                                                                            \
            v[i] = second;                                                                                           \
            PUT_##WEIGHTS(w, other, i, next);                                                                        \
        }                                                                                                            \
    }

#define DEFINE_ALL(GRADS)              \
    DEFINE(f32, GRADS, float, float)   \
    DEFINE(bf16, GRADS, float, bf16)   \
    DEFINE(f16, GRADS, float, f16)     \
    DEFINE(split, GRADS, bf16, int16_t)

DEFINE_ALL(f32)
DEFINE_ALL(bf16)
DEFINE_ALL(f16)

enum { ARRAYS = 4 }; /* w, other, m, v */

typedef struct {
    char *arrays[ARRAYS];
    char *before[ARRAYS]; /* where what the arrays were is to be kept; 0: nowhere */
    const char *grads;
    int64_t n;
} Block;

typedef void (*Kernel)(void *, void *, void *, void *, const void *, int64_t, const Options *);

typedef struct {
    Kernel kernel;
    const Block *blocks;
    const Options *options;
    const int64_t *sizes; /* bytes of an element of each array, and of the gradients */
} Work;

/* Elements between two copies: in a part so long, what was copied is still in the cache when it is updated. */
#define PART 4096

static void update_part(const Work *work, const Block *b, int64_t start, int64_t n) {
    void *at[ARRAYS];
    for (int k = 0; k < ARRAYS; ++k) {
        int64_t skipped = start * work->sizes[k];
        at[k] = b->arrays[k] + skipped;
        if (b->before[k]) copy_past_cache(b->before[k] + skipped, at[k], n * work->sizes[k]);
    }
    work->kernel(at[0], at[1], at[2], at[3], b->grads + start * work->sizes[ARRAYS], n, work->options);
}

static void update_block(const void *what, int64_t i) {
    const Work *work = what;
    const Block *b = &work->blocks[i];
    int64_t length = b->n;
    for (int k = 0; k < ARRAYS; ++k) {
        if (b->before[k]) length = PART;
    }
    for (int64_t start = 0; start < b->n; start += length) {
        update_part(work, b, start, b->n - start < length ? b->n - start : length);
    }
    finish_copies();
}

void adam_on_threads(Kernel kernel, const Block *blocks, int64_t count, const Options *options, const int64_t *sizes,
                     int64_t threads) {
    const Work work = {kernel, blocks, options, sizes};
    on_threads(update_block, &work, count, threads);
}
