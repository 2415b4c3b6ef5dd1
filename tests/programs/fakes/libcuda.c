/* Stands in for the driver. Every function exists three times: found by its name, and returned by
 * cuGetProcAddress for each kind of default stream. Each copy hands out addresses of its own range (0x1...,
 * 0x2..., 0x3...), so an address shows which copy was called. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { INVALID = 1, NO_MEMORY = 2, NOT_FOUND = 500 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t next[4] = {0, 0x100000000000, 0x200000000000, 0x300000000000};
static _Thread_local int failing;

void fake_driver_fail_next(int code) { failing = code; }

static int take(int way, void *out, size_t size) {
    int code = failing;
    failing = 0;
    if (code) return code;
    if (!out) return INVALID;
    pthread_mutex_lock(&lock);
    uintptr_t address = next[way];
    next[way] += (size + 511) / 512 * 512;
    pthread_mutex_unlock(&lock);
    memcpy(out, &address, sizeof address);
    return 0;
}
static int give(void) {
    int code = failing;
    failing = 0;
    return code;
}

static uint64_t mapped_handle;
typedef struct { char bytes[64]; } Handle;
typedef struct { size_t width, height; unsigned format, channels; } Shape;
typedef struct { size_t width, height, depth; unsigned format, channels, flags; } Shape3D;

/* The functions of one copy: storage class, range of addresses, names. */
#define EACH(S, W, N)                                                                                         \
    S int N(cuMemAlloc_v2)(void **p, size_t n) { return take(W, p, n); }                                     \
    S int N(cuMemAllocManaged)(void **p, size_t n, unsigned f) { (void)f; return take(W, p, n); }             \
    S int N(cuMemAllocPitch_v2)(void **p, size_t *pitch, size_t w, size_t h, unsigned e) {                   \
        (void)e; *pitch = (w + 511) / 512 * 512; return take(W, p, *pitch * h); }                          \
    S int N(cuMemAllocAsync)(void **p, size_t n, void *s) { (void)s; return take(W, p, n); }                  \
    S int N(cuMemAllocFromPoolAsync)(void **p, size_t n, void *q, void *s) { (void)q; (void)s; return take(W, p, n); } \
    S int N(cuMemFree_v2)(void *p) { (void)p; return give(); }                                               \
    S int N(cuMemFreeAsync)(void *p, void *s) { (void)p; (void)s; return give(); }                           \
    S int N(cuArrayCreate_v2)(void **p, const Shape *s) { (void)s; return take(W, p, 512); }                 \
    S int N(cuArray3DCreate_v2)(void **p, const Shape3D *s) { (void)s; return take(W, p, 512); }             \
    S int N(cuArrayDestroy)(void *p) { (void)p; return give(); }                                             \
    S int N(cuMipmappedArrayCreate)(void **p, const Shape3D *s, unsigned l) { (void)s; (void)l; return take(W, p, 512); } \
    S int N(cuMipmappedArrayDestroy)(void *p) { (void)p; return give(); }                                    \
    S int N(cuMemHostAlloc)(void **p, size_t n, unsigned f) { (void)f; return take(W, p, n); }                \
    S int N(cuMemAllocHost_v2)(void **p, size_t n) { return take(W, p, n); }                                 \
    S int N(cuMemFreeHost)(void *p) { (void)p; return give(); }                                              \
    S int N(cuMemHostRegister_v2)(void *p, size_t n, unsigned f) { (void)p; (void)n; (void)f; return give(); } \
    S int N(cuMemHostUnregister)(void *p) { (void)p; return give(); }                                        \
    S int N(cuMemCreate)(uint64_t *h, size_t n, const void *prop, unsigned long long f) { (void)prop; (void)f; return take(W, h, n); } \
    S int N(cuMemRelease)(uint64_t h) { (void)h; return give(); }                                            \
    S int N(cuMemRetainAllocationHandle)(uint64_t *h, void *p) { *h = mapped_handle; (void)p; return give(); } \
    S int N(cuMemImportFromShareableHandle)(uint64_t *h, void *s, unsigned k) { (void)s; (void)k; return take(W, h, 512); } \
    S int N(cuMemMap)(void *p, size_t n, size_t o, uint64_t h, unsigned long long f) {                       \
        (void)p; (void)n; (void)o; (void)f; mapped_handle = h; return give(); }                            \
    S int N(cuMemUnmap)(void *p, size_t n) { (void)p; (void)n; return give(); }                              \
    S int N(cuIpcOpenMemHandle_v2)(void **p, Handle h, unsigned f) {                                         \
        return h.bytes[63] == 42 && f == 7 ? take(W, p, 512) : INVALID; }                                  \
    S int N(cuIpcCloseMemHandle)(void *p) { (void)p; return give(); }                                        \
    S int N(cuMemPoolImportPointer)(void **p, void *q, const void *e) { (void)q; (void)e; return take(W, p, 512); } \
    S int N(cuCtxGetDevice)(int *d) { *d = 0; return 0; }

