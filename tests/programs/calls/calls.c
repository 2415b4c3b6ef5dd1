/* Makes every call of the runtime once, and prints for each the row that the trace must have: event api
 * status address requested delta. */
#include "cuda.h"
#include <stdint.h>
#include <stdio.h>

static void *address;
static size_t pitch;

#define TELL(event, api, status, at, requested, delta) \
    printf("%s %s %d %lu %ld %ld\n", event, api, status, (uintptr_t)(at), (long)(requested), (long)(delta))

/* Tests a call that allocates `bytes` for `asked` bytes. It succeeds, then fails, then has a null output
 * pointer. */
#define TAKES(event, api, bytes, good, nowhere)                                   \
    do {                                                                          \
        void *untouched = (void *)0x1234;                                         \
        int status = good;                                                        \
        TELL(event, api, status, address, asked, status ? 0 : (long)(bytes));     \
        void *kept = address;                                                     \
        address = untouched;                                                      \
        fake_fail_next(2);                                                        \
        status = good;                                                            \
        TELL(event, api, status, 0, asked, 0);                                    \
        if (address != untouched) return 9;                                       \
        status = nowhere;                                                         \
        TELL(event, api, status, 0, asked, 0);                                    \
        address = kept;                                                           \
    } while (0)

/* Tests a call that frees `address`. It fails, then succeeds; a free of null is no event. */
#define GIVES(event, api, bytes, call, nothing)                          \
    do {                                                                 \
        fake_fail_next(4);                                               \
        int status = call;                                               \
        TELL(event, api, status, address, -1, 0);                        \
        status = call;                                                   \
        TELL(event, api, status, address, asked, -(long)(bytes));        \
        (void)(nothing);                                                 \
    } while (0)

int main(void) {
    long asked;
    cudaFree(NULL);
    void *stream = (void *)7, *pool = (void *)8;

    asked = 1000;
    TAKES("ext_alloc", "cudaMalloc", 1000, cudaMalloc(&address, 1000), cudaMalloc(NULL, 1000));
    GIVES("ext_free", "cudaFree", 1000, cudaFree(address), cudaFree(NULL));
    TAKES("ext_alloc", "cudaMallocAsync", 1000, cudaMallocAsync(&address, 1000, stream), cudaMallocAsync(NULL, 1000, stream));
    GIVES("ext_free", "cudaFreeAsync", 1000, cudaFreeAsync(address, stream), cudaFreeAsync(NULL, stream));
    TAKES("ext_alloc", "cudaMallocAsync", 1000, cudaMallocAsync_ptsz(&address, 1000, stream), cudaMallocAsync_ptsz(NULL, 1000, stream));
    GIVES("ext_free", "cudaFreeAsync", 1000, cudaFreeAsync_ptsz(address, stream), cudaFreeAsync_ptsz(NULL, stream));
    TAKES("ext_alloc", "cudaMallocFromPoolAsync", 1000, cudaMallocFromPoolAsync(&address, 1000, pool, stream),
          cudaMallocFromPoolAsync(NULL, 1000, pool, stream));
    GIVES("ext_free", "cudaFreeAsync", 1000, cudaFreeAsync(address, stream), cudaFreeAsync(NULL, stream));
    TAKES("ext_alloc", "cudaMallocFromPoolAsync", 1000, cudaMallocFromPoolAsync_ptsz(&address, 1000, pool, stream),
          cudaMallocFromPoolAsync_ptsz(NULL, 1000, pool, stream));
    GIVES("ext_free", "cudaFree", 1000, cudaFree(address), cudaFree(NULL));
    TAKES("ext_alloc", "cudaMallocManaged", 1000, cudaMallocManaged(&address, 1000, 1), cudaMallocManaged(NULL, 1000, 1));
    GIVES("ext_free", "cudaFree", 1000, cudaFree(address), cudaFree(NULL));

    /* A row of 100 bytes is padded to 512. */
    asked = 700;
    TAKES("ext_alloc", "cudaMallocPitch", 3584, cudaMallocPitch(&address, &pitch, 100, 7), cudaMallocPitch(NULL, &pitch, 100, 7));
    int status = cudaMallocPitch(&address, NULL, 100, 7);
    TELL("ext_alloc", "cudaMallocPitch", status, 0, 700, 0);
    GIVES("ext_free", "cudaFree", 3584, cudaFree(address), cudaFree(NULL));

    asked = 100 * 7 * 3;
    cudaPitchedPtr volume = {0};
    cudaExtent extent = {100, 7, 3};
    volume.ptr = address;
    status = cudaMalloc3D(&volume, extent);
    TELL("ext_alloc", "cudaMalloc3D", status, volume.ptr, asked, 10752);
    if (volume.pitch != 512 || volume.xsize != 100 || volume.ysize != 7) return 8;
    TELL("ext_alloc", "cudaMalloc3D", cudaMalloc3D(NULL, extent), 0, asked, 0);
    address = volume.ptr;
    GIVES("ext_free", "cudaFree", 10752, cudaFree(address), cudaFree(NULL));

    cudaChannelFormatDesc format = {32, 32, 0, 0, 2};
    asked = 8 * 10 * 20;
    TAKES("ext_alloc", "cudaMallocArray", 1600, cudaMallocArray(&address, &format, 10, 20, 0), cudaMallocArray(NULL, &format, 10, 20, 0));
    GIVES("ext_free", "cudaFreeArray", 1600, cudaFreeArray(address), cudaFreeArray(NULL));
    cudaExtent cube = {10, 20, 2};
    asked = 8 * 10 * 20 * 2;
    TAKES("ext_alloc", "cudaMalloc3DArray", 3200, cudaMalloc3DArray(&address, &format, cube, 0), cudaMalloc3DArray(NULL, &format, cube, 0));
    GIVES("ext_free", "cudaFreeArray", 3200, cudaFreeArray(address), cudaFreeArray(NULL));

    asked = 4096;
    TAKES("host_alloc", "cudaHostAlloc", 4096, cudaHostAlloc(&address, 4096, 0), cudaHostAlloc(NULL, 4096, 0));
    GIVES("host_free", "cudaFreeHost", 4096, cudaFreeHost(address), cudaFreeHost(NULL));
    TAKES("host_alloc", "cudaMallocHost", 4096, cudaMallocHost(&address, 4096), cudaMallocHost(NULL, 4096));
    GIVES("host_free", "cudaFreeHost", 4096, cudaFreeHost(address), cudaFreeHost(NULL));

    static char page[8192];
    TELL("host_alloc", "cudaHostRegister", cudaHostRegister(page, 8192, 0), page, 8192, 8192);
    TELL("host_alloc", "cudaHostRegister", cudaHostRegister(NULL, 8192, 0), 0, 8192, 0);
    address = page;
    asked = 8192;
    GIVES("host_free", "cudaHostUnregister", 8192, cudaHostUnregister(address), 0);

    /* A request of 0 bytes returns a null address, and there is nothing to free. */
    TELL("ext_alloc", "cudaMalloc", cudaMalloc(&address, 0), 0, 0, 0);
    return address ? 7 : 0;
}
