/* memtrace.h: marks, ranges and steps of a program, for the memtrace that traces it.
 *
 * The functions are in libmemtrace.so, which is preloaded and never linked:
 *
 *     LD_PRELOAD=libmemtrace.so ./program
 *
 * Without it each call below does nothing and costs a load and a branch. Compile position-independent
 * code, which is gcc's default on most systems: in a fixed-address executable the linker may resolve
 * the functions to nothing.
 *
 * Names mean what they mean in NVTX ranges: `phase:eval`, `module:GPT.h.0`, `step:12`, or bare; see
 * docs/ranges.md. From Python, use the package memtrace (python/memtrace).
 */
#ifndef MEMTRACE_H
#define MEMTRACE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Each function of the library is a weak symbol behind an inline function. */
#define MEMTRACE_LIBRARY(result, name, parameters) \
    extern result memtrace_library_##name parameters __asm__("memtrace_" #name) __attribute__((weak)); \
    static inline __attribute__((unused)) result memtrace_##name parameters __asm__("memtrace_inline_" #name); \
    static inline result memtrace_##name parameters

/* Returns 1 when the program is traced, 0 otherwise. */
MEMTRACE_LIBRARY(int, is_traced, (void)) {
    return memtrace_library_is_traced ? memtrace_library_is_traced() : 0;
}

/* Stops writing rows of ops and ranges, on all threads. Memory is still recorded, with its owner: a trace
 * that misses a free is wrong from then on. */
MEMTRACE_LIBRARY(void, pause, (void)) {
    if (memtrace_library_pause) memtrace_library_pause();
}

/* Writes rows of ops and ranges again. Pauses do not nest. */
MEMTRACE_LIBRARY(void, resume, (void)) {
    if (memtrace_library_resume) memtrace_library_resume();
}

/* Returns 1 when rows of ops and ranges are paused, 0 otherwise. */
MEMTRACE_LIBRARY(int, is_paused, (void)) {
    return memtrace_library_is_paused ? memtrace_library_is_paused() : 0;
}

/* Adds a mark to the trace, and begins the trace when nothing has begun it yet. */
MEMTRACE_LIBRARY(void, mark, (const char *name)) {
    if (memtrace_library_mark) memtrace_library_mark(name);
}

/* Opens a range on this thread. Returns the number of these ranges that were open on it before. */
MEMTRACE_LIBRARY(int, range_push, (const char *name)) {
    return memtrace_library_range_push ? memtrace_library_range_push(name) : 0;
}

/* Closes the range that this thread opened last. Returns the number that stay open, -1 when none was open. */
MEMTRACE_LIBRARY(int, range_pop, (void)) {
    return memtrace_library_range_pop ? memtrace_library_range_pop() : -1;
}

/* Opens a range that any thread may close. Returns its number, 0 when the program is not traced. */
MEMTRACE_LIBRARY(uint64_t, range_start, (const char *name)) {
    return memtrace_library_range_start ? memtrace_library_range_start(name) : 0;
}

/* Closes the range of this number. */
MEMTRACE_LIBRARY(void, range_end, (uint64_t range)) {
    if (memtrace_library_range_end) memtrace_library_range_end(range);
}

/* Begins the training step `step`. From the first call on memtrace no longer counts steps by itself. */
MEMTRACE_LIBRARY(void, step, (int64_t step)) {
    if (memtrace_library_step) memtrace_library_step(step);
}

/* Records the next `steps` steps in full, where MEMTRACE_DETAIL leaves them out. */
MEMTRACE_LIBRARY(void, detail, (int steps)) {
    if (memtrace_library_detail) memtrace_library_detail(steps);
}

/* Waits until everything recorded so far is in the file, 10 seconds at most. Returns 0 when it is, or when
 * there is no trace; -1 otherwise, and when a thread has been inside one cudaFree for a second: the file
 * then lacks what was recorded since that call began. */
MEMTRACE_LIBRARY(int, flush, (void)) {
    return memtrace_library_flush ? memtrace_library_flush() : 0;
}

#undef MEMTRACE_LIBRARY

#ifdef __cplusplus
}
#endif

#endif
