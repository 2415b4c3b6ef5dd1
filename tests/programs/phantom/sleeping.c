/* Memory that a server gives up while it sleeps, as vLLM does: mapped by the driver's virtual memory calls, copied to
 * the host by the runtime that a wheel brings under a name with a hash, unmapped, and mapped again at the same
 * addresses. Prints each status; tests/phantom/calls.rs has the expected ones. The argument is that runtime. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int cudaSetDevice(int), cudaFree(void *), cudaMemGetInfo(size_t *, size_t *), cudaHostAlloc(void **, size_t, unsigned);
int cudaMemset(void *, int, size_t);
int cuMemAddressReserve(void **, size_t, size_t, void *, unsigned long long), cuMemAddressFree(void *, size_t);
int cuMemCreate(unsigned long long *, size_t, const int *, unsigned long long), cuMemRelease(unsigned long long);
int cuMemMap(void *, size_t, size_t, unsigned long long, unsigned long long), cuMemUnmap(void *, size_t);
int cuMemSetAccess(void *, size_t, const int *, size_t);

#define MIB ((size_t)1 << 20)
static const int properties[8] = {1, 0, 1, 0}, access[3] = {1, 0, 3};
static char *memory;
static unsigned long long handle;
static const size_t size = 12 * MIB;

static void map(void) {
    printf("map %d", cuMemCreate(&handle, size, properties, 0));
    printf(" %d", cuMemMap(memory, size, 0, handle, 0));
    printf(" %d\n", cuMemSetAccess(memory, size, access, 1));
}

static size_t used(void) {
    size_t free, total;
    cudaMemGetInfo(&free, &total);
    return total - free;
}

int main(int count, char **arguments) {
    char *pinned, plain[16] = {0};
    void *runtime = dlopen(arguments[count - 1], RTLD_NOW | RTLD_LOCAL);
    if (!runtime) return fprintf(stderr, "%s\n", dlerror()), 1;
    int (*copy)(void *, const void *, size_t, int) = (int (*)(void *, const void *, size_t, int))dlsym(runtime, "cudaMemcpy");
    cudaFree(NULL);
    size_t before = used();
    printf("reserve %d\n", cuMemAddressReserve((void **)&memory, size, 0, NULL, 0));
    printf("not mapped %d\n", copy(plain, memory, 16, 4));
    map();
    printf("fill %d", cudaMemset(memory + size - 16, 7, 16));
    printf(" plain %d", copy(plain, memory + size - 16, 16, 4));
    printf(" reads %d\n", plain[15]);
    printf("pinned %d", cudaHostAlloc((void **)&pinned, size, 0));
    printf(" whole %d beyond %d\n", copy(pinned, memory, size, 4), copy(pinned, memory + 16, size, 4));
    printf("awake %zu MiB\n", (used() - before) / MIB);
    printf("sleep %d", cuMemUnmap(memory, size));
    printf(" %d\n", cuMemRelease(handle));
    printf("asleep %zu MiB, copy %d\n", (used() - before) / MIB, copy(pinned, memory, size, 4));
    map();
    printf("restore %d", copy(memory, pinned, size, 4));
    printf(" awake %zu MiB", (used() - before) / MIB);
    printf(" reads %d", copy(plain, memory, 16, 4));
    printf(" %d\n", plain[15]);
    printf("end %d", cuMemUnmap(memory, size));
    printf(" %d", cuMemRelease(handle));
    printf(" %d\n", cuMemAddressFree(memory, size));
    return 0;
}
