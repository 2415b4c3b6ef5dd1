/* A library that returns its name, and the results of dlsym called from inside it. Built with NAME, and with
 * DEPENDS if it has a dependency that only it can see. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

typedef const char *(*who_fn)(void);

const char *who(void) { return TEXT(NAME); }

const char *JOIN(NAME, _next)(void) {
    who_fn next = (who_fn)dlsym(RTLD_NEXT, "who");
    return next ? next() : "(nobody)";
}
const char *JOIN(NAME, _default)(const char *name) {
    who_fn found = (who_fn)dlsym(RTLD_DEFAULT, name);
    return found ? found() : "(nobody)";
}
const char *JOIN(NAME, _only)(void) { return TEXT(NAME) "'s own"; }
