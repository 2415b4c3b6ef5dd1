/* A runtime and a driver in one library. The driver knows no device before the first call of the runtime.
 * Compiled with -DMAIN, it is the program that makes this call. */
#include <stddef.h>
#include <string.h>

int cudaMalloc(void **out, size_t size);

#ifdef MAIN
int main(void) {
    void *address;
    return cudaMalloc(&address, 1000);
}
#else
static int is_ready;
static const int NOT_INITIALIZED = 3;

int cudaMalloc(void **out, size_t size) {
    is_ready = 1;
    *out = (void *)(0x7f0000000000 + size);
    return 0;
}
int cudaGetDevice(int *out) { *out = 1; return is_ready ? 0 : NOT_INITIALIZED; }
int cuDeviceGetCount(int *out) { if (is_ready) *out = 2; return is_ready ? 0 : NOT_INITIALIZED; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return 0; }
int cuDeviceGetName(char *out, int length, int device) { strncpy(out, device ? "Second" : "First", length); return 0; }
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = (size_t)(device + 1) << 30; return 0; }
#endif
