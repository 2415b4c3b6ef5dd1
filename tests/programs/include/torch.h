/* A stand-in for torch's caching allocator: blocks out of segments, reported as c10 reports them. */
#pragma once
#include <stddef.h>

void *torch_allocate(size_t size);
void torch_free(void *address);
/* With caching off. */
void *torch_uncached(size_t size);
void torch_uncached_free(void *address);
/* As torch.cuda.memory_stats(): allocated, reserved, and the numbers of blocks given and taken back. */
void torch_stats(long out[4]);
