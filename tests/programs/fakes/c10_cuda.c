/* Stands in for libc10_cuda.so: blocks of 512 bytes in segments of 2 MiB, reported under the allocator's
 * mutex. */
#include "cuda.h"
#include "torch.h"
#include <pthread.h>
#include <stdint.h>

void _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(void *, int64_t, size_t, size_t, uint64_t);
void _ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE(int64_t, size_t, size_t, uint64_t);

enum { SEGMENT = 2 << 20, BLOCK = 512, MANY = 1 << 16 };
/* The device CUDA 0, with arbitrary upper bits in the register. */
static const uint64_t DEVICE = 0xdeadbeef00000001;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *free_blocks[MANY];
static int free_count;
static long allocated, reserved, given, taken;

void *torch_allocate(size_t size) {
    if (size > BLOCK) {
        void *none;
        pthread_mutex_lock(&lock);
        if (cudaMalloc(&none, (size_t)1 << 50) == 0) cudaFree(none);
        _ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE((int64_t)size, allocated, reserved, DEVICE);
        pthread_mutex_unlock(&lock);
        return NULL;
    }
    pthread_mutex_lock(&lock);
    if (!free_count) {
        char *segment;
        if (cudaMalloc((void **)&segment, SEGMENT)) return pthread_mutex_unlock(&lock), NULL;
        reserved += SEGMENT;
        for (int i = SEGMENT / BLOCK - 1; i >= 0; i--) free_blocks[free_count++] = segment + i * BLOCK;
    }
    void *block = free_blocks[--free_count];
    allocated += BLOCK;
    given++;
    _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(block, BLOCK, allocated, reserved, DEVICE);
    pthread_mutex_unlock(&lock);
    return block;
}

void torch_free(void *block) {
    pthread_mutex_lock(&lock);
    free_blocks[free_count++] = block;
    allocated -= BLOCK;
    taken++;
    _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(block, -BLOCK, allocated, reserved, DEVICE);
    pthread_mutex_unlock(&lock);
}

void torch_stats(long out[4]) {
    pthread_mutex_lock(&lock);
    out[0] = allocated; out[1] = reserved; out[2] = given; out[3] = taken;
    pthread_mutex_unlock(&lock);
}

void *torch_uncached(size_t size) {
    void *block = NULL;
    cudaMalloc(&block, size);
    return block;
}

void torch_uncached_free(void *block) { cudaFree(block); }
