/* Allocates, and begins one step after another until the file of the first argument exists. With `asks` it asks for the
 * detail of two steps in step 5, and ends after step 10; with `still` it begins no step; with `many` it begins 40,000 without a pause, and ends. */
#include "cuda.h"
#include <memtrace.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int count, char **arguments) {
    const char *mode = count > 2 ? arguments[2] : "";
    void *address;
    cudaMalloc(&address, 1 << 20);
    printf("ready\n");
    fflush(stdout);
    for (int step = 0; count > 1 && access(arguments[1], F_OK) != 0; step++) {
        if (strcmp(mode, "still") != 0) memtrace_step(step);
        if (strcmp(mode, "asks") == 0 && step == 5) memtrace_detail(2);
        if (strcmp(mode, "asks") == 0 && step == 10) break;
        if (strcmp(mode, "many") == 0 && step == 40000) break;
        if (strcmp(mode, "many") != 0) usleep(1000);
    }
    return 0;
}
