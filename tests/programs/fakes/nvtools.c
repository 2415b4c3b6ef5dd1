/* Stands in for the legacy libnvToolsExt.so.1. It answers as with a tool attached; compiled with -DBARE, as
 * without one. */
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

#ifdef BARE
static uintptr_t handle(void) { return 0; }
#else
static uintptr_t handles = 0x1000;
static uintptr_t handle(void) { return handles += 16; }
#endif

uintptr_t nvtxDomainCreateA(const char *name) { (void)name; return handle(); }
uintptr_t nvtxDomainCreateW(const int *name) { (void)name; return handle(); }
uintptr_t nvtxDomainRegisterStringA(uintptr_t domain, const char *text) { (void)domain; (void)text; return handle(); }
uintptr_t nvtxDomainRegisterStringW(uintptr_t domain, const int *text) { (void)domain; (void)text; return handle(); }
void nvtxDomainNameCategoryA(uintptr_t domain, uint32_t category, const char *name) { (void)domain; (void)category; (void)name; }
void nvtxDomainNameCategoryW(uintptr_t domain, uint32_t category, const int *name) { (void)domain; (void)category; (void)name; }
int nvtxDomainRangePushEx(uintptr_t domain, const void *attributes) { (void)domain; (void)attributes; return depth++; }
int nvtxDomainRangePop(uintptr_t domain) { (void)domain; return --depth; }
uint64_t nvtxDomainRangeStartEx(uintptr_t domain, const void *attributes) { (void)domain; (void)attributes; return ++ids; }
void nvtxDomainRangeEnd(uintptr_t domain, uint64_t id) { (void)domain; (void)id; }
void nvtxDomainMarkEx(uintptr_t domain, const void *attributes) { (void)domain; (void)attributes; }
