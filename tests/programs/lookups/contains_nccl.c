/* A library that contains functions of NCCL, as some builds of torch do, and calls them through the loader. As a
 * program: loads this library (argv[1]) as Python loads torch's, and prints what its call returns. */
#include <dlfcn.h>
#include <stdio.h>

#ifdef LIBRARY
int ncclGroupStart(void) { return 40; }
int ncclGroupEnd(void) { return 2; }
int call(void) { return ncclGroupStart() + ncclGroupEnd(); }
#else
int main(int argc, char **argv) {
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    int (*call)(void) = library ? (int (*)(void))dlsym(library, "call") : NULL;
    printf("%d\n", call ? call() : -1);
    return 0;
}
#endif
