/* Copies that no thread will read soon: they go past the cache, where a plain copy would first read the memory that it overwrites. */
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

static void copy_past_cache(char *to, const char *from, int64_t n) {
    int64_t done = 0;
#ifdef __AVX__
    if ((uintptr_t)to % 32 == 0) {
        for (; done + 64 <= n; done += 64) {
            __m256i low = _mm256_loadu_si256((const __m256i *)(from + done));
            __m256i high = _mm256_loadu_si256((const __m256i *)(from + done + 32));
            _mm256_stream_si256((__m256i *)(to + done), low);
            _mm256_stream_si256((__m256i *)(to + done + 32), high);
        }
    }
#endif
    memcpy(to + done, from + done, n - done);
}

/* Other threads see the copies when this one says that it is done. */
static void finish_copies(void) {
#ifdef __AVX__
    _mm_sfence();
#endif
}
