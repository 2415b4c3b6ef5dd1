/* Without caching, torch's allocator asks the runtime for the size that the program requested. */
#include "torch.h"

int main(void) {
    void *block = torch_uncached(1001);
    torch_uncached_free(block);
    return block == 0;
}
