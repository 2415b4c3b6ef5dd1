/* Counts memtrace's readings of the host's memory in the file SAMPLE_TALLY, which outlives the process. Preloaded.
 *
 * For each source: how many readings began, and how many of these were over when the writer thread looked at
 * resident memory again, which it does before it decides on the next ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

enum { SOURCES = 3 };
static const char *const paths[SOURCES] = {"/proc/self/status", "/proc/meminfo", "/proc/self/smaps"};

struct tally {
    uint64_t started, done;
};
static struct tally *tallies;

__attribute__((constructor)) static void map_tally(void) {
    const char *path = getenv("SAMPLE_TALLY");
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file < 0 || ftruncate(file, sizeof(struct tally) * SOURCES)) return;
    void *map = mmap(NULL, sizeof(struct tally) * SOURCES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) tallies = map;
    close(file);
}

static void count(const char *path) {
    if (!tallies) return;
    for (int i = 0; i < SOURCES; i++) {
        struct tally *tally = &tallies[i];
        if (!strcmp(path, "/proc/self/statm"))
            __atomic_store_n(&tally->done, tally->started, __ATOMIC_RELEASE);
        else if (!strcmp(path, paths[i]))
            __atomic_store_n(&tally->started, tally->started + 1, __ATOMIC_RELEASE);
    }
}

int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    count(path);
    return real(path, flags, mode);
}
