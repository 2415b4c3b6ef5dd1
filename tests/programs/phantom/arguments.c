// Arguments that CUDA and NVML refuse, and calls that create a context.

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int cudaDeviceCanAccessPeer(int *, int, int);
int cudaDeviceGetAttribute(int *, int, int);
int cudaDeviceGetP2PAttribute(int *, int, int, int);
int cudaFree(void *);
int cudaInitDevice(int, unsigned, unsigned);
int cudaMalloc(void **, size_t);
int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
int cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
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
int cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t);
int cuMemUnmap(uint64_t, size_t);
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

int main(int argc, char **argv) {
    int value, per_sm, optin;
    unsigned count;
    size_t size;
    char uuid[16], *block, host[64];
    const char *text;
    uint64_t range, memory;
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

    int properties[8] = {1, 0, 1, 0};
    CHECK(cuMemAddressReserve(&range, 4 * PAGE, 0, 0, 0), 0);
    CHECK(cuMemCreate(&memory, 2 * PAGE, properties, 0), 0);
    CHECK(cuMemMap(range + PAGE, 2 * PAGE, 0, memory, 0), 0);
    CHECK(cuMemMap(range, 2 * PAGE, 0, memory, 0), 1);
    CHECK(cuMemMap(range + 2 * PAGE, 2 * PAGE, 0, memory, 0), 1);
    CHECK(cuMemMap(range + PAGE, 0, 0, memory, 0), 1);
    CHECK(cuMemAddressFree(range, 4 * PAGE), 1);
    CHECK(cuMemUnmap(range + PAGE, 2 * PAGE), 0);
    CHECK(cuMemAddressFree(range, 4 * PAGE), 0);

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
