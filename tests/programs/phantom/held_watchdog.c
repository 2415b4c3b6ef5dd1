// A library to preload: holds the watchdog of PyTorch's ProcessGroupNCCL, the thread that looks every 100 ms which
// collectives have ended and then lets their tensors go. With it the place of these frees depends on the clock.
//
// The thread waits for a condition with a deadline. Here the deadline is an hour away, so that only the end of the
// process group wakes it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until)
{
    typedef int timedwait(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    static timedwait *real;
    if (!real)
        real = (timedwait *)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    // Set in ProcessGroupNCCL::ncclCommWatchdog, cut to 15 characters by the kernel.
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    struct timespec far = *until;
    if (strncmp(name, "pt_nccl_watchd", 14) == 0)
        far.tv_sec += 3600;
    return real(condition, mutex, &far);
}
