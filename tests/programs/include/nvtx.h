/* A small version of header-only NVTX 3, as each shared object contains it: a table of functions, empty until
 * the first call loads the library that NVTX_INJECTION64_PATH names and lets it fill the table. */
#pragma once
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <wchar.h>

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
} nvtx_attributes;

enum { ASCII = 1, WIDE = 2, REGISTERED = 3, CORE = 1, CORE2 = 5, SLOTS = 16, NO_TRACKING = -2 };

typedef void (*nvtx_fn)(void);
typedef struct {
    size_t size;
    int (*get_table)(uint32_t module, nvtx_fn ***table, uint32_t *size);
} nvtx_callbacks;

static void nvtx_not_initialized(void) { abort(); }
static nvtx_fn nvtx_core[SLOTS], nvtx_core2[SLOTS];
static nvtx_fn *nvtx_core_places[SLOTS + 1], *nvtx_core2_places[SLOTS + 1];

static int nvtx_get_table(uint32_t module, nvtx_fn ***table, uint32_t *size) {
    if (module != CORE && module != CORE2) return 0;
    *table = module == CORE ? nvtx_core_places : nvtx_core2_places;
    *size = SLOTS;
    return 1;
}

static const nvtx_callbacks nvtx_exported = {sizeof(nvtx_callbacks), nvtx_get_table};
static const void *nvtx_export(uint32_t id) { return id == 1 ? &nvtx_exported : NULL; }

static void nvtx_initialize(void) {
    static int done;
    if (done++) return;
    for (int i = 1; i < SLOTS; i++) {
        nvtx_core[i] = nvtx_core2[i] = nvtx_not_initialized;
        nvtx_core_places[i] = &nvtx_core[i];
        nvtx_core2_places[i] = &nvtx_core2[i];
    }
    const char *path = getenv("NVTX_INJECTION64_PATH");
    void *library = path ? dlopen(path, RTLD_LAZY) : NULL;
    int (*start)(const void *(*)(uint32_t)) = library ? (int (*)(const void *(*)(uint32_t)))dlsym(library, "InitializeInjectionNvtx2") : NULL;
    if (start) start(nvtx_export);
    for (int i = 1; i < SLOTS; i++) {
        if (nvtx_core[i] == nvtx_not_initialized) nvtx_core[i] = NULL;
        if (nvtx_core2[i] == nvtx_not_initialized) nvtx_core2[i] = NULL;
    }
}

/* Calls `slot` of `table` as `type` with the arguments; gives `otherwise` if no tool has filled the slot. */
#define NVTX(table, slot, type, otherwise, ...) \
    (nvtx_initialize(), (table)[slot] ? ((type)(table)[slot])(__VA_ARGS__) : otherwise)
#define NVTX_VOID(table, slot, type, ...) \
    do { nvtx_initialize(); if ((table)[slot]) ((type)(table)[slot])(__VA_ARGS__); } while (0)

static nvtx_attributes nvtx_message(int type, const void *message, uint32_t category) {
    nvtx_attributes a = {3, sizeof a, category, 0, 0, 0, 0, 0, type, message};
    return a;
}
