// Arguments that CUDA and NVML refuse, and calls that create a context.

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// cudaMemAllocNodeParams.
typedef struct {
    int kind, handles, location, device;
    uint64_t rest[9];
    size_t access[2], bytes;
    void *address;
} Node;

int cudaDeviceCanAccessPeer(int *, int, int);
int cudaDeviceGetAttribute(int *, int, int);
int cudaDeviceGetP2PAttribute(int *, int, int, int);
int cudaFree(void *);
int cudaGetLastError(void);
int cudaDeviceGetGraphMemAttribute(int, int, void *);
int cudaGraphAddMemAllocNode(void **, void *, const void *, size_t, Node *);
int cudaGraphCreate(void **, unsigned);
int cudaGraphDestroy(void *);
int cudaGraphExecDestroy(void *);
int cudaGraphInstantiate(void **, void *, unsigned long long);
int cudaGraphLaunch(void *, void *);
int cudaInitDevice(int, unsigned, unsigned);
int cudaMalloc(void **, size_t);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
int cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemcpyPeer(void *, int, const void *, int, size_t);
int cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int);
int cudaMemset(void *, int, size_t);
int cudaMemsetAsync(void *, int, size_t, void *);
int cuDeviceCanAccessPeer(int *, int, int);
int cuDeviceGetUuid(char *, int);
int cuDeviceGetUuid_v2(char *, int);
int cuDevicePrimaryCtxGetState(int, unsigned *, int *);
int cuDeviceTotalMem_v2(size_t *, int);
int cuGetErrorName(int, const char **);
int cuGetErrorString(int, const char **);
int cuInit(unsigned);
int cuMemAddressFree(uint64_t, size_t);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, uint64_t);
int cuMemCreate(uint64_t *, size_t, const void *, uint64_t);
int cuMemcpyDtoH_v2(void *, uint64_t, size_t);
int cuMemcpyHtoD_v2(uint64_t, const void *, size_t);
int cuMemGetInfo_v2(size_t *, size_t *);
int cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t);
int cuMemRelease(uint64_t);
int cuMemRetainAllocationHandle(uint64_t *, void *);
int cuMemSetAccess(uint64_t, size_t, const void *, size_t);
int cuMemUnmap(uint64_t, size_t);
int cuMemsetD8_v2(uint64_t, unsigned char, size_t);
int cuMemsetD16_v2(uint64_t, unsigned short, size_t);
int cuMemsetD32_v2(uint64_t, unsigned, size_t);
int cuModuleLoad(void **, const char *);
int nvmlDeviceGetCount(unsigned *);
int nvmlDeviceGetCount_v2(unsigned *);
int nvmlInit_v2(void);

#define PAGE ((size_t)2 << 20)

static int failures;

static void check(const char *call, int status, int expected) {
    if (status != expected) {
        printf("%s: %d, expected %d\n", call, status, expected);
        failures++;
    }
}

#define CHECK(call, expected) check(#call, call, expected)

static int is_active(int device) {
    unsigned flags;
    int active = -1;
    CHECK(cuDevicePrimaryCtxGetState(device, &flags, &active), 0);
    return active;
}

// A cubin without sections but with a table of one, whose header is cut when `length` is less than 128.
static void write_cubin(const char *path, size_t length) {
    unsigned char elf[128] = {0x7f, 'E', 'L', 'F'};
    elf[0x28] = 64;
    elf[0x3a] = 64;
    elf[0x3c] = 1;
    FILE *file = fopen(path, "wb");
    fwrite(elf, 1, length, file);
    fclose(file);
}

// A fat binary of 64 KiB, of which the file has only the header.
static void write_fat_binary(const char *path) {
    uint32_t header[16] = {0xba55ed50, 1 | 16 << 16, 1 << 16};
    FILE *file = fopen(path, "wb");
    fwrite(header, 1, sizeof header, file);
    fclose(file);
}

