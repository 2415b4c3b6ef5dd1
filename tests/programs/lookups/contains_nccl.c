/* With -DANSWER=N a library that contains functions of NCCL, as some builds of torch do, or that is NCCL, and calls
 * them through the loader. With -DUSER one that calls the NCCL that it is linked with. As a program: loads libraries as
 * Python loads torch's (with + before its path as a global one), then calls each twice, and prints what they return.
 * A library with ! before its path is called and unloaded at once. Without arguments it looks the names up instead. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#if defined(ANSWER) || defined(USER)
int ncclGroupStart(void);
int ncclCommSplit(void *comm, int color, int key, void **made, void *config);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream);
int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes);
#ifdef ANSWER
int ncclGroupStart(void) { return ANSWER; }
int ncclCommSplit(void *comm, int color, int key, void **made, void *config) {
    *made = comm;
    return comm == made && color == 1 && key == 2 && config == made ? ANSWER + 1 : -1;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream) {
    return from == stream && to == stream && count == 3 && type == 4 && operation == 5 && comm == stream ? ANSWER + 2 : -1;
}
int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes) {
    return handle == workspace && bytes == 6 ? ANSWER + 3 : -1;
}
#endif
long call(void) {
    void *place = &place;
    long split = ncclCommSplit(&place, 1, 2, &place, &place);
    place = &place;
    long reduced = ncclAllReduce(place, place, 3, 4, 5, place, place);
    long set = cublasSetWorkspace_v2(place, place, 6);
    return ((ncclGroupStart() * 100L + split) * 100 + reduced) * 100 + set;
}
#else
static void look_up(const char *how, void *handle, const char *name) {
    void *found = dlsym(handle, name);
    const char *message = dlerror();
    printf("%s %s: %s\n", how, name, found ? "found" : message && strstr(message, name) ? "undefined" : "no message");
}

int main(int argc, char **argv) {
    static const char *const NAMES[] = {"ncclGroupStart", "ncclAllReduce", "cublasSetWorkspace_v2", "cudaMalloc", "cuMemAlloc_v2", "nvtxRangePop"};
    long (*calls[16])(void);
    int loaded = 0;
    for (int at = 1; at < argc && loaded < 16; at++) {
        const char *path = argv[at] + (*argv[at] == '+' || *argv[at] == '!');
        void *library = dlopen(path, RTLD_NOW | (*argv[at] == '+' ? RTLD_GLOBAL : RTLD_LOCAL));
        long (*call)(void) = library ? (long (*)(void))dlsym(library, "call") : NULL;
        if (!call) {
            printf("%s\n", dlerror());
        } else if (*argv[at] == '!') {
            printf("%ld\n", call());
            dlclose(library);
        } else {
            calls[loaded++] = call;
        }
    }
    for (int round = 0; round < 2; round++) {
        for (int at = 0; at < loaded; at++) printf("%ld\n", calls[at]());
    }
    for (size_t at = 0; argc == 1 && at < 2 * sizeof NAMES / sizeof *NAMES; at++) {
        const char *name = NAMES[at % (sizeof NAMES / sizeof *NAMES)];
        look_up("default", RTLD_DEFAULT, name);
        look_up("next", RTLD_NEXT, name);
        look_up("program", dlopen(NULL, RTLD_NOW), name);
    }
    return 0;
}
#endif
