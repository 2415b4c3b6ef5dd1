/* Uses no GPU, but is linked against the runtime and initializes it. */
#include "cuda.h"
#include <stdio.h>

int main(void) {
    int device;
    printf("%d %d\n", cudaGetDevice(&device), cudaFree(NULL));
    return 0;
}
