// Sizes and addresses that no memory has: each call must fail with a status, and the program must go on.

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

int cudaGetLastError(void);
int cudaMalloc(void **, size_t);
int cudaMallocAsync(void **, size_t, void *);
int cudaMallocHost(void **, size_t);
int cudaMallocManaged(void **, size_t, unsigned);
int cudaMallocPitch(void **, size_t *, size_t, size_t);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemset(void *, int, size_t);
int cudaHostGetDevicePointer(void **, void *, unsigned);
int cudaHostGetFlags(unsigned *, void *);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, uint64_t);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemHostGetDevicePointer_v2(uint64_t *, void *, unsigned);
int cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t);
int cuMemSetAccess(uint64_t, size_t, const void *, size_t);
int cuMemUnmap(uint64_t, size_t);
int cuPointerGetAttribute(void *, int, uint64_t);

#define WHOLE ((size_t)-1)
#define PAGE ((size_t)2 << 20)

static int failures;

static void check(const char *call, int status, int expected) {
    if (status != expected) {
        printf("%s: %d, expected %d\n", call, status, expected);
        failures++;
    }
}

#define CHECK(call, expected) check(#call, call, expected)

int main(void) {
    char host[64], *block, *pinned, *got;
    size_t pitch, size;
    uint64_t reserved, start;
    unsigned flags;
    CHECK(cudaMalloc((void **)&block, 4096), 0);
    CHECK(cudaMallocHost((void **)&pinned, 5000), 0);
    CHECK(cuMemAddressReserve(&reserved, 4 * PAGE, 0, 0, 0), 0);

    CHECK(cudaMalloc((void **)&got, WHOLE), 2);
    CHECK(cudaMalloc((void **)&got, WHOLE - 511), 2);
    // The runtime does not see the driver's errors, and only its cudaMalloc takes 0 bytes.
    CHECK(cudaGetLastError(), 2);
    CHECK(cuMemAlloc_v2(&start, WHOLE), 2);
    CHECK(cudaGetLastError(), 0);
    CHECK(cudaMalloc((void **)&got, 0), 0);
    CHECK(cuMemAlloc_v2(&start, 0), 1);
    CHECK(cudaGetLastError(), 0);
    CHECK(cudaMallocManaged((void **)&got, 0, 1), 1);
    CHECK(cudaMallocAsync((void **)&got, WHOLE, 0), 2);
    CHECK(cudaMallocAsync((void **)&got, WHOLE - 511, 0), 2);
    CHECK(cudaMallocAsync((void **)&got, WHOLE - (1 << 20), 0), 2);
    CHECK(cudaMallocHost((void **)&got, WHOLE), 2);
    CHECK(cudaMallocManaged((void **)&got, WHOLE, 1), 2);
    CHECK(cudaMallocPitch((void **)&got, &pitch, WHOLE, 1), 2);
    CHECK(cudaMallocPitch((void **)&got, &pitch, WHOLE - 511, 1), 2);
    CHECK(cudaMallocPitch((void **)&got, &pitch, (size_t)1 << 40, (size_t)1 << 24), 2);
    CHECK(cudaMallocPitch((void **)&got, &pitch, 1, WHOLE), 2);

    CHECK(cudaMemcpy(host, block, WHOLE, 2), 1);
    CHECK(cudaMemcpy(block, host, WHOLE, 1), 1);
    CHECK(cudaMemcpy(block, block, WHOLE, 3), 1);
    CHECK(cudaMemcpyAsync(host, block, WHOLE - 63, 2, 0), 1);
    CHECK(cudaMemset(block, 0, WHOLE), 1);
    CHECK(cudaMemset(block, 0, WHOLE - 4095), 1);
    CHECK(cudaMemset((void *)reserved, 0, WHOLE), 1);

    CHECK(cuMemAddressReserve(&start, WHOLE, 0, 0, 0), 1);
    CHECK(cuMemAddressReserve(&start, -PAGE, 0, 0, 0), 2);
    CHECK(cuMemAddressReserve(&start, PAGE, WHOLE, 0, 0), 1);
    CHECK(cuMemMap(reserved, -PAGE, 0, 1, 0), 1);
    CHECK(cuMemSetAccess(reserved, -PAGE, 0, 0), 1);
    CHECK(cuMemUnmap(reserved, -PAGE), 1);

    CHECK(cudaHostGetDevicePointer((void **)&got, pinned + 10, 0), 0);
    printf("pinned: same %d\n", got == pinned + 10);
    CHECK(cudaHostGetDevicePointer((void **)&got, host, 0), 1);
    CHECK(cuMemHostGetDevicePointer_v2(&start, pinned, 0), 0);
    CHECK(cuMemHostGetDevicePointer_v2(&start, host, 0), 1);
    CHECK(cudaHostGetFlags(&flags, pinned), 0);
    CHECK(cudaHostGetFlags(&flags, host), 1);
    // The range of a pinned block: CU_POINTER_ATTRIBUTE_RANGE_START_ADDR and RANGE_SIZE.
    CHECK(cuPointerGetAttribute(&start, 11, (uint64_t)(pinned + 4999)), 0);
    CHECK(cuPointerGetAttribute(&size, 12, (uint64_t)(pinned + 4999)), 0);
    printf("range: start %d size %d\n", start == (uint64_t)pinned, size >= 5000);
    printf("failures %d\n", failures);
    return 0;
}
