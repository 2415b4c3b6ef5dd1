/* Memory of CUDA graphs on the phantom device: captured calls, and nodes that the program adds. Prints for
 * each call the row that the trace must have: event api status address requested delta. If a device's count
 * of graph memory is wrong, prints it on stderr and fails. */
#include <memtrace.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int kind, handles, location, device; uint64_t rest[9]; size_t access[2], bytes; void *address; } Node;
int cudaStreamCreate(void **), cudaStreamBeginCapture(void *, int), cudaStreamEndCapture(void *, void **);
int cudaMallocAsync(void **, size_t, void *), cudaFreeAsync(void *, void *), cudaFree(void *), cudaGetLastError(void);
int cudaMemGetInfo(size_t *, size_t *), cudaDeviceGraphMemTrim(int), cudaDeviceGetGraphMemAttribute(int, int, void *);
int cudaGraphCreate(void **, unsigned), cudaGraphDestroy(void *), cudaGraphLaunch(void *, void *);
int cudaGraphInstantiate(void **, void *, unsigned long long), cudaGraphExecDestroy(void *);
int cudaGraphAddMemAllocNode(void **, void *, const void *, size_t, Node *);
int cudaGraphAddMemFreeNode(void **, void *, const void *, size_t, void *);
int cuGraphAddMemAllocNode(void **, void *, const void *, size_t, Node *);
int cuGraphAddMemFreeNode(void **, void *, const void *, size_t, void *);
int cuMemAllocAsync(void **, size_t, void *);

#define MIB ((size_t)1 << 20)
#define TELL(event, api, at, asked, delta) \
    printf("%s %s 0 %lu %ld %ld\n", event, api, (uintptr_t)(at), (long)(asked), (long)(delta))
#define GOOD(call) do { int status = call; if (status) fprintf(stderr, #call ": %d\n", status), exit(1); } while (0)
#define HELD(used, reserved) held(__LINE__, used, reserved)

static size_t before;

/* The memory of the executable graphs themselves, which the device's counts leave out. */
static size_t instances;

/* Checks the device's counts of graph memory, and that exactly this memory is missing from the free memory. */
static void held(int line, size_t used, size_t reserved) {
    uint64_t now[2];
    size_t free, total;
    GOOD(cudaDeviceGetGraphMemAttribute(0, 0, &now[0]));
    GOOD(cudaDeviceGetGraphMemAttribute(0, 2, &now[1]));
    GOOD(cudaMemGetInfo(&free, &total));
    if (now[0] != used || now[1] != reserved || before - free != reserved + instances)
        fprintf(stderr, "line %d: %lu of %lu, %lu missing\n", line, now[0], now[1], before - free), exit(2);
}

/* Measures the memory of the executable graph that was just made; `reserved` bytes are held by graphs' nodes. */
static void instantiated(size_t reserved) {
    size_t free, total;
    GOOD(cudaMemGetInfo(&free, &total));
    instances = before - free - reserved;
    if (instances == 0 || instances > 4 * MIB) fprintf(stderr, "an instance of %zu bytes\n", instances), exit(2);
}