// Null is no memory, but 0 bytes can be copied from there and to there.
static void copy_null(char *block, char *host) {
    cudaGetLastError();
    CHECK(cudaMemcpy(NULL, NULL, 0, 1), 0);
    CHECK(cudaMemcpy2D(NULL, 8, NULL, 8, 8, 0, 1), 0);
    CHECK(cudaMemset(NULL, 0, 0), 0);
    CHECK(cudaGetLastError(), 0);
    CHECK(cudaMemcpy(NULL, host, 8, 1), 1);
    CHECK(cudaGetLastError(), 1);
    CHECK(cudaMemcpy(block, NULL, 8, 1), 1);
    CHECK(cudaMemcpy(host, NULL, 8, 0), 1);
    CHECK(cudaMemcpyAsync(NULL, block, 8, 2, NULL), 1);
    CHECK(cudaMemcpyPeer(block, 0, NULL, 1, 8), 1);
    CHECK(cudaMemcpy2D(block, 8, NULL, 8, 8, 8, 1), 1);
    CHECK(cudaMemcpy2DAsync(NULL, 16, host, 16, 8, 2, 1, NULL), 1);
    CHECK(cudaMemcpyToSymbol(host, NULL, 8, 0, 1), 1);
    CHECK(cudaMemset(NULL, 0, 8), 1);
    CHECK(cudaMemsetAsync(NULL, 0, 8, NULL), 1);
    CHECK(cudaGetLastError(), 1);
    CHECK(cuMemcpyHtoD_v2((uint64_t)block, NULL, 8), 1);
    CHECK(cuMemcpyDtoH_v2(NULL, (uint64_t)block, 8), 1);
    CHECK(cuMemsetD8_v2(0, 1, 8), 1);
    CHECK(cudaGetLastError(), 0);
}

// The free pages of a device with memory of its own; 0 for another, whose free memory other programs change.
static int free_pages(void) {
    int integrated;
    size_t free, total;
    CHECK(cudaDeviceGetAttribute(&integrated, 18, 0), 0);
    CHECK(cuMemGetInfo_v2(&free, &total), 0);
    return integrated ? 0 : free / PAGE;
}

// A graph that is made executable takes memory, unless the call is refused.
static void instantiate(void) {
    int before = free_pages();
    void *graph, *executable;
    CHECK(cudaGraphCreate(&graph, 0), 0);
    CHECK(cudaGraphInstantiate(NULL, graph, 0), 1);
    CHECK(free_pages(), before);
    CHECK(cudaGraphInstantiate(&executable, graph, 0), 0);
    CHECK(free_pages(), before ? before - 1 : 0);
    CHECK(cudaGraphExecDestroy(executable), 0);
    CHECK(free_pages(), before);
}

// A launch takes the memory of its nodes on both devices or on none.
static void launch_too_large(void) {
    size_t free, total;
    uint64_t reserved;
    void *graph, *executable, *node;
    CHECK(cuMemGetInfo_v2(&free, &total), 0);
    Node small = {1, 0, 1, 0, {0}, {0}, 4 * PAGE, NULL}, large = {1, 0, 1, 1, {0}, {0}, total, NULL};
    CHECK(cudaGraphCreate(&graph, 0), 0);
    CHECK(cudaGraphAddMemAllocNode(NULL, graph, NULL, 0, &small), 1);
    CHECK(cudaGraphAddMemAllocNode(&node, graph, NULL, 0, &small), 0);
    CHECK(cudaGraphAddMemAllocNode(&node, graph, NULL, 0, &large), 0);
    CHECK(cudaGraphInstantiate(&executable, graph, 0), 0);
    // The order of the devices differs from launch to launch.
    for (int launch = 0; launch < 10; launch++) {
        CHECK(cudaGraphLaunch(executable, NULL), 2);
    }
    CHECK(cudaDeviceGetGraphMemAttribute(0, 2, &reserved), 0);
    CHECK(reserved, 0);
    CHECK(cudaGraphExecDestroy(executable), 0);
    CHECK(cudaGraphDestroy(graph), 0);
}

// The calls for virtual memory. A call that is refused takes nothing.
static void map_memory(void) {
    int properties[8] = {1, 0, 1, 0}, access[3] = {1, 0, 3};
    int before = free_pages();
    uint64_t range, memory, same;
    CHECK(cuMemCreate(NULL, 512 * PAGE, properties, 0), 1);
    CHECK(cuMemAddressReserve(NULL, 4 * PAGE, 0, 0, 0), 1);
    CHECK(cuMemAddressReserve(&range, 4 * PAGE, 0, 0, 0), 0);
    CHECK(cuMemCreate(&memory, 2 * PAGE, properties, 0), 0);
    CHECK(cuMemMap(range + PAGE, 3 * PAGE, 0, memory, 0), 1);
    CHECK(cuMemMap(range + PAGE, PAGE, PAGE, memory, 0), 1);
    CHECK(cuMemMap(range + 512, PAGE, 0, memory, 0), 1);
    CHECK(cuMemMap(range + PAGE, 2 * PAGE, 0, memory, 0), 0);
    CHECK(cuMemMap(range, 2 * PAGE, 0, memory, 0), 1);
    CHECK(cuMemMap(range + 2 * PAGE, 2 * PAGE, 0, memory, 0), 1);
    CHECK(cuMemMap(range + PAGE, 0, 0, memory, 0), 1);
    CHECK(cuMemSetAccess(range + PAGE, 2 * PAGE, NULL, 1), 1);
    CHECK(cuMemSetAccess(range + PAGE, 2 * PAGE, access, 0), 1);
    CHECK(cuMemSetAccess(range + PAGE, 3 * PAGE, access, 1), 1);
    CHECK(cuMemSetAccess(range + PAGE, PAGE, access, 1), 1);
    CHECK(cuMemSetAccess(range + PAGE, 2 * PAGE, access, 1), 0);
    CHECK(cuMemRetainAllocationHandle(NULL, (void *)(range + PAGE)), 1);
    CHECK(cuMemRetainAllocationHandle(&same, (void *)(range + PAGE)), 0);
    CHECK(cuMemRelease(same), 0);
    CHECK(cuMemRelease(memory), 0);
    CHECK(cuMemRelease(memory), 1);
    CHECK(free_pages(), before ? before - 2 : 0);
    CHECK(cuMemUnmap(range + PAGE, PAGE), 1);
    CHECK(cuMemUnmap(range, 4 * PAGE), 1);
    CHECK(cuMemAddressFree(range, 4 * PAGE), 1);
    CHECK(cuMemUnmap(range + PAGE, 2 * PAGE), 0);
    CHECK(cuMemAddressFree(range, 4 * PAGE), 0);
    CHECK(free_pages(), before);
}

