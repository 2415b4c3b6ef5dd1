/* Holds a block while the tracer samples the device. */
#include "cuda.h"
#include <memtrace.h>

int main(void) {
    void *address;
    if (cudaMalloc(&address, 1000) || memtrace_flush()) return 1;
    return cudaFree(address);
}
