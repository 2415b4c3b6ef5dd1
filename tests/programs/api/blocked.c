/* Calls memtrace_flush while another thread is blocked in cudaFree, and again after that cudaFree has
 * returned. Prints the results. */
#include "cuda.h"
#include <memtrace.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static void *first;
static void *frees(void *unused) {
    cudaFree(first);
    return unused;
}

int main(void) {
    void *second;
    pthread_t thread;
    cudaMalloc(&first, 1000);
    printf("%d\n", memtrace_flush());
    fake_block_frees(1);
    pthread_create(&thread, NULL, frees, NULL);
    while (!fake_waiting()) usleep(1000);
    cudaMalloc(&second, 2000);
    printf("%d\n", memtrace_flush());
    fake_block_frees(0);
    pthread_join(thread, NULL);
    printf("%d\n", memtrace_flush());
    return 0;
}