int main(int argc, char **argv) {
    int value, per_sm, optin;
    unsigned count;
    size_t size;
    char uuid[16], *block, host[64];
    const char *text;
    void *module;
    if (argc < 2) {
        return 1;
    }
    CHECK(nvmlDeviceGetCount(&count), 1);
    CHECK(nvmlDeviceGetCount_v2(&count), 1);
    CHECK(nvmlInit_v2(), 0);
    CHECK(nvmlDeviceGetCount(&count), 0);

    CHECK(cuInit(0), 0);
    printf("active: %d %d", is_active(0), is_active(1));
    CHECK(cudaFree(0), 0);
    CHECK(cudaInitDevice(1, 0, 0), 0);
    printf(" then %d %d\n", is_active(0), is_active(1));

    CHECK(cudaDeviceCanAccessPeer(&value, 0, 1), 0);
    CHECK(cudaDeviceCanAccessPeer(&value, 0, 99), 101);
    CHECK(cudaDeviceCanAccessPeer(&value, -1, 0), 101);
    CHECK(cuDeviceCanAccessPeer(&value, 0, 99), 101);
    CHECK(cudaDeviceGetP2PAttribute(&value, 1, 99, 0), 101);
    CHECK(cuDeviceTotalMem_v2(&size, 99), 101);
    CHECK(cuDeviceGetUuid(uuid, 99), 101);
    CHECK(cuDeviceGetUuid_v2(uuid, -1), 101);

    CHECK(cudaMalloc((void **)&block, 4096), 0);
    CHECK(cuMemsetD32_v2((uint64_t)block, 1, (size_t)1 << 62), 1);
    CHECK(cuMemsetD16_v2((uint64_t)block, 1, (size_t)1 << 63), 1);
    CHECK(cudaMemcpy2D(block, 8, host, 8, 8, 8, 1), 0);
    CHECK(cudaMemcpy2D(block, 4, host, 8, 8, 8, 1), 12);
    CHECK(cudaMemcpy2D(host, 8, block, 4, 8, 8, 2), 12);
    CHECK(cudaMemcpy2DAsync(block, 4, host, 8, 8, 8, 1, 0), 12);

    copy_null(block, host);
    instantiate();
    launch_too_large();
    map_memory();

    CHECK(cuModuleLoad(&module, "/nonexistent.cubin"), 301);
    write_cubin(argv[1], 128);
    CHECK(cuModuleLoad(&module, argv[1]), 0);
    write_cubin(argv[1], 100);
    CHECK(cuModuleLoad(&module, argv[1]), 200);
    write_cubin(argv[1], 40);
    CHECK(cuModuleLoad(&module, argv[1]), 200);
    write_fat_binary(argv[1]);
    CHECK(cuModuleLoad(&module, argv[1]), 200);

    for (int status = 712; status < 714; status++) {
        CHECK(cuGetErrorName(status, &text), 0);
        printf("%d is %s:", status, text);
        CHECK(cuGetErrorString(status, &text), 0);
        printf(" %s\n", text);
    }
    // cudaDevAttrMaxSharedMemoryPerMultiprocessor and cudaDevAttrMaxSharedMemoryPerBlockOptin.
    CHECK(cudaDeviceGetAttribute(&per_sm, 81, 0), 0);
    CHECK(cudaDeviceGetAttribute(&optin, 97, 0), 0);
    printf("shared %d %d\n", per_sm >> 10, optin >> 10);
    printf("failures %d\n", failures);
    return 0;
}
