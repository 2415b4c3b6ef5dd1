/* Calls the functions of memtrace.h, with an allocation after each; its size identifies the call. Prints
 * their return values. */
#include "cuda.h"
#include <memtrace.h>
#include <pthread.h>
#include <stdio.h>

static void allocate(size_t size) {
    void *address;
    cudaMalloc(&address, size);
}

static uint64_t crossing;
static void *ends_it(void *unused) {
    memtrace_range_end(crossing);
    return unused;
}

int main(void) {
    printf("%d\n", memtrace_is_traced());
    memtrace_step(3);
    allocate(101);
    printf("%d\n", memtrace_range_push("phase:eval"));
    printf("%d\n", memtrace_range_push("Net"));
    allocate(102);
    memtrace_pause();
    printf("%d\n", memtrace_is_paused());
    printf("%d\n", memtrace_range_push("unseen"));
    allocate(103);
    printf("%d\n", memtrace_range_pop());
    memtrace_mark("while paused");
    memtrace_step(4);
    printf("%d\n", memtrace_range_pop());
    printf("%d\n", memtrace_range_push("module:Net.late"));
    memtrace_resume();
    printf("%d\n", memtrace_is_paused());
    allocate(104);
    printf("%d\n", memtrace_range_pop());
    printf("%d\n", memtrace_range_pop());
    printf("%d\n", memtrace_range_pop());
    crossing = memtrace_range_start("phase:decode");
    printf("%d\n", crossing != 0);
    allocate(105);
    pthread_t thread;
    pthread_create(&thread, NULL, ends_it, NULL);
    pthread_join(thread, NULL);
    allocate(106);
    memtrace_step(-1);
    memtrace_mark(NULL);
    memtrace_mark("the \xff end");
    memtrace_detail(2);
    memtrace_detail(-1);
    printf("%d\n", memtrace_flush());
    return 0;
}
