/* A child with argv[1] threads, which make pairs of calls until the process is gone, long after its `main` has
 * returned, which it does after a million calls. Prints the number of calls that had returned at the end. */
#define _GNU_SOURCE
#include "cuda.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static long *calls;

static long sum_of(int count) {
    long sum = 0;
    for (int i = 0; i < count; i++) sum += *(volatile long *)(calls + i * 8);
    return sum;
}

static void *work(void *own_calls) {
    void *address;
    for (;;) {
        cudaMalloc(&address, 512);
        ++*(volatile long *)own_calls;
        cudaFree(address);
        ++*(volatile long *)own_calls;
    }
    return NULL;
}

int main(int argc, char **argv) {
    (void)argc;
    int count = atoi(argv[1]), status;
    calls = mmap(NULL, count * 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork();
    if (child == 0) {
        pthread_t thread;
        for (int i = 0; i < count; i++) pthread_create(&thread, NULL, work, calls + i * 8);
        while (sum_of(count) < 1000000) usleep(10 * 1000);
        return 0;
    }
    waitpid(child, &status, 0);
    printf("%ld\n", sum_of(count));
    return status;
}
