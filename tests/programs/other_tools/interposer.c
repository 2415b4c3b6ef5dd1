/* Another tool in LD_PRELOAD: it hooks dlsym and calls of the runtime and the driver, and passes everything
 * on. At exit it prints how many driver allocations passed through it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static long passed;
static __attribute__((destructor)) void tell(void) {
    if (getenv("INTERPOSER_TELLS")) fprintf(stderr, "interposer: %ld\n", passed);
}

/* The first version of glibc for this processor. */
#ifdef __aarch64__
#define FIRST_GLIBC "GLIBC_2.17"
#else
#define FIRST_GLIBC "GLIBC_2.2.5"
#endif

typedef void *(*Dlsym)(void *, const char *);
void *dlsym(void *handle, const char *name) {
    static Dlsym real;
    if (!real) real = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", FIRST_GLIBC);
    return real(handle, name);
}
int cuMemAlloc_v2(void **out, size_t size) {
    passed++;
    return ((int (*)(void **, size_t))dlsym(RTLD_NEXT, "cuMemAlloc_v2"))(out, size);
}
int cudaMalloc(void **out, size_t size) {
    passed++;
    return ((int (*)(void **, size_t))dlsym(RTLD_NEXT, "cudaMalloc"))(out, size);
}
