// Asks for cuGetProcAddress as the runtimes of CUDA 11 and 12 do, and uses the function that it gets.
#include <stdint.h>
#include <stdio.h>

typedef int (*of_cuda_11)(const char *, void **, int, uint64_t);
typedef int (*of_cuda_12)(const char *, void **, int, uint64_t, int *);

int cuGetProcAddress(const char *, void **, int, uint64_t);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

int main(void) {
    void *older = 0, *newer = 0, *function = 0;
    int found = -1;
    // The address that a function of five arguments would take as its fifth is no address.
    int status = cuGetProcAddress_v2("cuGetProcAddress", &older, 11030, 0, &found);
    printf("for 11.3: %d found %d own %d\n", status, found, older == (void *)cuGetProcAddress);
#ifdef __aarch64__
    register uint64_t fifth __asm__("x4") = 1;
#else
    register uint64_t fifth __asm__("r8") = 1;
#endif
    __asm__ volatile("" : : "r"(fifth));
    status = ((of_cuda_11)older)("cuInit", &function, 11030, 0);
    printf("called: %d %d\n", status, function != 0);
    status = ((of_cuda_11)older)("cuNoSuchCall", &function, 11030, 0);
    printf("unknown: %d %d\n", status, function != 0);
    status = cuGetProcAddress("cuGetProcAddress", &newer, 12000, 0);
    printf("for 12.0: %d own %d\n", status, newer == (void *)cuGetProcAddress_v2);
    status = ((of_cuda_12)newer)("cuInit", &function, 12000, 0, &found);
    printf("called: %d %d found %d\n", status, function != 0, found);
    return 0;
}
