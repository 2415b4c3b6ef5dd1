// Managed memory, and its prefetch with the arguments of CUDA 12 (a device) and of CUDA 13 (a location and flags).

#include <stddef.h>
#include <stdio.h>

struct location {
    int type;
    int id;
};

int cudaMallocManaged(void **, size_t, unsigned);
int cudaMemGetInfo(size_t *, size_t *);
int cudaMemPrefetchAsync_v2(void *, size_t, struct location, unsigned, void *);
int cudaMemAdvise(void *, size_t, int, int);
int cudaFree(void *);

// One symbol with the arguments of two versions.
int before_13(void *, size_t, int, void *) __asm__("cudaMemPrefetchAsync");
int since_13(void *, size_t, struct location, unsigned, void *) __asm__("cudaMemPrefetchAsync");

int main(void) {
    size_t before, after, total, size = 64 << 20;
    struct location device = {1, 0}, host = {2, 0};
    char *managed;
    cudaFree(0);
    cudaMemGetInfo(&before, &total);
    printf("alloc %d\n", cudaMallocManaged((void **)&managed, size, 1));
    printf("before 13: device %d host %d\n", before_13(managed, size, 0, 0), before_13(managed, size, -1, 0));
    printf("since 13: device %d host %d part %d\n", since_13(managed, size, device, 0, 0),
           since_13(managed, size, host, 0, 0), since_13(managed + 4096, 4096, device, 0, 0));
    printf("by name %d advise %d\n", cudaMemPrefetchAsync_v2(managed, size, device, 0, 0),
           cudaMemAdvise(managed, size, 3, 0));
    printf("too long %d empty %d not managed %d\n", since_13(managed, size + 1, device, 0, 0),
           since_13(managed, 0, device, 0, 0), since_13(&total, 8, device, 0, 0));
    cudaMemGetInfo(&after, &total);
    printf("charged %zu, free %d\n", before - after, cudaFree(managed));
    return 0;
}
