/* Makes every call of the driver once, and prints for each the row that the trace must have: event api status
 * address requested delta. argv[1] is the way in which the program gets the functions: linked, dlsym, legacy,
 * per_thread (cuGetProcAddress, by its flags), recursive (cuGetProcAddress, itself found by
 * cuGetProcAddress), runtime, by_version (cudaGetDriverEntryPoint). argv[2] is the driver's path, if the
 * program loads it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*Call)();
typedef int (*GetProc)(const char *, void **, int, unsigned long long, int *);
typedef struct { char bytes[64]; } Handle;
typedef struct { size_t width, height, depth; unsigned format, channels, flags; } Shape3D;
typedef struct { size_t width, height; unsigned format, channels; } Shape;

#ifdef LINKED
extern int cuMemAlloc_v2(), cuMemAllocManaged(), cuMemAllocPitch_v2(), cuMemAllocAsync(), cuMemAllocFromPoolAsync(),
    cuMemFree_v2(), cuMemFreeAsync(), cuArrayCreate_v2(), cuArray3DCreate_v2(), cuArrayDestroy(), cuMipmappedArrayCreate(),
    cuMipmappedArrayDestroy(), cuMemHostAlloc(), cuMemAllocHost_v2(), cuMemFreeHost(), cuMemHostRegister_v2(),
    cuMemHostUnregister(), cuMemCreate(), cuMemRelease(), cuMemRetainAllocationHandle(), cuMemImportFromShareableHandle(),
    cuMemMap(), cuMemUnmap(), cuIpcOpenMemHandle_v2(), cuIpcCloseMemHandle(), cuMemPoolImportPointer();
#define GET(base, name) ((Call)name)
#else
static const char *how;
static void *library;
static GetProc get_proc;
int cudaGetDriverEntryPoint(const char *, void **, unsigned long long, int *) __attribute__((weak));
int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *) __attribute__((weak));

static Call get(const char *base, const char *name) {
    void *found = NULL;
    int status = -1;
    if (!strcmp(how, "dlsym")) found = dlsym(library, name);
    else if (!strcmp(how, "runtime")) cudaGetDriverEntryPoint(base, &found, 0, &status);
    else if (!strcmp(how, "by_version")) cudaGetDriverEntryPointByVersion(base, &found, 12000, 0, &status);
    else get_proc(base, &found, 12040, strcmp(how, "per_thread") ? 0 : 2, &status);
    if (!found) fprintf(stderr, "%s is not found\n", base), exit(9);
    return (Call)found;
}
#define GET(base, name) get(base, #name)
#endif

#define TELL(event, api, status, at, requested, delta) \
    printf("%s %s %d %lu %ld %ld\n", event, api, status, (uintptr_t)(at), (long)(requested), (long)(delta))
#define TAKES(event, api, bytes, good) do { int status = good; TELL(event, api, status, address, bytes, bytes); } while (0)
#define GIVES(event, api, bytes, call) do { int status = call; TELL(event, api, status, address, bytes, -(long)(bytes)); } while (0)

int main(int argc, char **argv) {
#ifndef LINKED
    how = argv[1];
    library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    get_proc = (GetProc)dlsym(library, "cuGetProcAddress_v2");
    if (!strcmp(how, "recursive")) {
        void *found = NULL;
        get_proc("cuGetProcAddress", &found, 12000, 0, NULL);
        get_proc = (GetProc)found;
    }
    /* The first version takes other arguments and must not be replaced by the second. */
    void *first = NULL;
    get_proc("cuMemAlloc", &first, 2000, 0, NULL);
    unsigned small = 0;
    if (first != dlsym(library, "cuMemAlloc") || ((Call)first)(&small, 77u) || small != 77) return 7;
    if (get_proc("cuNoSuchCall", &first, 12000, 0, NULL) != 500 || first) return 6;
