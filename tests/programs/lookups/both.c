/* A program with a runtime, and a library with a runtime of its own. Both make the same driver calls. */
#include <stddef.h>

int library_works(void);
int cudaMalloc(void **out, size_t size);
int cudaFree(void *address);

int main(void) {
    void *address;
    if (cudaMalloc(&address, 1000) || library_works()) return 1;
    return cudaFree(address);
}
