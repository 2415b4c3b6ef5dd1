/* Stands in for libc10.so: its reports do nothing, as when no profiler runs. */
#include <stddef.h>
#include <stdint.h>

static long reports;

void _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(void *address, int64_t size, size_t allocated, size_t reserved, uint16_t device) {
    (void)address; (void)size; (void)allocated; (void)reserved; (void)device;
    __atomic_add_fetch(&reports, 1, __ATOMIC_RELAXED);
}
void _ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE(int64_t size, size_t allocated, size_t reserved, uint16_t device) {
    (void)size; (void)allocated; (void)reserved; (void)device;
    __atomic_add_fetch(&reports, 1, __ATOMIC_RELAXED);
}
long c10_reports(void) { return reports; }
