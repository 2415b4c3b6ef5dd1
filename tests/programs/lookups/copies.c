/* As a library: with -DANSWER=N it contains functions of NCCL, of cuBLAS and of the CUDA runtime; with -DCALLS it calls
 * them, and those that have no hook. With -DTAIL a call is the last thing that a function does. With -DLEAVES it tells
 * that it is unloaded. -DNOTHING is a library without functions.
 *
 * As a program it follows its arguments: a path is loaded (with + before it as a global one), fn=NAME calls a function of
 * the last one, "close" unloads it. With -DSTART the program calls first what it is linked with. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef NOTHING
extern int nothing;
#elif defined(ANSWER) || defined(CALLS) || defined(TAIL)
int ncclGroupStart(void);
const char *ncclGetErrorString(int status);
int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes);
int cublasGetVersion_v2(void *handle, int *version);
int cudaMalloc(void **out, size_t size);
int cudaFree(void *address);
#ifdef ANSWER
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)
int ncclGroupStart(void) { return ANSWER; }
const char *ncclGetErrorString(int status) { return status ? "" : TEXT(ANSWER); }
int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes) { return handle == workspace && bytes == 1 ? ANSWER : -1; }
int cublasGetVersion_v2(void *handle, int *version) { return *version = ANSWER, handle != NULL; }
#ifdef RUNTIME
int cudaMalloc(void **out, size_t size) { return *out = (void *)0x700000001000, size != ANSWER; }
int cudaFree(void *address) { return address != (void *)0x700000001000; }
#endif
#endif
#ifdef CALLS
int nccl(void) { return ncclGroupStart() + CALLS; }
int nccl_after(void) { return strtol(ncclGetErrorString(0), NULL, 10) * 100 + ncclGroupStart(); }
int cublas(void) { return cublasSetWorkspace_v2(NULL, NULL, 1) + CALLS; }
int cublas_after(void) {
    int version = 0;
    cublasGetVersion_v2(NULL, &version);
    return version * 100 + cublasSetWorkspace_v2(NULL, NULL, 1);
}
#ifdef RUNTIME
int runtime(void) {
    void *address = NULL;
    int allocated = cudaMalloc(&address, ANSWER);
    return allocated * 10 + cudaFree(address);
}
#endif
#endif
#ifdef TAIL
int tail(void) { return ncclGroupStart(); }
#endif
#ifdef LEAVES
static int calls;
int count(void) { return ++calls; }
__attribute__((destructor)) static void leaves(void) {
    puts("unloaded");
    fflush(stdout);
}
#endif
#else
#ifdef START
int nccl_after(void);
#endif
int main(int argc, char **argv) {
    void *library = NULL;
#ifdef START
    printf("start %d\n", nccl_after());
#endif
    for (int at = 1; at < argc; at++) {
        int is_global = *argv[at] == '+';
        if (!strncmp(argv[at], "fn=", 3)) {
            int (*function)(void) = library ? (int (*)(void))dlsym(library, argv[at] + 3) : NULL;
            printf("%s %d\n", argv[at], function ? function() : -99);
        } else if (!strcmp(argv[at], "close")) {
            printf("closed %d\n", dlclose(library));
        } else if (!(library = dlopen(argv[at] + is_global, RTLD_LAZY | (is_global ? RTLD_GLOBAL : RTLD_LOCAL)))) {
            printf("%s\n", dlerror());
        }
        fflush(stdout);
    }
    return 0;
}
#endif
