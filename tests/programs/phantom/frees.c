// Frees of blocks that are not the program's, or no longer, and the reset of a device.

#include <stddef.h>
#include <stdio.h>
#include <cuda.h>

int cuDevicePrimaryCtxReset_v2(int);
int cuMemGetAddressRange_v2(void **, size_t *, void *);
int cudaDeviceReset(void);
int cudaGetSymbolAddress(void **, const void *);
int cudaGraphCreate(void **, unsigned);
int cudaGraphInstantiate(void **, void *, unsigned long long);
int cudaMemGetInfo(size_t *, size_t *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemset(void *, int, size_t);

static size_t left(void) {
    size_t free, total;
    return cudaMemGetInfo(&free, &total) ? 0 : free;
}

static int first_byte(void *block) {
    char byte = 0;
    return cudaMemcpy(&byte, block, 1, 2) ? -1 : byte;
}

int main(void) {
    void *a, *b, *block, *exec, *graph;
    size_t size, before = left();

    cudaMallocAsync(&a, 1000, NULL), cudaMallocAsync(&b, 1000, NULL);
    cudaMemset(b, 7, 1);
    int first = cudaFreeAsync(a, NULL);
    size_t after = left();
    int second = cudaFreeAsync(a, NULL);
    printf("twice: %d %d free same %d live %d\n", first, second, left() == after, first_byte(b));
    int plain = cudaFree(a);
    printf("chunk: %d %d live %d\n", plain, left() == after, first_byte(b));

    static int variable;
    cudaGetSymbolAddress(&block, &variable);
    int freed = cudaFree(block);
    printf("symbol: %d %d\n", freed, cudaFree(block));
    cudaMalloc(&block, 1000);
    freed = cudaFree(block);
    printf("plain twice: %d %d\n", freed, cudaFree(block));

    cudaPitchedPtr layers;
    size_t room = left();
    int made = cudaMalloc3D(&layers, (cudaExtent){100, 3, 4});
    cuMemGetAddressRange_v2(&block, &size, layers.ptr);
    printf("layers: %d pitch %zu sizes %zu %zu taken %zu bytes %zu\n", made, layers.pitch, layers.xsize, layers.ysize,
           (room - left()) >> 20, size);

    int reset = cudaDeviceReset();
    printf("reset: %d free same %d then %d %d %d\n", reset, left() == before, cudaFree(layers.ptr), cudaFreeAsync(b, NULL),
           cudaFree(b));
    cudaMallocManaged(&block, 1000, 1), cudaMalloc(&block, 3 << 20);
    reset = cuDevicePrimaryCtxReset_v2(0);
    printf("driver reset: %d %d free same %d\n", reset, cuDevicePrimaryCtxReset_v2(1), left() == before);

    cudaGraphCreate(&graph, 0);
    int null = cudaGraphInstantiate(&exec, NULL, 0);
    printf("graph: %d %d\n", null, cudaGraphInstantiate(&exec, graph, 0));
    return 0;
}
