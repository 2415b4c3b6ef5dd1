/* With its caching off, torch's allocator asks the runtime for what the program asked for. */
#include "torch.h"

int main(void) {
    void *block = torch_uncached(1001);
    torch_uncached_free(block);
    return block == 0;
}
