/* Opens ranges through the legacy library, with an allocation in each. Prints the library's return values. */
#include "cuda.h"
#include "nvtx.h"
#include <stdio.h>

int nvtxRangePushA(const char *), nvtxRangePushW(const wchar_t *), nvtxRangePushEx(const nvtx_attributes *), nvtxRangePop(void);
uint64_t nvtxRangeStartA(const char *), nvtxRangeStartW(const wchar_t *), nvtxRangeStartEx(const nvtx_attributes *);
void nvtxRangeEnd(uint64_t), nvtxMarkA(const char *), nvtxMarkW(const wchar_t *), nvtxMarkEx(const nvtx_attributes *);

static void allocate(size_t size) {
    void *address;
    cudaMalloc(&address, size);
}

int main(void) {
    (void)nvtx_initialize;
    nvtx_attributes layer = nvtx_message(ASCII, "layer.0", 0), range = nvtx_message(WIDE, L"op:fused", 0);
    printf("%d\n", nvtxRangePushA("backward"));
    allocate(201);
    printf("%d\n", nvtxRangePushW(L"encoder"));
    printf("%d\n", nvtxRangePushEx(&layer));
    allocate(202);
    printf("%d\n", nvtxRangePop());
    printf("%d\n", nvtxRangePop());
    uint64_t step = nvtxRangeStartA("iteration_4"), phase = nvtxRangeStartW(L"eval"), op = nvtxRangeStartEx(&range);
    printf("%lu %lu %lu\n", step, phase, op);
    allocate(203);
    nvtxRangeEnd(op);
    nvtxRangeEnd(phase);
    nvtxRangeEnd(step);
    allocate(204);
    printf("%d\n", nvtxRangePop());
    allocate(205);
    nvtxMarkA("plain");
    nvtxMarkW(L"wide");
    nvtxMarkEx(&layer);
    return 0;
}
