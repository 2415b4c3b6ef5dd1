/* Error correction of the card's memory (ECC), as CUDA and NVML report it on the phantom device. Prints one
 * line; tests/phantom/calls.rs has the expected ones. */
#include <stdio.h>

int cuInit(unsigned), cuDeviceGetAttribute(int *, int, int);
int nvmlInit_v2(void), nvmlDeviceGetHandleByIndex_v2(unsigned, void **);
int nvmlDeviceGetEccMode(void *, int *, int *), nvmlDeviceGetTotalEccErrors(void *, int, int, unsigned long long *);

int main(void) {
    int enabled = -1, current = -1, pending = -1;
    unsigned long long errors = 7;
    void *card = NULL;
    /* 32 is CU_DEVICE_ATTRIBUTE_ECC_ENABLED. */
    if (cuInit(0) || cuDeviceGetAttribute(&enabled, 32, 0) || nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &card))
        return 1;
    int mode = nvmlDeviceGetEccMode(card, &current, &pending);
    int counted = nvmlDeviceGetTotalEccErrors(card, 1, 0, &errors);
    printf("cuda %d mode %d: %d %d errors %d: %llu\n", enabled, mode, current, pending, counted, errors);
    return 0;
}
