/* Opens ranges and sets marks of every kind. Each allocation's size shows where it was made. Prints NVTX's
 * return values. */
#include "cuda.h"
#include "nvtx.h"
#include <pthread.h>
#include <stdio.h>

typedef int (*push_text)(const void *);
typedef int (*push_attributes)(const nvtx_attributes *);
typedef int (*pop_fn)(void);
typedef uint64_t (*start_text)(const void *);
typedef uint64_t (*start_attributes)(const nvtx_attributes *);
typedef void (*end_fn)(uint64_t);
typedef void (*mark_text)(const void *);
typedef void (*mark_attributes)(const nvtx_attributes *);
typedef int (*domain_push)(void *, const nvtx_attributes *);
typedef int (*domain_pop)(void *);
typedef uint64_t (*domain_start)(void *, const nvtx_attributes *);
typedef void (*domain_end)(void *, uint64_t);
typedef void (*domain_mark)(void *, const nvtx_attributes *);
typedef void *(*domain_register)(void *, const void *);
typedef void *(*domain_create)(const void *);
typedef void (*domain_category)(void *, uint32_t, const char *);

static void allocate(size_t size) {
    void *address;
    cudaMalloc(&address, size);
}

static uint64_t crossing;
static void *ends_it(void *unused) {
    NVTX_VOID(nvtx_core, 7, end_fn, crossing);
    allocate(110);
    return unused;
}

int main(void) {
    printf("%d\n", NVTX(nvtx_core, 9, push_text, NO_TRACKING, "forward"));
    allocate(101);
    printf("%d\n", NVTX(nvtx_core, 10, push_text, NO_TRACKING, L"enc\u00f6der"));
    allocate(102);
    nvtx_attributes layer = nvtx_message(ASCII, "layer.0", 0);
    printf("%d\n", NVTX(nvtx_core, 8, push_attributes, NO_TRACKING, &layer));
    allocate(103);
    printf("%d\n", NVTX(nvtx_core, 11, pop_fn, NO_TRACKING));
    allocate(104);
    printf("%d\n", NVTX(nvtx_core, 11, pop_fn, NO_TRACKING));
    printf("%d\n", NVTX(nvtx_core, 11, pop_fn, NO_TRACKING));
    allocate(105);

    uint64_t started = NVTX(nvtx_core, 5, start_text, 0, "optimizer");
    uint64_t wide = NVTX(nvtx_core, 6, start_text, 0, L"step 12");
    nvtx_attributes module = nvtx_message(WIDE, L"module:GPT.h.3", 0);
    uint64_t attributes = NVTX(nvtx_core, 4, start_attributes, 0, &module);
    printf("%d %d %d\n", started != 0, wide != 0 && wide != started, attributes != 0 && attributes != wide);
    allocate(106);
    NVTX_VOID(nvtx_core, 7, end_fn, started);
    allocate(107);
    NVTX_VOID(nvtx_core, 7, end_fn, attributes);
    NVTX_VOID(nvtx_core, 7, end_fn, wide);
    allocate(108);
    crossing = NVTX(nvtx_core, 5, start_text, 0, "backward");
    allocate(109);
    pthread_t thread;
    pthread_create(&thread, NULL, ends_it, NULL);
    pthread_join(thread, NULL);
    allocate(111);
    NVTX_VOID(nvtx_core, 2, mark_text, "a mark, with \"quotes\"");
    NVTX_VOID(nvtx_core, 3, mark_text, L"wide \u20ac");
    nvtx_attributes mark = nvtx_message(ASCII, "by attributes", 0);
    NVTX_VOID(nvtx_core, 1, mark_attributes, &mark);

    void *ours = NVTX(nvtx_core2, 12, domain_create, NULL, "memtrace");
    void *other = NVTX(nvtx_core2, 13, domain_create, NULL, L"other");
    printf("%d %d\n", ours != NULL, other != NULL && other != ours);
    NVTX_VOID(nvtx_core2, 8, domain_category, ours, 1, "phase");
    NVTX_VOID(nvtx_core2, 8, domain_category, ours, 2, "module");
    NVTX_VOID(nvtx_core2, 8, domain_category, ours, 3, "op");
    NVTX_VOID(nvtx_core2, 8, domain_category, ours, 4, "step");
    NVTX_VOID(nvtx_core2, 8, domain_category, other, 1, "phase");
    void *registered = NVTX(nvtx_core2, 10, domain_register, NULL, ours, "warm up");
    void *registered_wide = NVTX(nvtx_core2, 11, domain_register, NULL, ours, L"fused");
    nvtx_attributes phase = nvtx_message(REGISTERED, registered, 1);
    nvtx_attributes path = nvtx_message(ASCII, "Net.fc", 2);
    nvtx_attributes op = nvtx_message(REGISTERED, registered_wide, 3);
    nvtx_attributes step = nvtx_message(ASCII, "13", 4);
    nvtx_attributes level = nvtx_message(ASCII, "not a phase", 1);
    printf("%d\n", NVTX(nvtx_core2, 4, domain_push, NO_TRACKING, ours, &phase));
    printf("%d\n", NVTX(nvtx_core2, 4, domain_push, NO_TRACKING, ours, &path));
    printf("%d\n", NVTX(nvtx_core2, 4, domain_push, NO_TRACKING, other, &level));
    printf("%d\n", NVTX(nvtx_core2, 4, domain_push, NO_TRACKING, ours, &op));
    uint64_t in_domain = NVTX(nvtx_core2, 2, domain_start, 0, ours, &step);
    allocate(112);
    NVTX_VOID(nvtx_core2, 3, domain_end, ours, in_domain);
    /* A pop in another domain closes that domain's range, even below ranges of this one. */
    printf("%d\n", NVTX(nvtx_core2, 5, domain_pop, NO_TRACKING, other));
    allocate(113);
    printf("%d\n", NVTX(nvtx_core2, 5, domain_pop, NO_TRACKING, ours));
    printf("%d\n", NVTX(nvtx_core2, 5, domain_pop, NO_TRACKING, ours));
    printf("%d\n", NVTX(nvtx_core2, 5, domain_pop, NO_TRACKING, ours));
    NVTX_VOID(nvtx_core2, 1, domain_mark, ours, &mark);
    allocate(114);
    /* The null domain is the default one: it shares the stack of plain push and pop. */
    printf("%d\n", NVTX(nvtx_core, 9, push_text, NO_TRACKING, "shared"));
    printf("%d\n", NVTX(nvtx_core2, 5, domain_pop, NO_TRACKING, NULL));
    allocate(115);
    return 0;
}
