/* Allocates, starts children as argv[1] says, allocates again. Only the parent prints: the number of its
 * allocations. */
#define _GNU_SOURCE
#include "cuda.h"
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

int main(int argc, char **argv) {
    (void)argc;
    const char *how = argv[1];
    char *const command[] = {"sh", "-c", "exit 5", NULL};
    pid_t pid;
    if (!strcmp(how, "fork first")) {
        pid = fork();
        if (pid == 0) { cudaFree(take(6000)); exit(5); }
        wait_for(pid);
    }
    void *kept = take(1000);
    if (!strcmp(how, "fork")) {
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
             * released in the child, so the child does not call it. */
            if (pid == 0) exit(5);
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
