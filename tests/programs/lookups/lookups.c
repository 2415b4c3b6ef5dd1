/* Looks symbols up in a loop and prints ns per look-up, one line each: a function of libc, a driver function
 * by dlsym, and one by cuGetProcAddress. argv[1] is the driver's path, argv[2] the number of look-ups. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int (*GetProc)(const char *, void **, int, unsigned long long, int *);

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

int main(int argc, char **argv) {
    long rounds = argc > 2 ? atol(argv[2]) : 100000;
    void *driver = dlopen(argv[1], RTLD_NOW), *libc = dlopen("libc.so.6", RTLD_NOW), *found = NULL;
    GetProc get = (GetProc)dlsym(driver, "cuGetProcAddress_v2");
    int status;
    double start = now();
    for (long i = 0; i < rounds; i++) found = dlsym(libc, "qsort");
    printf("libc %.2f\n", (now() - start) / rounds);
    start = now();
    for (long i = 0; i < rounds; i++) found = dlsym(driver, "cuMemAlloc_v2");
    printf("driver %.2f\n", (now() - start) / rounds);
    start = now();
    for (long i = 0; i < rounds; i++) found = dlsym(driver, "cuInit");
    printf("driver_other %.2f\n", (now() - start) / rounds);
    start = now();
    for (long i = 0; i < rounds; i++) get("cuMemAlloc", &found, 12000, 0, &status);
    printf("entry_point %.2f\n", (now() - start) / rounds);
    return found == NULL;
}
