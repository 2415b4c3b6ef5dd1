/* Stands in for NVML and for the driver functions that the tracer queries with it. FAKE_NVML names the
 * machine: plain, bus (devices are found by PCI bus id only), mig, mps, unknown (memory per process is not
 * reported), none (NVML does not start), slow (a query takes 50 ms), reserve (the driver reserves 1 GiB). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned pid; uint64_t used; unsigned instances[2]; } Process;
enum { BAD = 2, UNSUPPORTED = 3, GIB = 1 << 30 };
static char device;

static int is(const char *what) {
    const char *how = getenv("FAKE_NVML");
    return how && !strcmp(how, what);
}

int nvmlInit_v2(void) { return is("none") ? BAD : 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    const char *known = is("mig") ? "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f" : "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f";
    *out = &device;
    return !is("bus") && !strcmp(uuid, known) ? 0 : BAD;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) {
    *out = &device;
    return is("bus") && !strcmp(id, "0000:01:00.0") ? 0 : BAD;
}
int nvmlDeviceGetMemoryInfo(void *of, uint64_t *out) {
    if (of != &device) return BAD;
    if (is("slow")) usleep(50000);
    /* A MIG instance has a part of the device's memory. */
    uint64_t total = is("mig") ? 10ull * GIB : 80ull * GIB;
    out[0] = total, out[1] = total - 9ull * GIB, out[2] = 9ull * GIB;
    return 0;
}
/* nvmlMemory_v2_t: the version and padding, then total, reserved, free, used. */
int nvmlDeviceGetMemoryInfo_v2(void *of, uint64_t *out) {
    if (of != &device || (uint32_t)out[0] != (40 | 2 << 24)) return BAD;
    if (!is("reserve")) return UNSUPPORTED;
    out[1] = 80ull * GIB, out[2] = 1ull * GIB, out[3] = 71ull * GIB, out[4] = 8ull * GIB;
    return 0;
}
static int list(const Process *from, unsigned n, unsigned *room, Process *out) {
    if (*room < n) return 7;
    memcpy(out, from, n * sizeof *from);
    *room = n;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *of, unsigned *room, Process *out) {
    if (of != &device) return BAD;
    uint64_t none = is("unknown") ? UINT64_MAX : 0;
    Process own = {getpid(), none | 3ull * GIB, {0, 0}}, other = {1, none | 5ull * GIB, {0, 0}};
    Process both[2] = {other, own};
    /* The MPS server stands for its clients, which have a list of their own. A client may be in both lists. */
    return list(both, is("mps") ? 1 : 2, room, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *of, unsigned *room, Process *out) {
    if (!is("mps")) return UNSUPPORTED;
    if (of != &device) return BAD;
    Process all[3] = {{1, 5ull * GIB, {0, 0}}, {getpid(), 2ull * GIB, {0, 0}}, {2, 1ull * GIB, {0, 0}}};
    return list(all, 3, room, out);
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int ordinal) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)i;
    return ordinal;
}
int cuDeviceGetPCIBusId(char *out, int room, int ordinal) {
    strncpy(out, "0000:01:00.0", (size_t)room);
    return ordinal;
}
int cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return ordinal;
}
/* The tracer must release each context that it retains, and pop each that it pushes. */
static int retained, pushed;
int cuDevicePrimaryCtxRetain(void **out, int ordinal) { *out = &device, retained++; return ordinal; }
int cuDevicePrimaryCtxRelease_v2(int ordinal) { retained--; return ordinal; }
int cuCtxPushCurrent_v2(void *context) { pushed++; return context != &device; }
int cuCtxPopCurrent_v2(void **out) { *out = &device, pushed--; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (retained != 1 || pushed != 1) return BAD;
    *free = 70ull * GIB, *total = 80ull * GIB;
    return 0;
}
/* Its presence means that process ids are the same inside and outside: there is no PID namespace. */
size_t memtrace_phantom_describe(char *out, size_t room) { (void)out, (void)room; return 0; }
