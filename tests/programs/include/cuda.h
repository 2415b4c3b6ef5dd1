/* The CUDA runtime functions that the programs call, and the controls of its stand-in. */
#pragma once
#include <stddef.h>

typedef int cudaError_t;
typedef struct { size_t width, height, depth; } cudaExtent;
typedef struct { void *ptr; size_t pitch, xsize, ysize; } cudaPitchedPtr;
typedef struct { int x, y, z, w, f; } cudaChannelFormatDesc;

cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaMalloc(void **out, size_t size);
cudaError_t cudaFree(void *address);
cudaError_t cudaMallocAsync(void **out, size_t size, void *stream);
cudaError_t cudaFreeAsync(void *address, void *stream);
cudaError_t cudaMallocAsync_ptsz(void **out, size_t size, void *stream);
cudaError_t cudaFreeAsync_ptsz(void *address, void *stream);
cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, void *pool, void *stream);
cudaError_t cudaMallocFromPoolAsync_ptsz(void **out, size_t size, void *pool, void *stream);
cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags);
cudaError_t cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height);
cudaError_t cudaMalloc3D(cudaPitchedPtr *out, cudaExtent extent);
cudaError_t cudaMallocArray(void **out, const cudaChannelFormatDesc *format, size_t width, size_t height, unsigned flags);
cudaError_t cudaMalloc3DArray(void **out, const cudaChannelFormatDesc *format, cudaExtent extent, unsigned flags);
cudaError_t cudaFreeArray(void *array);
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags);
cudaError_t cudaMallocHost(void **out, size_t size);
cudaError_t cudaFreeHost(void *address);
cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags);
cudaError_t cudaHostUnregister(void *address);

/* Makes the next call of this thread fail with this code. */
void fake_fail_next(int code);
/* Blocks cudaFree until it is released; counts the blocked calls. */
void fake_block_frees(int yes);
int fake_waiting(void);
/* The number of calls that reached the runtime. */
long fake_calls(void);
