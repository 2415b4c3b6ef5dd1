/* Uses no GPU; it is linked against the runtime all the same, and initializes it. */
#include "cuda.h"
#include <stdio.h>

int main(void) {
    int device;
    printf("%d %d\n", cudaGetDevice(&device), cudaFree(NULL));
    return 0;
}
