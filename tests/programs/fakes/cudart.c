/* Stands in for libcudart. It hands out the most recently freed address first, as real allocators do, so that
 * threads soon get each other's old addresses. */
#include "cuda.h"
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

enum { INVALID = 1, NO_MEMORY = 2, MANY = 1 << 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uintptr_t address; size_t size; int live; } known[MANY];
static int count;
static int freed[MANY], freed_count;
static uintptr_t next = 0x7f0000000000;
static _Thread_local int device, failing;
static long calls;

static int blocks, waiting;

void fake_block_frees(int yes) { __atomic_store_n(&blocks, yes, __ATOMIC_RELEASE); }
int fake_waiting(void) { return __atomic_load_n(&waiting, __ATOMIC_ACQUIRE); }
void fake_fail_next(int code) { failing = code; }
long fake_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

static int fails(void) {
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    int code = failing;
    failing = 0;
    return code;
}

static cudaError_t take(void **out, size_t size) {
    int code = fails();
    if (code) return code;
    if (!out) return INVALID;
    if (size > (size_t)1 << 40) return NO_MEMORY;
    if (!size) { *out = NULL; return 0; }
    pthread_mutex_lock(&lock);
    int found = -1;
    for (int i = freed_count - 1; i >= 0 && i > freed_count - 64; i--)
        if (known[freed[i]].size == size) {
            found = freed[i];
            freed[i] = freed[--freed_count];
            break;
        }
    if (found < 0 && count < MANY) {
        found = count++;
        known[found].address = next;
        known[found].size = size;
        next += (size + 511) / 512 * 512;
    }
    if (found >= 0) {
        known[found].live = 1;
        *out = (void *)known[found].address;
    }
    pthread_mutex_unlock(&lock);
    return found < 0 ? NO_MEMORY : 0;
}

static cudaError_t give(void *address) {
    int code = fails();
    if (code) return code;
    if (!address) return 0;
    code = INVALID;
    pthread_mutex_lock(&lock);
    /* Addresses rise with the index. */
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (known[middle].address < (uintptr_t)address) low = middle + 1; else high = middle;
    }
    if (low < count && known[low].address == (uintptr_t)address && known[low].live) {
        known[low].live = 0;
        freed[freed_count++] = low;
        code = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

cudaError_t cudaGetDevice(int *out) { *out = device; return 0; }
cudaError_t cudaSetDevice(int ordinal) { device = ordinal; return 0; }
cudaError_t cudaMalloc(void **out, size_t size) { return take(out, size); }
cudaError_t cudaFree(void *address) {
    __atomic_add_fetch(&waiting, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&blocks, __ATOMIC_ACQUIRE)) usleep(1000);
    __atomic_sub_fetch(&waiting, 1, __ATOMIC_RELEASE);
    return give(address);
}
cudaError_t cudaMallocAsync(void **out, size_t size, void *stream) { (void)stream; return take(out, size); }
cudaError_t cudaFreeAsync(void *address, void *stream) { (void)stream; return give(address); }
cudaError_t cudaMallocAsync_ptsz(void **out, size_t size, void *stream) { (void)stream; return take(out, size); }
cudaError_t cudaFreeAsync_ptsz(void *address, void *stream) { (void)stream; return give(address); }
cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, void *pool, void *stream) {
    (void)pool; (void)stream;
    return take(out, size);
}
cudaError_t cudaMallocFromPoolAsync_ptsz(void **out, size_t size, void *pool, void *stream) {
    (void)pool; (void)stream;
    return take(out, size);
}
cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags) { (void)flags; return take(out, size); }

static size_t pitch_of(size_t width) { return (width + 511) / 512 * 512; }

cudaError_t cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height) {
    if (!pitch) return fails() ? NO_MEMORY : INVALID;
    cudaError_t code = take(out, pitch_of(width) * height);
    if (!code) *pitch = pitch_of(width);
    return code;
}
cudaError_t cudaMalloc3D(cudaPitchedPtr *out, cudaExtent extent) {
    cudaError_t code = take(out ? &out->ptr : NULL, pitch_of(extent.width) * extent.height * extent.depth);
    if (!code) { out->pitch = pitch_of(extent.width); out->xsize = extent.width; out->ysize = extent.height; }
    return code;
}
static size_t bytes_of(const cudaChannelFormatDesc *format) {
    return format ? (format->x + format->y + format->z + format->w) / 8 : 0;
}
cudaError_t cudaMallocArray(void **out, const cudaChannelFormatDesc *format, size_t width, size_t height, unsigned flags) {
    (void)flags;
    return take(out, bytes_of(format) * width * (height ? height : 1));
}
cudaError_t cudaMalloc3DArray(void **out, const cudaChannelFormatDesc *format, cudaExtent extent, unsigned flags) {
    (void)flags;
    return take(out, bytes_of(format) * extent.width * (extent.height ? extent.height : 1) * (extent.depth ? extent.depth : 1));
}
cudaError_t cudaFreeArray(void *array) { return give(array); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) { (void)flags; return take(out, size); }
cudaError_t cudaMallocHost(void **out, size_t size) { return take(out, size); }
cudaError_t cudaFreeHost(void *address) { return give(address); }
cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    (void)flags;
    int code = fails();
    return code ? code : address && size ? 0 : INVALID;
}
cudaError_t cudaHostUnregister(void *address) {
    int code = fails();
    return code ? code : address ? 0 : INVALID;
}
