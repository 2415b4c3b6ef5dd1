/* Allocates, starts children as argv[1] says, allocates again. Only the parent prints: the number of its
 * allocations. */
#define _GNU_SOURCE
#include "cuda.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static long taken;
static volatile int stop;

static void *take(size_t size) {
    void *address = NULL;
    if (cudaMalloc(&address, size)) abort();
    __atomic_add_fetch(&taken, 1, __ATOMIC_RELAXED);
    return address;
}

static void *allocates(void *unused) {
    while (!stop) {
        cudaFree(take(512));
        usleep(50);
    }
    return unused;
}

static void wait_for(pid_t pid) {
    int status;
    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != 5) {
        printf("child ended with %d\n", status);
        exit(8);
    }
}

static int uses(void *unused) {
    (void)unused;
    cudaFree(take(6000));
    return 5;
}

/* Starts a child that runs `uses` and ends. None of these ways runs a handler of pthread_atfork. */
static pid_t start_unseen(const char *way) {
    static char stack[1 << 20] __attribute__((aligned(16)));
    pid_t pid = -1;
    if (!strcmp(way, "clone")) return clone(uses, stack + sizeof stack, SIGCHLD, NULL);
    if (!strcmp(way, "_Fork")) pid = _Fork();
#ifdef SYS_fork
    if (!strcmp(way, "SYS_fork")) pid = syscall(SYS_fork);
#else /* not on aarch64 */
    if (!strcmp(way, "SYS_fork")) pid = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
#endif
    if (!strcmp(way, "SYS_clone")) pid = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0) exit(uses(NULL));
    return pid;
}

static int is_unseen(const char *way) {
    return !strcmp(way, "clone") || !strcmp(way, "_Fork") || !strcmp(way, "SYS_fork") ||
           !strcmp(way, "SYS_clone");
}

int main(int argc, char **argv) {
    const char *how = argv[1];
    char *const command[] = {"sh", "-c", "exit 5", NULL};
    char *const itself[] = {argv[0], "leaf", NULL};
    pid_t pid;
    if (!strcmp(how, "leaf")) return uses(NULL);
    if (argc > 2 && !strcmp(argv[2], "first")) wait_for(start_unseen(how));
    if (!strcmp(how, "fork first")) {
        pid = fork();
        if (pid == 0) { cudaFree(take(6000)); exit(5); }
        wait_for(pid);
    }
    void *kept = take(1000);
    if (is_unseen(how) && argc == 2) {
        wait_for(start_unseen(how));
    } else if (!strcmp(how, "fork")) {
        pid = fork();
        if (pid == 0) exit(5);
        wait_for(pid);
    } else if (!strcmp(how, "fork and use")) {
        pid = fork();
        if (pid == 0) { cudaFree(take(6000)); exit(5); }
        wait_for(pid);
    } else if (!strcmp(how, "fork and leave")) {
        pid = fork();
        if (pid == 0) _exit(5);
        wait_for(pid);
    } else if (!strcmp(how, "fork among threads")) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, allocates, NULL);
        for (int i = 0; i < 100; i++) {
            pid = fork();
            /* The child's exit runs the same handlers as the parent's. The fake runtime's lock may never be
             * released in the child, so the child does not call it. The alarm ends a child that hangs. */
            if (pid == 0) { alarm(30); exit(5); }
            wait_for(pid);
        }
        stop = 1;
        for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    } else if (!strcmp(how, "vfork")) {
        pid = vfork();
        if (pid == 0) { execv("/bin/sh", command); _exit(6); }
        wait_for(pid);
        pid = vfork();
        if (pid == 0) _exit(5);
        wait_for(pid);
    } else if (!strcmp(how, "vfork and exec")) {
        pid = vfork();
        if (pid == 0) { execv(argv[0], itself); _exit(6); }
        wait_for(pid);
    } else if (!strcmp(how, "_Fork among threads")) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, allocates, NULL);
        for (int i = 0; i < 100; i++) {
            pid = _Fork();
            if (pid == 0) { alarm(30); _exit(5); }
            wait_for(pid);
        }
        stop = 1;
        for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    } else if (!strcmp(how, "posix_spawn")) {
        if (posix_spawn(&pid, "/bin/sh", NULL, NULL, command, environ)) return 7;
        wait_for(pid);
        if (posix_spawn(&pid, "/no/such/program", NULL, NULL, command, environ) == 0) return 7;
    } else if (!strcmp(how, "system")) {
        if (WEXITSTATUS(system("exit 5")) != 5) return 7;
    }
    cudaFree(kept);
    take(3000);
    printf("%ld\n", taken);
    return 0;
}
