/* Another vendor's NVTX tool: it fills some slots of the tables, returns range ids of its own, and logs every
 * call to the file that TOOL_LOG names. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*nvtx_fn)(void);
typedef struct {
    size_t size;
    int (*get_table)(uint32_t module, nvtx_fn ***table, uint32_t *size);
} nvtx_callbacks;

static int depth;
static uint64_t ids = 1000;
static uintptr_t handles = 0x5000;

static void say(const char *call, uint64_t argument) {
    FILE *log = fopen(getenv("TOOL_LOG"), "a");
    fprintf(log, "%s %lu\n", call, argument);
    fclose(log);
}

static int push(const char *text) { say(text, 0); return depth++; }
static int push_wide(const int *text) { say("wide push", text != NULL); return depth++; }
static int push_attributes(const void *a) { say("push", a != NULL); return depth++; }
static int pop(void) { say("pop", 0); return --depth; }
static uint64_t start(const char *text) { say(text, ids + 1); return ++ids; }
static uint64_t start_attributes(const void *a) { say("start", a != NULL); return ++ids; }
static uint64_t start_wide(const int *text) { say("wide start", text != NULL); return ++ids; }
static void end(uint64_t id) { say("end", id); }
static void mark(const char *text) { say(text, 0); }
static int domain_push(uintptr_t domain, const void *a) { say("push in", domain + (a == NULL)); return depth++; }
static int domain_pop(uintptr_t domain) { say("pop in", domain); return --depth; }
static uint64_t domain_start(uintptr_t domain, const void *a) { say("start in", domain + (a == NULL)); return ++ids; }
static void domain_end(uintptr_t domain, uint64_t id) { say("end in", domain); say("end", id); }
static uintptr_t create(const char *name) { say(name, handles + 16); return handles += 16; }
static uintptr_t intern(uintptr_t domain, const char *text) { say(text, domain); return handles += 16; }
static uintptr_t create_wide(const int *name) { say("wide domain", name != NULL); return handles += 16; }
static void category(uintptr_t domain, uint32_t id, const char *name) { say(name, domain + id); }

int InitializeInjectionNvtx2(const void *(*export)(uint32_t)) {
    const nvtx_callbacks *callbacks = export(1);
    nvtx_fn **core, **core2;
    uint32_t size;
    if (!callbacks->get_table(1, &core, &size) || !callbacks->get_table(5, &core2, &size)) return 0;
    *core[2] = (nvtx_fn)mark;
    *core[4] = (nvtx_fn)start_attributes;
    *core[5] = (nvtx_fn)start;
    *core[6] = (nvtx_fn)start_wide;
    *core[7] = (nvtx_fn)end;
    *core[8] = (nvtx_fn)push_attributes;
    *core[9] = (nvtx_fn)push;
    *core[10] = (nvtx_fn)push_wide;
    *core[11] = (nvtx_fn)pop;
    *core2[2] = (nvtx_fn)domain_start;
    *core2[3] = (nvtx_fn)domain_end;
    *core2[4] = (nvtx_fn)domain_push;
    *core2[5] = (nvtx_fn)domain_pop;
    *core2[8] = (nvtx_fn)category;
    *core2[10] = (nvtx_fn)intern;
    *core2[12] = (nvtx_fn)create;
    *core2[13] = (nvtx_fn)create_wide;
    return 1;
}
