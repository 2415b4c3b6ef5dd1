/* argv[1] threads allocate and free argv[2] times each; the runtime gives them each other's old addresses.
 * Some frees run on another thread than the allocation. Prints the numbers of allocations and frees, and the
 * live bytes at the end. */
#include "cuda.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { KEPT = 8, SHARED = 32 };

static int rounds;
static void *shared[SHARED];
static long taken, given, live;

static void take(void **out, size_t size) {
    if (cudaMalloc(out, size)) abort();
    __atomic_add_fetch(&taken, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&live, (long)size, __ATOMIC_RELAXED);
}

static void give(void *address, size_t size) {
    if (cudaFree(address)) abort();
    __atomic_add_fetch(&given, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&live, (long)size, __ATOMIC_RELAXED);
}

static void *work(void *argument) {
    unsigned seed = (unsigned)(size_t)argument;
    void *kept[KEPT] = {0};
    for (int i = 0; i < rounds; i++) {
        int slot = rand_r(&seed) % KEPT;
        /* All sizes are equal, so a freed address soon goes to another thread. */
        if (kept[slot]) {
            void *address = kept[slot];
            kept[slot] = NULL;
            if (i % 4 == 0) address = __atomic_exchange_n(&shared[i % SHARED], address, __ATOMIC_ACQ_REL);
            if (address) give(address, 512);
        } else {
            take(&kept[slot], 512);
        }
    }
    for (int slot = 0; slot < KEPT; slot++)
        if (kept[slot]) give(kept[slot], 512);
    return NULL;
}

int main(int argc, char **argv) {
    (void)argc;
    pthread_t threads[64];
    int count = atoi(argv[1]);
    rounds = atoi(argv[2]);
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, (void *)(size_t)(i + 1));
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    printf("%ld %ld %ld\n", taken, given, live);
    return 0;
}
