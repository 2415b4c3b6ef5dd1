/* Allocates, and ends in the way that argv[1] names (with argv[2], by SIGKILL). Frees at the end run in
 * destructors of every kind. */
#define _GNU_SOURCE
#include "cuda.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void *first, *second;
static pthread_key_t key;

static void free_second(void) { cudaFree(second); }
static void free_value(void *address) { cudaFree(address); }

static const char *how = "";
__attribute__((destructor)) static void at_unload(void) {
    if (!strcmp(how, "destructor")) cudaFree(second);
}

static void *ends_early(void *unused) {
    void *mine;
    cudaMalloc(&mine, 7000);
    cudaFree(mine);
    return unused;
}

static void *leaves_by_key(void *unused) {
    void *mine;
    cudaMalloc(&mine, 7000);
    pthread_setspecific(key, mine);
    return unused;
}

static void *goes_on(void *unused) {
    sleep(1);
    void *mine;
    cudaMalloc(&mine, 7000);
    return unused;
}

static void *exits(void *unused) {
    (void)unused;
    exit(3);
}

int main(int argc, char **argv) {
    (void)argc;
    how = argv[1];
    pthread_t thread;
    cudaMalloc(&first, 1000);
    cudaMalloc(&second, 2000);
    cudaFree(first);
    printf("to stdout\n");
    fflush(stdout);
    if (!strcmp(how, "return")) return 3;
    if (!strcmp(how, "exit")) exit(3);
    if (!strcmp(how, "_exit")) _exit(3);
    if (!strcmp(how, "_Exit")) _Exit(3);
    if (!strcmp(how, "quick_exit")) quick_exit(3);
    if (!strcmp(how, "atexit")) { atexit(free_second); exit(3); }
    if (!strcmp(how, "destructor")) exit(3);
    if (!strcmp(how, "exit in thread")) {
        pthread_create(&thread, NULL, exits, NULL);
        pthread_join(thread, NULL);
    }
    if (!strcmp(how, "pthread_exit")) {
        pthread_create(&thread, NULL, goes_on, NULL);
        pthread_exit(NULL);
    }
    if (!strcmp(how, "threads that end early")) {
        for (int i = 0; i < 300; i++) {
            pthread_create(&thread, NULL, ends_early, NULL);
            pthread_join(thread, NULL);
        }
        return 3;
    }
    if (!strcmp(how, "thread-local destructors")) {
        pthread_key_create(&key, free_value);
        pthread_t threads[8];
        for (int round = 0; round < 20; round++) {
            for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, leaves_by_key, NULL);
            for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
        }
        return 3;
    }
    if (!strcmp(how, "exec")) execl("/bin/sh", "sh", "-c", "echo another program; exit 3", NULL);
    if (!strcmp(how, "execle")) execle("/bin/sh", "sh", "-c", "echo $1$2$3$4$5$6 program $A; exit 3", "sh", "a", "n", "o", "t", "h", "er", NULL, (char *const[]){"A=of its own", NULL});
    if (!strcmp(how, "execlp")) execlp("sh", "sh", "-c", "echo another program; exit 3", NULL);
    char *const words[] = {"sh", "-c", "echo another program; exit 3", NULL};
    if (!strcmp(how, "execv")) execv("/bin/sh", words);
    if (!strcmp(how, "execvp")) execvp("sh", words);
    if (!strcmp(how, "execve")) execve("/bin/sh", words, environ);
    if (!strcmp(how, "execvpe")) execvpe("sh", words, environ);
    if (!strcmp(how, "fexecve")) fexecve(open("/bin/sh", O_RDONLY | O_CLOEXEC), words, environ);
    if (!strcmp(how, "exec that fails late")) {
        /* An executable file that exec cannot run: neither a program nor a script. */
        char path[] = "/tmp/memtrace-test-XXXXXX";
        int file = mkstemp(path);
        if (fchmod(file, 0700) || write(file, "\177ELF", 4) != 4) return 7;
        close(file);
        execl(path, "no", NULL);
        if (errno != ENOEXEC) return 8;
        unlink(path);
        if (argv[2]) {
            /* A flush keeps these rows in the file. A later kill would lose the others, because the exec has
             * ended the trace. */
            int (*flush)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "memtrace_flush");
            void *third;
            cudaMalloc(&third, 3000);
            if (flush && flush()) return 6;
            kill(getpid(), SIGKILL);
        }
        cudaFree(second);
        return 3;
    }
    if (!strcmp(how, "exec that fails")) {
        execl("/no/such/program", "no", NULL);
        cudaFree(second);
        return 3;
    }
    if (!strcmp(how, "abort")) abort();
    return 9;
}
