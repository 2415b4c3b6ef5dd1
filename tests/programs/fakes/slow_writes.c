/* A disk that is slow: a write to a trace (*.csv) takes SLOW_WRITE_MS, the first one SLOW_FIRST_MS. Preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_ms(const char *variable) {
    const char *ms = getenv(variable);
    if (ms) usleep(atoi(ms) * 1000);
}

ssize_t write(int file, const void *bytes, size_t count) {
    static ssize_t (*real)(int, const void *, size_t);
    static int later;
    char link[64], path[4096];
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 4 && !memcmp(path + length - 4, ".csv", 4)) {
        wait_ms(later ? "SLOW_WRITE_MS" : "SLOW_FIRST_MS");
        later = 1;
    }
    return real(file, bytes, count);
}
