/* argv[1] threads each make argv[2] pairs of calls, as fast as possible. Prints the number of calls. */
#include "cuda.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static long pairs;

static void *work(void *unused) {
    void *address;
    for (long i = 0; i < pairs; i++) {
        cudaMalloc(&address, 512);
        cudaFree(address);
    }
    return unused;
}

int main(int argc, char **argv) {
    (void)argc;
    pthread_t threads[64];
    int count = atoi(argv[1]);
    pairs = atol(argv[2]);
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    printf("%ld\n", fake_calls());
    return 0;
}
