/* Loads a library that needs a file of NVML, on a machine that has none, and prints what it says. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **arguments) {
    void *library = dlopen(arguments[count - 1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return printf("%s\n", dlerror()), 0;
    printf("%d devices\n", ((int (*)(void))dlsym(library, "count_devices"))());
    return 0;
}
