/* A plugin that is linked against the runtime, as torch's libraries are. */
#include "cuda.h"

int plugin_allocate(void **out, size_t size) { return cudaMalloc(out, size); }
int plugin_free(void *address) { return cudaFree(address); }
