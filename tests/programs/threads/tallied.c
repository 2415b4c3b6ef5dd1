/* argv[1] threads allocate and free until the process is killed. Each counts its calls in the file argv[2], which
 * outlives it: the number before the call and the number after it, 64 bytes per thread. argv[3] is the pause after
 * each call in ns. argv[4] is the MiB that the main thread takes and returns in turn; 0 for none. */
#include "cuda.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Blocks that a thread has at once. */
enum { KEPT = 8 };

struct tally {
    uint64_t started, done;
    char unused[48];
};

static long pause_ns;

static void rest(void) {
    struct timespec now, until;
    if (!pause_ns) return;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += pause_ns;
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - until.tv_sec) * 1000000000L + now.tv_nsec - until.tv_nsec < 0);
}

static void *work(void *argument) {
    struct tally *tally = argument;
    void *kept[KEPT] = {0};
    for (uint64_t i = 0;; i++) {
        /* A block is freed when its place is needed again. */
        void **block = &kept[i % KEPT];
        int frees = *block != NULL;
        __atomic_store_n(&tally->started, tally->started + 1, __ATOMIC_RELEASE);
        if (frees) {
            cudaFree(*block);
            *block = NULL;
        } else {
            cudaMalloc(block, 512);
        }
        __atomic_store_n(&tally->done, tally->done + 1, __ATOMIC_RELEASE);
        rest();
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    long threads = atol(argv[1]);
    int file = open(argv[2], O_RDWR | O_CREAT, 0600);
    size_t bytes = threads * sizeof(struct tally);
    if (file < 0 || ftruncate(file, bytes)) return 3;
    struct tally *tallies = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (tallies == MAP_FAILED) return 4;
    pause_ns = atol(argv[3]);
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    for (long i = 0; i < threads; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &small, work, &tallies[i])) return 5;
    }
    size_t taken = (size_t)atol(argv[4]) << 20;
    if (!taken) pause();
    for (;;) {
        /* The kernel maps and unmaps so large a block. */
        char *block = malloc(taken);
        if (!block) return 6;
        memset(block, 1, taken);
        usleep(20000);
        free(block);
        usleep(20000);
    }
}
