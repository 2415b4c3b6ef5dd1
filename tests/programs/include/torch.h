/* Stands in for torch's caching allocator: cuts blocks from segments and reports them as c10 does. */
#pragma once
#include <stddef.h>

void *torch_allocate(size_t size);
void torch_free(void *address);
/* Allocation and free without caching. */
void *torch_uncached(size_t size);
void torch_uncached_free(void *address);
/* The figures of torch.cuda.memory_stats(): allocated and reserved bytes, and the numbers of allocations and
 * frees. */
void torch_stats(long out[4]);
