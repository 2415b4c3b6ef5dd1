/* As a library (-DWAITS): its constructor waits for a thread that calls back into the program. The loader holds its lock
 * meanwhile. As a program: loads argv[1], calls the functions of argv[3] and on there, and again on the thread that the
 * constructor of argv[2] waits for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#ifdef WAITS
static void *run(void *unused) {
    ((void (*)(void))unused)();
    return NULL;
}

__attribute__((constructor)) static void waits(void) {
    pthread_t thread;
    if (!pthread_create(&thread, NULL, run, dlsym(RTLD_DEFAULT, "on_thread"))) pthread_join(thread, NULL);
}
#else
static int (*functions[8])(void);
static int count;

void on_thread(void) {
    for (int at = 0; at < count; at++) printf("%d\n", functions[at]());
}

int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    for (int at = 3; at < argc && at < 11; at++) functions[count++] = (int (*)(void))dlsym(library, argv[at]);
    on_thread();
    if (!library || !dlopen(argv[2], RTLD_NOW)) printf("%s\n", dlerror());
    on_thread();
    return 0;
}
#endif
