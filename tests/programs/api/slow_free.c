/* Lets the tracer sample the device, keeps a thread in cudaFree for 800 ms, and runs on for 400 ms. */
#include "cuda.h"
#include <pthread.h>
#include <unistd.h>

static void *address;
static void *frees(void *unused) {
    cudaFree(address);
    return unused;
}

int main(void) {
    void *other;
    pthread_t thread;
    if (cudaMalloc(&other, 1000) || cudaMalloc(&address, 1 << 20)) return 1;
    usleep(100000);
    fake_block_frees(1);
    pthread_create(&thread, NULL, frees, NULL);
    usleep(800000);
    fake_block_frees(0);
    pthread_join(thread, NULL);
    usleep(400000);
    return 0;
}
