/* A library that is linked against NVML, as fbgemm_gpu is. */
int nvmlInit_v2(void), nvmlDeviceGetCount_v2(unsigned *);

int count_devices(void) {
    unsigned count = 99;
    return nvmlInit_v2() || nvmlDeviceGetCount_v2(&count) ? -1 : (int)count;
}
