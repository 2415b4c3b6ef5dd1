/* Takes a block and lets the tracer look at the device meanwhile. */
#include "cuda.h"
#include <memtrace.h>

int main(void) {
    void *address;
    if (cudaMalloc(&address, 1000) || memtrace_flush()) return 1;
    return cudaFree(address);
}