#define BY_NAME(f) f
#define LEGACY(f) legacy_##f
#define PER_THREAD(f) per_thread_##f
EACH(, 1, BY_NAME)
EACH(static, 2, LEGACY)
EACH(static, 3, PER_THREAD)
int cuMemAllocAsync_ptsz(void **p, size_t n, void *s) { return per_thread_cuMemAllocAsync(p, n, s); }
int cuMemFreeAsync_ptsz(void *p, void *s) { return per_thread_cuMemFreeAsync(p, s); }
int cuMemAllocFromPoolAsync_ptsz(void **p, size_t n, void *q, void *s) { return per_thread_cuMemAllocFromPoolAsync(p, n, q, s); }
/* The first version of cuMemAlloc is another function, with other arguments. */
int cuMemAlloc(unsigned *p, unsigned n) { *p = n; return 0; }
int cuInit(unsigned flags) { (void)flags; return 0; }

int cuGetProcAddress_v2(const char *name, void **place, int version, unsigned long long flags, int *found);
int cuGetProcAddress(const char *name, void **place, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, place, version, flags, NULL);
}

#define ENTRY(base, f) {base, (void *)legacy_##f, (void *)per_thread_##f}
static const struct { const char *name; void *legacy, *per_thread; } entries[] = {
    ENTRY("cuMemAlloc", cuMemAlloc_v2), ENTRY("cuMemAllocManaged", cuMemAllocManaged),
    ENTRY("cuMemAllocPitch", cuMemAllocPitch_v2), ENTRY("cuMemAllocAsync", cuMemAllocAsync),
    ENTRY("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync), ENTRY("cuMemFree", cuMemFree_v2),
    ENTRY("cuMemFreeAsync", cuMemFreeAsync), ENTRY("cuArrayCreate", cuArrayCreate_v2),
    ENTRY("cuArray3DCreate", cuArray3DCreate_v2), ENTRY("cuArrayDestroy", cuArrayDestroy),
    ENTRY("cuMipmappedArrayCreate", cuMipmappedArrayCreate), ENTRY("cuMipmappedArrayDestroy", cuMipmappedArrayDestroy),
    ENTRY("cuMemHostAlloc", cuMemHostAlloc), ENTRY("cuMemAllocHost", cuMemAllocHost_v2),
    ENTRY("cuMemFreeHost", cuMemFreeHost), ENTRY("cuMemHostRegister", cuMemHostRegister_v2),
    ENTRY("cuMemHostUnregister", cuMemHostUnregister), ENTRY("cuMemCreate", cuMemCreate),
    ENTRY("cuMemRelease", cuMemRelease), ENTRY("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle),
    ENTRY("cuMemImportFromShareableHandle", cuMemImportFromShareableHandle), ENTRY("cuMemMap", cuMemMap),
    ENTRY("cuMemUnmap", cuMemUnmap), ENTRY("cuIpcOpenMemHandle", cuIpcOpenMemHandle_v2),
    ENTRY("cuIpcCloseMemHandle", cuIpcCloseMemHandle), ENTRY("cuMemPoolImportPointer", cuMemPoolImportPointer),
    ENTRY("cuCtxGetDevice", cuCtxGetDevice),
};

int cuGetProcAddress_v2(const char *name, void **place, int version, unsigned long long flags, int *found) {
    *place = NULL;
    if (found) *found = 1;
    if (!strcmp(name, "cuMemAlloc") && version < 3020) *place = (void *)cuMemAlloc;
    else if (!strcmp(name, "cuGetProcAddress")) *place = version < 12000 ? (void *)cuGetProcAddress : (void *)cuGetProcAddress_v2;
    else
        for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
            if (!strcmp(name, entries[i].name)) *place = flags & 2 ? entries[i].per_thread : entries[i].legacy;
    if (*place && found) *found = 0;
    return *place ? 0 : NOT_FOUND;
}
