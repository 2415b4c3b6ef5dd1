// Graphs and streams that a program makes and destroys again and again: they take no memory and no time afterwards.

#include <stddef.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

int cudaDeviceGetDefaultMemPool(void **, int);
int cudaDeviceSynchronize(void);
int cudaFreeAsync(void *, void *);
int cudaGraphDestroy(void *);
int cudaMalloc(void **, size_t);
int cudaMallocAsync(void **, size_t, void *);
int cudaMemPoolGetAttribute(void *, int, void *);
int cudaMemsetAsync(void *, int, size_t, void *);
int cudaStreamBeginCapture(void *, int);
int cudaStreamCreate(void **);
int cudaStreamDestroy(void *);
int cudaStreamEndCapture(void *, void **);

static int failed;

// The resident memory in MiB.
static long resident(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    failed += fscanf(file, "%*d %ld", &pages) != 1;
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE) >> 20;
}

static void capture(void *stream, void *block) {
    void *graph;
    failed += cudaStreamBeginCapture(stream, 0) != 0;
    for (int node = 0; node < 1000; node++) {
        failed += cudaMemsetAsync(block, 0, 64, stream) != 0;
    }
    failed += cudaStreamEndCapture(stream, &graph) != 0;
    failed += cudaGraphDestroy(graph) != 0;
}

// The memory of the default pool in MiB.
static long reserved(void) {
    void *pool;
    unsigned long bytes = 0;
    failed += cudaDeviceGetDefaultMemPool(&pool, 0) != 0;
    failed += cudaMemPoolGetAttribute(pool, 5, &bytes) != 0;
    return bytes >> 20;
}

// The processor time of many waits in milliseconds.
static long waits(void) {
    clock_t start = clock();
    for (int wait = 0; wait < 200; wait++) {
        failed += cudaDeviceSynchronize() != 0;
    }
    return (clock() - start) * 1000 / CLOCKS_PER_SEC;
}

int main(void) {
    void *stream, *block;
    failed += cudaMalloc(&block, 64) != 0;
    failed += cudaStreamCreate(&stream) != 0;
    capture(stream, block);
    long before = resident();
    for (int round = 0; round < 300; round++) {
        capture(stream, block);
    }
    printf("graphs %s\n", resident() - before < 8 ? "gone" : "kept");
    for (int round = 0; round < 50000; round++) {
        failed += cudaStreamCreate(&stream) != 0;
        failed += cudaStreamDestroy(stream) != 0;
    }
    printf("streams %s\n", waits() < 100 ? "gone" : "kept");
    // Only a wait trims the pool.
    failed += cudaStreamCreate(&stream) != 0;
    failed += cudaMallocAsync(&block, 1000, stream) != 0;
    failed += cudaFreeAsync(block, stream) != 0;
    failed += cudaStreamDestroy(stream) != 0;
    printf("pool %ld MiB", reserved());
    failed += cudaDeviceSynchronize() != 0;
    printf(" then %ld MiB\n", reserved());
    printf("failed %d\n", failed);
    return 0;
}