#endif
    (void)argc, (void)argv;
    void *address = NULL, *stream = NULL, *pool = (void *)8;
    size_t pitch;
    Call free_ = GET("cuMemFree", cuMemFree_v2), free_async = GET("cuMemFreeAsync", cuMemFreeAsync);
    TAKES("ext_alloc", "cuMemAlloc", 1000, GET("cuMemAlloc", cuMemAlloc_v2)(&address, (size_t)1000));
    GIVES("ext_free", "cuMemFree", 1000, free_(address));
    TAKES("ext_alloc", "cuMemAllocManaged", 1000, GET("cuMemAllocManaged", cuMemAllocManaged)(&address, (size_t)1000, 1u));
    GIVES("ext_free", "cuMemFree", 1000, free_(address));
    /* A row of 100 bytes is padded to 512. */
    int pitched = GET("cuMemAllocPitch", cuMemAllocPitch_v2)(&address, &pitch, (size_t)100, (size_t)7, 4u);
    TELL("ext_alloc", "cuMemAllocPitch", pitched, address, 700, 3584);
    pitched = free_(address);
    TELL("ext_free", "cuMemFree", pitched, address, 700, -3584);
    TAKES("ext_alloc", "cuMemAllocAsync", 1000, GET("cuMemAllocAsync", cuMemAllocAsync)(&address, (size_t)1000, stream));
    GIVES("ext_free", "cuMemFreeAsync", 1000, free_async(address, stream));
    TAKES("ext_alloc", "cuMemAllocFromPoolAsync", 1000, GET("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync)(&address, (size_t)1000, pool, stream));
    GIVES("ext_free", "cuMemFreeAsync", 1000, free_async(address, stream));
    Shape shape = {10, 20, 0x20, 2};
    TAKES("ext_alloc", "cuArrayCreate", 1600, GET("cuArrayCreate", cuArrayCreate_v2)(&address, &shape));
    GIVES("ext_free", "cuArrayDestroy", 1600, GET("cuArrayDestroy", cuArrayDestroy)(address));
    Shape3D cube = {10, 20, 3, 0x20, 2, 0};
    TAKES("ext_alloc", "cuArray3DCreate", 4800, GET("cuArray3DCreate", cuArray3DCreate_v2)(&address, &cube));
    GIVES("ext_free", "cuArrayDestroy", 4800, GET("cuArrayDestroy", cuArrayDestroy)(address));
    /* 10 x 20 x 3, and 5 x 10 x 1. */
    TAKES("ext_alloc", "cuMipmappedArrayCreate", 5200, GET("cuMipmappedArrayCreate", cuMipmappedArrayCreate)(&address, &cube, 2u));
    GIVES("ext_free", "cuMipmappedArrayDestroy", 5200, GET("cuMipmappedArrayDestroy", cuMipmappedArrayDestroy)(address));
    TAKES("host_alloc", "cuMemHostAlloc", 4096, GET("cuMemHostAlloc", cuMemHostAlloc)(&address, (size_t)4096, 0u));
    GIVES("host_free", "cuMemFreeHost", 4096, GET("cuMemFreeHost", cuMemFreeHost)(address));
    TAKES("host_alloc", "cuMemAllocHost", 4096, GET("cuMemAllocHost", cuMemAllocHost_v2)(&address, (size_t)4096));
    GIVES("host_free", "cuMemFreeHost", 4096, GET("cuMemFreeHost", cuMemFreeHost)(address));
    static char page[8192];
    address = page;
    TAKES("host_alloc", "cuMemHostRegister", 8192, GET("cuMemHostRegister", cuMemHostRegister_v2)(address, (size_t)8192, 0u));
    GIVES("host_free", "cuMemHostUnregister", 8192, GET("cuMemHostUnregister", cuMemHostUnregister)(address));

    /* Physical memory with a handle, two mappings and a retained handle. The last of them to go frees it. */
    Call release = GET("cuMemRelease", cuMemRelease), map = GET("cuMemMap", cuMemMap), unmap = GET("cuMemUnmap", cuMemUnmap);
    int properties[8] = {1, 0, 1, 0}, host[8] = {1, 0, 2, 0};
    uint64_t handle, again;
    size_t bytes = 2 << 20;
    Call create = GET("cuMemCreate", cuMemCreate);
    int status = create(&handle, bytes, properties, 0ull);
    TELL("ext_alloc", "cuMemCreate", status, handle, bytes, bytes);
    map((void *)0x10000000, bytes, (size_t)0, handle, 0ull);
    map((void *)0x20000000, bytes, (size_t)0, handle, 0ull);
    release(handle);
    unmap((void *)0x20000000, bytes);
    GET("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle)(&again, (void *)0x10000000);
    if (again != handle) return 5;
    unmap((void *)0x10000000, bytes);
    status = release(handle);
    TELL("ext_free", "cuMemRelease", status, handle, bytes, -(long)bytes);
    /* The usual order: the handle is released first, and the unmapping frees the memory. */
    status = create(&handle, bytes, properties, 0ull);
    TELL("ext_alloc", "cuMemCreate", status, handle, bytes, bytes);
    map((void *)0x10000000, bytes, (size_t)0, handle, 0ull);
    release(handle);
    status = unmap((void *)0x10000000, bytes);
    TELL("ext_free", "cuMemUnmap", status, handle, bytes, -(long)bytes);
    status = create(&handle, bytes, host, 0ull);
    TELL("host_alloc", "cuMemCreate", status, handle, bytes, bytes);
    status = release(handle);
    TELL("host_free", "cuMemRelease", status, handle, bytes, -(long)bytes);

    /* Memory that belongs to another process counts 0 bytes in this one. */
    Handle shared = {{0}};
    shared.bytes[63] = 42;
    status = GET("cuMemImportFromShareableHandle", cuMemImportFromShareableHandle)(&handle, (void *)9, 1u);
    TELL("ext_alloc", "cuMemImportFromShareableHandle", status, handle, 0, 0);
    status = release(handle);
    TELL("ext_free", "cuMemRelease", status, handle, 0, 0);
    status = ((int (*)(void **, Handle, unsigned))GET("cuIpcOpenMemHandle", cuIpcOpenMemHandle_v2))(&address, shared, 7u);
    TELL("ext_alloc", "cuIpcOpenMemHandle", status, address, 0, 0);
    status = GET("cuIpcCloseMemHandle", cuIpcCloseMemHandle)(address);
    TELL("ext_free", "cuIpcCloseMemHandle", status, address, 0, 0);
    status = GET("cuMemPoolImportPointer", cuMemPoolImportPointer)(&address, pool, NULL);
    TELL("ext_alloc", "cuMemPoolImportPointer", status, address, 0, 0);
    status = free_async(address, stream);
    TELL("ext_free", "cuMemFreeAsync", status, address, 0, 0);
    return 0;
}
