/* Opens ranges in domains through the legacy library, with an allocation in each. Prints the library's return
 * values. */
#include "cuda.h"
#include "nvtx.h"
#include <stdio.h>

uintptr_t nvtxDomainCreateA(const char *), nvtxDomainCreateW(const wchar_t *);
uintptr_t nvtxDomainRegisterStringA(uintptr_t, const char *), nvtxDomainRegisterStringW(uintptr_t, const wchar_t *);
void nvtxDomainNameCategoryA(uintptr_t, uint32_t, const char *), nvtxDomainNameCategoryW(uintptr_t, uint32_t, const wchar_t *);
int nvtxDomainRangePushEx(uintptr_t, const nvtx_attributes *), nvtxDomainRangePop(uintptr_t);
uint64_t nvtxDomainRangeStartEx(uintptr_t, const nvtx_attributes *);
void nvtxDomainRangeEnd(uintptr_t, uint64_t), nvtxDomainMarkEx(uintptr_t, const nvtx_attributes *);
int nvtxRangePushA(const char *), nvtxRangePop(void);

static void allocate(size_t size) {
    void *address;
    cudaMalloc(&address, size);
}

/* A handle. Without a tool the real library returns none; memtrace's hook then returns one. */
static void print_handle(uintptr_t handle) {
    static uintptr_t last;
    printf("%lu%s\n", handle, handle && handle != last ? "" : " none");
    last = handle;
}

int main(void) {
    (void)nvtx_initialize;
    uintptr_t own = nvtxDomainCreateA("memtrace"), other = nvtxDomainCreateW(L"another");
    print_handle(own);
    print_handle(other);
    nvtxDomainNameCategoryA(own, 1, "op");
    nvtxDomainNameCategoryW(own, 2, L"phase");
    nvtxDomainNameCategoryA(other, 1, "op");
    uintptr_t fused = nvtxDomainRegisterStringA(own, "fused"), warm = nvtxDomainRegisterStringW(own, L"warm up");
    print_handle(fused);
    print_handle(warm);
    /* NCCL 2.28.9 never closes this range of its own domain, so it must own nothing. */
    nvtx_attributes library = nvtx_message(ASCII, "ncclCommInitRankConfig", 0);
    nvtxDomainRangePushEx(nvtxDomainCreateA("NCCL"), &library);
    nvtx_attributes op = nvtx_message(REGISTERED, (void *)fused, 1);
    nvtx_attributes phase = nvtx_message(REGISTERED, (void *)warm, 2);
    nvtx_attributes encoder = nvtx_message(WIDE, L"encoder", 1), layer = nvtx_message(ASCII, "layer.0", 0);

    printf("%d\n", nvtxDomainRangePushEx(own, &op));
    allocate(301);
    /* Each domain has its own stack and its own categories. */
    printf("%d\n", nvtxDomainRangePushEx(other, &encoder));
    printf("%d\n", nvtxRangePushA("forward"));
    allocate(302);
    printf("%d\n", nvtxDomainRangePop(own));
    allocate(303);
    uint64_t warming = nvtxDomainRangeStartEx(own, &phase);
    printf("%lu\n", warming);
    /* Plain push and pop use the null domain. */
    printf("%d\n", nvtxDomainRangePushEx(0, &layer));
    allocate(304);
    printf("%d\n", nvtxRangePop());
    nvtxDomainRangeEnd(own, warming);
    allocate(305);
    printf("%d\n", nvtxRangePop());
    printf("%d\n", nvtxDomainRangePop(other));
    allocate(306);
    nvtxDomainMarkEx(other, &layer);
    nvtxDomainMarkEx(own, &op);
    return 0;
}
