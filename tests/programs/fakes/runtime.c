/* A runtime that calls the driver as the real one does: it finds cuGetProcAddress with dlsym, and the other
 * functions with cuGetProcAddress. Built as libcudart.so.12; with -DHIDDEN built into a library that does not
 * export it, as in cuBLAS and NCCL. */
#include <dlfcn.h>
#include <stddef.h>
#ifdef HIDDEN
#define API static
#else
#define API
#endif

typedef int (*Call)();
typedef int (*GetProc)(const char *, void **, int, unsigned long long, int *);

static GetProc get_proc(void) {
    static GetProc found;
    if (!found) found = (GetProc)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
    return found;
}
static Call driver(const char *name, unsigned long long flags) {
    void *found = NULL;
    int status;
    get_proc()(name, &found, 12040, flags, &status);
    return (Call)found;
}
/* Each function is looked up once, as in the real runtime. */
#define DRIVER(name, flags) ({ static Call found; if (!found) found = driver(name, flags); found; })

API int cudaGetDevice(int *device) { *device = 0; return 0; }
API int cudaMalloc(void **out, size_t size) { return DRIVER("cuMemAlloc", 0)(out, size); }
API int cudaFree(void *address) { return DRIVER("cuMemFree", 0)(address); }
API int cudaMallocAsync(void **out, size_t size, void *stream) { return DRIVER("cuMemAllocAsync", 0)(out, size, stream); }
API int cudaFreeAsync(void *address, void *stream) { return DRIVER("cuMemFreeAsync", 0)(address, stream); }
API int cudaMallocAsync_ptsz(void **out, size_t size, void *stream) { return DRIVER("cuMemAllocAsync", 2)(out, size, stream); }
API int cudaFreeAsync_ptsz(void *address, void *stream) { return DRIVER("cuMemFreeAsync", 2)(address, stream); }
API int cudaHostAlloc(void **out, size_t size, unsigned flags) { return DRIVER("cuMemHostAlloc", 0)(out, size, flags); }
API int cudaFreeHost(void *address) { return DRIVER("cuMemFreeHost", 0)(address); }
API int cudaGetDriverEntryPoint(const char *name, void **place, unsigned long long flags, int *status) {
    return get_proc()(name, place, 12040, flags, status);
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **place, unsigned version, unsigned long long flags, int *status) {
    return get_proc()(name, place, version, flags, status);
}

#ifdef HIDDEN
/* Allocations that the library makes for itself. */
int library_works(void) {
    void *one, *two, *three, *page;
    if (cudaMalloc(&one, 3000) || cudaMallocAsync(&two, 4000, NULL) || cudaMallocAsync_ptsz(&three, 5000, NULL)) return 1;
    if (cudaHostAlloc(&page, 6000, 0)) return 2;
    (void)cudaGetDevice, (void)cudaGetDriverEntryPoint, (void)cudaGetDriverEntryPointByVersion;
    return cudaFree(one) + cudaFreeAsync(two, NULL) + cudaFreeAsync_ptsz(three, NULL) + cudaFreeHost(page);
}
#endif
