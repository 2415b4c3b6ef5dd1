/* memtrace.h: what a program may tell memtrace of itself.
 *
 * The functions live in libmemtrace.so, which is preloaded, never linked:
 *
 *     LD_PRELOAD=libmemtrace.so ./program
 *
 * Without it every call below does nothing, and costs a load and a branch. Compile position
 * independent code (gcc's default on most systems): in a fixed-address executable the linker may
 * decide on its own that the functions are not there.
 *
 * Names mean what they mean in NVTX ranges: `phase:eval`, `module:GPT.h.0`, `step:12`, or bare; see
 * "What a range name means" in the README. From Python, use python/memtrace.py or ctypes.
 */
#ifndef MEMTRACE_H
#define MEMTRACE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Each library function is a weak symbol behind an inline function of the same purpose. */
#define MEMTRACE_LIBRARY(result, name, parameters) \
    extern result memtrace_library_##name parameters __asm__("memtrace_" #name) __attribute__((weak)); \
    static inline __attribute__((unused)) result memtrace_##name parameters __asm__("memtrace_inline_" #name); \
    static inline result memtrace_##name parameters

/* Is the program traced? */
MEMTRACE_LIBRARY(int, is_traced, (void)) {
    return memtrace_library_is_traced ? memtrace_library_is_traced() : 0;
}

/* Leaves out the rows of ops and ranges from now on, on all threads. Memory is recorded all the same,
 * with its owner: a trace that lost a free would lie for ever. */
MEMTRACE_LIBRARY(void, pause, (void)) {
    if (memtrace_library_pause) memtrace_library_pause();
}

/* Ends what memtrace_pause began. Pauses do not nest. */
MEMTRACE_LIBRARY(void, resume, (void)) {
    if (memtrace_library_resume) memtrace_library_resume();
}

MEMTRACE_LIBRARY(int, is_paused, (void)) {
    return memtrace_library_is_paused ? memtrace_library_is_paused() : 0;
}

/* A mark. It begins the trace when nothing has yet. */
MEMTRACE_LIBRARY(void, mark, (const char *name)) {
    if (memtrace_library_mark) memtrace_library_mark(name);
}

/* Opens a range on this thread; gives how many of these were open on it before. */
MEMTRACE_LIBRARY(int, range_push, (const char *name)) {
    return memtrace_library_range_push ? memtrace_library_range_push(name) : 0;
}

/* Closes the range that this thread opened last; gives how many stay open, -1 when none was. */
MEMTRACE_LIBRARY(int, range_pop, (void)) {
    return memtrace_library_range_pop ? memtrace_library_range_pop() : -1;
}

/* Opens a range that any thread may close; gives its number, 0 when the program is not traced. */
MEMTRACE_LIBRARY(uint64_t, range_start, (const char *name)) {
    return memtrace_library_range_start ? memtrace_library_range_start(name) : 0;
}

MEMTRACE_LIBRARY(void, range_end, (uint64_t range)) {
    if (memtrace_library_range_end) memtrace_library_range_end(range);
}

/* The training step `step` begins; from now on nobody else counts steps. */
MEMTRACE_LIBRARY(void, step, (int64_t step)) {
    if (memtrace_library_step) memtrace_library_step(step);
}

/* Waits until everything recorded so far is in the file, 10 s at most; 0 when it is, or when there is
 * no trace. -1 when a thread has been in the middle of one cudaFree for a second: what was recorded since that call
 * began is not in the file yet. */
MEMTRACE_LIBRARY(int, flush, (void)) {
    return memtrace_library_flush ? memtrace_library_flush() : 0;
}

#undef MEMTRACE_LIBRARY

#ifdef __cplusplus
}
#endif

#endif
