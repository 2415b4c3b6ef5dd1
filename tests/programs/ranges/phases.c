/* Tests the phases that autograd's threads inherit: from a thread that ended inside a phase, and, in a child,
 * from a thread that only the parent has. Each allocation's size shows where it was made. */
#define _GNU_SOURCE
#include "cuda.h"
#include <memtrace.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static int ready[2];

static void *ends_inside(void *unused) {
    memtrace_range_push("forward");
    return unused;
}

static void *stays_inside(void *unused) {
    memtrace_range_push("optimizer");
    if (write(ready[1], "", 1) == 1) pause();
    return unused;
}

static void *allocates(void *size) {
    void *address;
    pthread_setname_np(pthread_self(), "pt_autograd_0");
    cudaMalloc(&address, (size_t)size);
    return 0;
}

static void on_a_thread(void *(*work)(void *), size_t argument) {
    pthread_t thread;
    pthread_create(&thread, 0, work, (void *)argument);
    pthread_join(thread, 0);
}

int main(void) {
    pthread_t thread;
    char byte;
    on_a_thread(ends_inside, 0);
    on_a_thread(allocates, 101);
    if (pipe(ready)) return 7;
    pthread_create(&thread, 0, stays_inside, 0);
    if (read(ready[0], &byte, 1) != 1) return 7;
    on_a_thread(allocates, 102);
    pid_t pid = fork();
    if (pid == 0) {
        on_a_thread(allocates, 103);
        _exit(0);
    }
    waitpid(pid, 0, 0);
    return 0;
}
