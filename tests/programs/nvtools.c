/* A stand-in for the legacy libnvToolsExt.so.1: answers as it does with a tool behind it. */
#include <stdint.h>

static int depth;
static uint64_t ids = 70;

int nvtxRangePushA(const char *text) { (void)text; return depth++; }
int nvtxRangePushW(const int *text) { (void)text; return depth++; }
int nvtxRangePushEx(const void *attributes) { (void)attributes; return depth++; }
int nvtxRangePop(void) { return --depth; }
uint64_t nvtxRangeStartA(const char *text) { (void)text; return ++ids; }
uint64_t nvtxRangeStartW(const int *text) { (void)text; return ++ids; }
uint64_t nvtxRangeStartEx(const void *attributes) { (void)attributes; return ++ids; }
void nvtxRangeEnd(uint64_t id) { (void)id; }
void nvtxMarkA(const char *text) { (void)text; }
void nvtxMarkW(const int *text) { (void)text; }
void nvtxMarkEx(const void *attributes) { (void)attributes; }
