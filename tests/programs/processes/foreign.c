// Prints LD_PRELOAD. With an argument: starts that program, which lies in its folder, in each way.

#define _GNU_SOURCE
#include <fcntl.h>
#include <libgen.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

int main(int argc, char **argv) {
    if (argc < 2) {
        const char *list = getenv("LD_PRELOAD");
        puts(list ? list : "unset");
        return 0;
    }
    char *path = argv[1], folder[4096], *arguments[] = {path, NULL};
    char *name = strrchr(path, '/') + 1;
    strcpy(folder, path);
    setenv("PATH", dirname(folder), 1);
    pid_t child;
    if (!(child = fork())) {
        execve(path, arguments, environ);
        _exit(97);
    }
    waitpid(child, NULL, 0);
    if (!(child = vfork())) {
        execve(path, arguments, environ);
        _exit(97);
    }
    waitpid(child, NULL, 0);
    if (!(child = fork())) {
        fexecve(open(path, O_RDONLY), arguments, environ);
        _exit(97);
    }
    waitpid(child, NULL, 0);
    if (!(child = fork())) {
        execveat(open(".", O_PATH), path, arguments, environ, 0);
        _exit(97);
    }
    waitpid(child, NULL, 0);
    if (!(child = fork())) {
        execveat(open(path, O_RDONLY), "", arguments, environ, AT_EMPTY_PATH);
        _exit(97);
    }
    waitpid(child, NULL, 0);
    if (posix_spawn(&child, path, NULL, NULL, arguments, environ)) return 98;
    waitpid(child, NULL, 0);
    if (posix_spawnp(&child, name, NULL, NULL, arguments, environ)) return 99;
    waitpid(child, NULL, 0);
    execvp(name, arguments);
    return 97;
}
