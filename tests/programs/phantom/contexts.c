/* The stack of contexts of a thread. Prints each status and the current device; tests/phantom/calls.rs has the
 * expected ones. */
#include <stdio.h>

int cudaSetDevice(int), cuDevicePrimaryCtxRetain(void **, int), cuCtxGetDevice(int *);
int cuCtxCreate_v2(void **, unsigned, int), cuCtxDestroy_v2(void *), cuCtxPushCurrent_v2(void *), cuCtxPopCurrent_v2(void **);

static void current(void) {
    int device = -1;
    cuCtxGetDevice(&device);
    printf(" current %d\n", device);
}

int main(void) {
    void *context, *popped = NULL, *first;
    cudaSetDevice(0);
    cuDevicePrimaryCtxRetain(&first, 0);
    printf("create %d", cuCtxCreate_v2(&context, 0, 1)), current();
    printf("pop %d", cuCtxPopCurrent_v2(&popped));
    printf(" same %d", popped == context), current();
    printf("push %d", cuCtxPushCurrent_v2(context)), current();
    printf("destroy another %d", cuCtxDestroy_v2(first)), current();
    printf("destroy %d", cuCtxDestroy_v2(context)), current();
    printf("refused %d", cuCtxCreate_v2(NULL, 0, 1));
    printf(" %d", cuCtxCreate_v2(&context, 0, 7)), current();
    return 0;
}
