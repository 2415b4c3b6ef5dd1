/* Driver calls before and after the driver is initialized, on the phantom device. With an argument the runtime
 * initializes it. Prints the status of each call; tests/phantom/calls.rs has the expected ones. */
#include <stdio.h>

int cuInit(unsigned), cuDeviceGetCount(int *), cuDeviceGet(int *, int), cuDriverGetVersion(int *), cuCtxGetCurrent(void **);
int cuMemAlloc_v2(void **, unsigned long), cuMemFree_v2(void *), cuGetErrorName(int, const char **);
int cuGraphicsMapResources(unsigned, void **, void *), cuGetProcAddress_v2(const char *, void **, int, unsigned long, int *);
int cudaGetLastError(void), cudaFree(void *);

static void all(const char *when) {
    int number, found;
    void *pointer = NULL, *function = NULL;
    printf("%s:", when);
    printf(" count %d", cuDeviceGetCount(&number));
    printf(" get %d", cuDeviceGet(&number, 0));
    printf(" current %d", cuCtxGetCurrent(&pointer));
    int allocated = cuMemAlloc_v2(&pointer, 1000);
    printf(" alloc %d", allocated);
    printf(" free %d", cuMemFree_v2(allocated ? NULL : pointer));
    printf(" unsupported %d", cuGraphicsMapResources(0, NULL, NULL));
    printf(" version %d", cuDriverGetVersion(&number));
    printf(" entry %d\n", cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &found));
}

int main(int count, char **arguments) {
    const char *name = NULL;
    (void)arguments;
    cudaGetLastError();
    all("before");
    cuGetErrorName(3, &name);
    printf("3 is %s\n", name);
    if (count > 1)
        printf("runtime %d\n", cudaFree(NULL));
    else
        printf("flags %d init %d\n", cuInit(1), cuInit(0));
    all("after");
    return 0;
}
