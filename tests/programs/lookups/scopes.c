/* RTLD_NEXT and RTLD_DEFAULT depend on the calling library: prints the result for each library. The program
 * is linked against `first` and `second`; argv[1] is `hidden`, loaded with RTLD_LOCAL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

const char *who(void);
const char *first_next(void), *second_next(void), *first_default(const char *);

int main(int argc, char **argv) {
    (void)argc;
    printf("program %s\n", who());
    printf("first's next %s\n", first_next());
    printf("second's next %s\n", second_next());
    printf("first's default %s\n", first_default("who"));
    printf("first's default for hidden %s\n", first_default("hidden_only"));
    void *hidden = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!hidden) return 1;
    const char *(*next)(void) = (const char *(*)(void))dlsym(hidden, "hidden_next");
    const char *(*by_default)(const char *) = (const char *(*)(const char *))dlsym(hidden, "hidden_default");
    printf("hidden's next %s\n", next());
    printf("hidden's default for its own %s\n", by_default("hidden_only"));
    printf("first's default for hidden %s\n", first_default("hidden_only"));
    printf("no such symbol %d\n", dlsym(RTLD_DEFAULT, "no_such_symbol") == NULL);
    printf("%s\n", dlerror());
    printf("malloc is the C library's %d\n", dlsym(RTLD_NEXT, "malloc") == dlsym(RTLD_DEFAULT, "malloc"));
    return 0;
}
