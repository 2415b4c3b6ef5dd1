/* argv[1] threads allocate and free blocks of the caching allocator, argv[2] times each. An OOM follows.
 * Prints the allocator's own totals. */
#include "torch.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { KEPT = 16 };

long c10_reports(void);
static int rounds;

static void *work(void *argument) {
    unsigned seed = (unsigned)(size_t)argument;
    void *kept[KEPT] = {0};
    for (int i = 0; i < rounds; i++) {
        int slot = rand_r(&seed) % KEPT;
        if (kept[slot]) { torch_free(kept[slot]); kept[slot] = NULL; } else { kept[slot] = torch_allocate(512); }
    }
    return NULL;
}

int main(int argc, char **argv) {
    (void)argc;
    pthread_t threads[64];
    int count = atoi(argv[1]);
    rounds = atoi(argv[2]);
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, (void *)(size_t)(i + 1));
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    if (torch_allocate(1 << 20)) return 1;
    long stats[4];
    torch_stats(stats);
    printf("%ld %ld %ld %ld %ld\n", stats[0], stats[1], stats[2], stats[3], c10_reports());
    return 0;
}
