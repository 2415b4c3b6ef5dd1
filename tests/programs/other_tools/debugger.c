/* A debugged program and its debugger: the parent stops the child and makes it call functions.
 *
 * The return address of such a call lies in no library. argv[1] is the driver. Prints one line for each call,
 * then how the child ended. It changes general registers only: gdb 13 also writes the extended state, which
 * fails on processors whose state is larger than it knows (AMX). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

int library_works(void);
int cudaMalloc(void **out, size_t size);
int cudaFree(void *address);

/* Memory that both processes share: the arguments of the calls, then a page with one breakpoint. */
static struct {
    char driver[4096], name[64], other[64];
} *texts;
static unsigned char *nowhere;

static int child(void) {
    void *address;
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    if (cudaMalloc(&address, 1000)) return 1;
    raise(SIGTRAP);
    return library_works() || cudaFree(address);
}

/* Makes the stopped child call `function`; returns 0 if it did not reach the breakpoint afterwards. */
static unsigned long long called(pid_t pid, void *function, unsigned long long first, unsigned long long second) {
    struct user_regs_struct before, regs;
    int status;
    if (ptrace(PTRACE_GETREGS, pid, NULL, &before)) return 0;
    regs = before;
    regs.rip = (unsigned long long)function;
    regs.rdi = first;
    regs.rsi = second;
    regs.rax = 0;
    regs.orig_rax = -1; /* keeps the kernel from restarting a system call */
    regs.rsp = ((before.rsp - 1024) & ~15ull) - 8;
    if (ptrace(PTRACE_POKEDATA, pid, (void *)regs.rsp, nowhere)) return 0;
    if (ptrace(PTRACE_SETREGS, pid, NULL, &regs) || ptrace(PTRACE_CONT, pid, NULL, NULL)) return 0;
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) return 0;
    ptrace(PTRACE_GETREGS, pid, NULL, &regs);
    if (regs.rip != (unsigned long long)nowhere + 1) return 0;
    ptrace(PTRACE_SETREGS, pid, NULL, &before);
    return regs.rax;
}

int main(int argc, char **argv) {
    if (argc < 2 || strlen(argv[1]) >= sizeof texts->driver) return 2;
    const int shared = MAP_SHARED | MAP_ANONYMOUS;
    texts = mmap(NULL, sizeof *texts, PROT_READ | PROT_WRITE, shared, -1, 0);
    nowhere = mmap(NULL, 4096, PROT_READ | PROT_WRITE, shared, -1, 0);
    if (texts == MAP_FAILED || nowhere == MAP_FAILED) return 2;
    strcpy(texts->driver, argv[1]);
    strcpy(texts->name, "cuMemAlloc_v2");
    strcpy(texts->other, "malloc");
    nowhere[0] = 0xcc; /* int3 */
    mprotect(nowhere, 4096, PROT_READ | PROT_EXEC);

    int status;
    pid_t pid = fork();
    if (pid == 0) _exit(child());
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) return 2;
    unsigned long long driver = called(pid, dlopen, (unsigned long long)texts->driver, RTLD_NOW);
    printf("dlopen %d\n", driver != 0);
    printf("dlsym %d\n", called(pid, dlsym, driver, (unsigned long long)texts->name) != 0);
    printf("dlsym default %d\n", called(pid, dlsym, 0, (unsigned long long)texts->other) != 0);
    ptrace(PTRACE_CONT, pid, NULL, NULL);
    waitpid(pid, &status, 0);
    printf("exited %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    return 0;
}
