/* Many parts of a work, on threads of their own: threads of Python would wait for the interpreter between two parts, which a training
 * script keeps busy.  A thread that is free takes the next part; a thread that cannot be started leaves more to the others. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define MOST_THREADS 256

typedef void (*Part)(const void *work, int64_t i);

typedef struct {
    Part part;
    const void *work;
    int64_t count;
    atomic_llong next;
} Turns;

static void *take_turns(void *shared) {
    Turns *turns = shared;
    int64_t i;
    while ((i = atomic_fetch_add(&turns->next, 1)) < turns->count) turns->part(turns->work, i);
    return 0;
}

static void on_threads(Part part, const void *work, int64_t count, int64_t threads) {
    Turns turns = {part, work, count, 0};
    pthread_t started[MOST_THREADS];
    int64_t running = 0, wanted = threads - 1 < MOST_THREADS ? threads - 1 : MOST_THREADS;
    while (running < wanted && running < count - 1 && !pthread_create(&started[running], 0, take_turns, &turns)) ++running;
    take_turns(&turns);
    for (int64_t i = 0; i < running; ++i) pthread_join(started[i], 0);
}
