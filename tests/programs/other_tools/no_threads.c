/* A process that may start no thread: the limit of a container (pids.max), or a filter of system calls. */
#include <errno.h>

int pthread_create(void) { return EAGAIN; }