int main(void) {
    void *stream, *graph, *exec, *kept, *gone, *node, *second;
    size_t total;
    GOOD(cudaStreamCreate(&stream));
    GOOD(cudaMallocAsync(&kept, 1000, stream)); /* Not captured. */
    TELL("ext_alloc", "cudaMallocAsync", kept, 1000, 1000);
    GOOD(cudaMemGetInfo(&before, &total));

    GOOD(cudaStreamBeginCapture(stream, 2));
    void *outside = kept;
    GOOD(cudaMallocAsync(&kept, 5 * MIB, stream));
    TELL("ext_alloc", "cudaMallocAsync", kept, 5 * MIB, 0);
    GOOD(cuMemAllocAsync(&gone, 3 * MIB, stream));
    TELL("ext_alloc", "cuMemAllocAsync", gone, 3 * MIB, 0);
    GOOD(cudaFreeAsync(gone, stream));
    TELL("ext_free", "cudaFreeAsync", gone, 3 * MIB, 0);
    GOOD(cudaStreamEndCapture(stream, &graph));
    HELD(0, 0);
    GOOD(cudaGraphInstantiate(&exec, graph, 1)); /* Each launch frees the memory that the launch before left. */
    instantiated(0);
    GOOD(cudaGraphLaunch(exec, stream));
    GOOD(cudaGraphLaunch(exec, stream));
    HELD(5 * MIB, 8 * MIB);
    if (memtrace_flush()) return 3;
    GOOD(cudaFreeAsync(kept, stream));
    TELL("ext_free", "cudaFreeAsync", kept, 5 * MIB, 0);
    HELD(0, 8 * MIB);
    GOOD(cudaDeviceGraphMemTrim(0));
    HELD(0, 0);
    if (memtrace_flush()) return 3;
    GOOD(cudaGraphLaunch(exec, stream));
    HELD(5 * MIB, 8 * MIB);
    GOOD(cudaGraphExecDestroy(exec));
    instances = 0;
    GOOD(cudaGraphDestroy(graph));
    HELD(5 * MIB, 8 * MIB);

    /* Nodes that the program adds. They reuse the memory of the first graph. */
    Node params = {1, 0, 1, 0, {0}, {0}, 2 * MIB, NULL};
    GOOD(cudaGraphCreate(&graph, 0));
    GOOD(cudaGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
    TELL("ext_alloc", "cudaGraphAddMemAllocNode", params.address, 2 * MIB, 0);
    GOOD(cudaGraphAddMemFreeNode(&node, graph, &node, 1, params.address));
    TELL("ext_free", "cudaGraphAddMemFreeNode", params.address, 2 * MIB, 0);
    params.bytes = MIB;
    GOOD(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
    TELL("ext_alloc", "cuGraphAddMemAllocNode", params.address, MIB, 0);
    GOOD(cuGraphAddMemFreeNode(&node, graph, &node, 1, params.address));
    TELL("ext_free", "cuGraphAddMemFreeNode", params.address, MIB, 0);
    GOOD(cudaGraphInstantiate(&exec, graph, 0));
    instantiated(8 * MIB);
    GOOD(cudaGraphLaunch(exec, stream));
    HELD(5 * MIB, 8 * MIB);
    GOOD(cudaGraphExecDestroy(exec));
    instances = 0;
    GOOD(cudaGraphDestroy(graph));

    /* The 5 MiB that a destroyed graph left allocated serve no other graph. */
    params.bytes = 4 * MIB;
    GOOD(cudaGraphCreate(&graph, 0));
    GOOD(cudaGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
    TELL("ext_alloc", "cudaGraphAddMemAllocNode", params.address, 4 * MIB, 0);
    GOOD(cudaGraphInstantiate(&exec, graph, 1));
    instantiated(8 * MIB);
    GOOD(cudaGraphLaunch(exec, stream));
    HELD(9 * MIB, 10 * MIB);
    /* The same holds for the 4 MiB of this graph after a trim. They are counted once when it is launched again. */
    GOOD(cudaDeviceGraphMemTrim(0));
    HELD(9 * MIB, 10 * MIB);
    gone = params.address;
    params.bytes = 2 * MIB;
    GOOD(cudaGraphCreate(&graph, 0));
    GOOD(cudaGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
    TELL("ext_alloc", "cudaGraphAddMemAllocNode", params.address, 2 * MIB, 0);
    GOOD(cudaGraphInstantiate(&second, graph, 0));
    instantiated(10 * MIB);
    GOOD(cudaGraphLaunch(second, stream));
    HELD(11 * MIB, 12 * MIB);
    GOOD(cudaGraphLaunch(exec, stream));
    HELD(11 * MIB, 12 * MIB);
    /* A graph that frees another graph's memory needs no less for its own. */
    GOOD(cudaStreamBeginCapture(stream, 2));
    GOOD(cudaMallocAsync(&kept, 3 * MIB, stream));
    TELL("ext_alloc", "cudaMallocAsync", kept, 3 * MIB, 0);
    GOOD(cudaFreeAsync(gone, stream));
    TELL("ext_free", "cudaFreeAsync", gone, 4 * MIB, 0);
    GOOD(cudaMallocAsync(&kept, 3 * MIB, stream));
    TELL("ext_alloc", "cudaMallocAsync", kept, 3 * MIB, 0);
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphInstantiate(&second, graph, 0));
    instantiated(12 * MIB);
    GOOD(cudaGraphLaunch(second, stream));
    HELD(13 * MIB, 18 * MIB);
    GOOD(cudaGraphLaunch(exec, stream));
    HELD(17 * MIB, 18 * MIB);

    GOOD(cudaFreeAsync(outside, stream));
    TELL("ext_free", "cudaFreeAsync", outside, 1000, -1000);
    GOOD(cudaGetLastError());
    return 0;
}
