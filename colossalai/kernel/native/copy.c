/* Copies that nobody will read soon: they go past the cache, where a plain copy would first read the memory that it overwrites. */
#include <string.h>
#include "threads.h"
#ifdef __AVX__
#include <immintrin.h>
#endif

typedef struct {
    char *to;
    const char *from;
    int64_t n;
} Block;

static void copy_block(const void *work, int64_t i) {
    const Block b = ((const Block *)work)[i];
    int64_t done = 0;
#ifdef __AVX__
    if ((uintptr_t)b.to % 32 == 0) {
        for (; done + 64 <= b.n; done += 64) {
            __m256i low = _mm256_loadu_si256((const __m256i *)(b.from + done));
            __m256i high = _mm256_loadu_si256((const __m256i *)(b.from + done + 32));
            _mm256_stream_si256((__m256i *)(b.to + done), low);
            _mm256_stream_si256((__m256i *)(b.to + done + 32), high);
        }
        _mm_sfence(); /* other threads see it when this one says that it is done */
    }
#endif
    memcpy(b.to + done, b.from + done, b.n - done);
}

void copy_on_threads(const Block *blocks, int64_t count, int64_t threads) { on_threads(copy_block, blocks, count, threads); }
