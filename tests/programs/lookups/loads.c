/* Reaches the runtime in the way that argv[1] names; argv[2] is the path of the plugin or the runtime.
 * plugin: through a library loaded with RTLD_LOCAL. lookup: by dlopen and dlsym. twice: also looks up a
 * second runtime, argv[3]; each must receive its own calls. */
#include "cuda.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int (*allocate_fn)(void **, size_t);
typedef int (*free_fn)(void *);
typedef long (*calls_fn)(void);

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) fprintf(stderr, "%s: %s\n", name, dlerror());
    return found;
}

static int use(void *library, const char *allocate, const char *give, size_t size) {
    allocate_fn take = (allocate_fn)find(library, allocate);
    free_fn back = (free_fn)find(library, give);
    void *address = NULL;
    int status = take(&address, size);
    printf("%d", status);
    printf(" %d\n", back(address));
    return status;
}

int main(int argc, char **argv) {
    const char *how = argv[1];
    void *library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    if (!strcmp(how, "plugin")) return use(library, "plugin_allocate", "plugin_free", 3000);
    if (use(library, "cudaMalloc", "cudaFree", 3000)) return 2;
    printf("%d\n", dlsym(library, "cudaNoSuchCall") == NULL);
    printf("%ld\n", ((calls_fn)find(library, "fake_calls"))());
    if (!strcmp(how, "twice") && argc > 3) {
        void *second = dlopen(argv[3], RTLD_NOW | RTLD_LOCAL);
        if (!second) return fprintf(stderr, "%s\n", dlerror()), 1;
        use(second, "cudaMalloc", "cudaFree", 4000);
        printf("%ld %ld\n", ((calls_fn)find(library, "fake_calls"))(), ((calls_fn)find(second, "fake_calls"))());
    }
    return 0;
}
