/* Makes argv[2] rounds of allocations and frees of every kind, under changing owners; fewer if the file argv[3]
 * exists before. It flushes often, so a rotated trace has several parts, but not in a "burst". "hold" has 2500 more
 * blocks that live all the time. Ends as argv[1] says. Prints the numbers of allocations and frees. */
#include "cuda.h"
#include "torch.h"
#include <memtrace.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEPT = 24, KINDS = 3 };

#ifdef NO_HARD_LINKS
#include <errno.h>
/* Refuses hard links, as some file systems do. */
int linkat(int from, const char *old, int to, const char *new, int flags) {
    (void)from, (void)old, (void)to, (void)new, (void)flags;
    errno = EPERM;
    return -1;
}
#endif

/* The function that torch's CPU allocator calls. */
_Bool _ZN3c1022memoryProfilingEnabledEv(void) __attribute__((weak));
void _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(void *, int64_t, size_t, size_t, uint16_t);

static void report_cpu(void *address, int64_t size) {
    uint16_t cpu = 0xff00;
    if (_ZN3c1022memoryProfilingEnabledEv && _ZN3c1022memoryProfilingEnabledEv())
        _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(address, size, 0, 0, cpu);
}

int main(int argc, char **argv) {
    void *kept[KINDS][KEPT] = {0};
    unsigned seed = 1;
    long taken = 0, given = 0;
    int rounds = argc > 2 ? atoi(argv[2]) : 0;
    int flushes = strcmp(argv[1], "burst");
    char name[32];
    for (int i = 0; !strcmp(argv[1], "hold") && i < 2500; i++) { torch_allocate(512); taken++; }
    for (int i = 0; i < rounds; i++) {
        if (i % 50 == 0) {
            if (i) memtrace_range_pop();
            snprintf(name, sizeof name, "module:Net.%d", i / 50 % 7);
            memtrace_range_push(name);
            memtrace_step(i / 100);
        }
        int kind = rand_r(&seed) % KINDS;
        void **slot = &kept[kind][rand_r(&seed) % KEPT];
        if (*slot) {
            if (kind == 0) torch_free(*slot);
            if (kind == 1) cudaFree(*slot);
            if (kind == 2) cudaFreeHost(*slot);
            *slot = NULL;
            given++;
        } else {
            if (kind == 0) *slot = torch_allocate(512);
            if (kind == 1) cudaMalloc(slot, 1000 + i);
            if (kind == 2) cudaHostAlloc(slot, 2000 + i, 0);
            taken++;
        }
        if (i % 100 == 99 && flushes) memtrace_flush();
        if (i == 99 && argc > 3) { printf("ready\n"); fflush(stdout); }
        if (i % 100 == 99 && argc > 3 && !access(argv[3], F_OK)) break;
        if (i == rounds / 2) { report_cpu(&taken, 77); report_cpu(&given, 78); }
        if (i == rounds / 2 + 300) { report_cpu(&taken, -77); report_cpu(&seed, -79); }
    }
    if (!strcmp(argv[1], "slow")) {
        memtrace_mark("before");
        memtrace_flush();
        usleep(1100 * 1000);
        memtrace_mark("after");
        memtrace_flush();
        memtrace_mark("behind");
    }
    if (!strcmp(argv[1], "wait")) {
        memtrace_flush();
        printf("ready\n");
        fflush(stdout);
        getchar();
    }
    printf("%ld %ld\n", taken, given);
    fflush(stdout);
    if (!strcmp(argv[1], "kill")) raise(SIGKILL);
    return 0;
}
