/* argv[1] threads exist at once; each allocates and frees argv[2] times. Prints the number of calls. */
#include "cuda.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_barrier_t all;
static int rounds;

static void *work(void *unused) {
    for (int i = 0; i < rounds; i++) {
        void *address;
        cudaMalloc(&address, 512);
        pthread_barrier_wait(&all);
        cudaFree(address);
        pthread_barrier_wait(&all);
    }
    return unused;
}

int main(int argc, char **argv) {
    (void)argc;
    int count = atoi(argv[1]);
    rounds = atoi(argv[2]);
    pthread_t *threads = calloc(count, sizeof *threads);
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    pthread_barrier_init(&all, NULL, count);
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], &small, work, NULL)) return 2;
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    printf("%ld\n", fake_calls());
    return 0;
}
