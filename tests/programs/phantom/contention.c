// Two processes on one card: one asks again and again for more than is free, the other for a little.

#include <stddef.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaFree(void *);
int cudaMalloc(void **, size_t);
int cudaMemGetInfo(size_t *, size_t *);

#define ROUNDS 20000

static int small(int in, int out) {
    void *block;
    char word = 0;
    int failed = cudaMalloc(&block, 1) || cudaFree(block);
    // The other process now sees this process's context, and waits until this one asks, too.
    failed |= write(out, &word, 1) != 1 || read(in, &word, 1) != 1;
    int refused = 0;
    for (int round = 0; round < ROUNDS; round++) {
        if (cudaMalloc(&block, 1)) {
            refused++;
        } else {
            cudaFree(block);
        }
    }
    // This process keeps its context until the other one has asked for the last time.
    failed |= read(in, &word, 1) != 1;
    printf("small: failed %d refused %d\n", failed, refused);
    return 0;
}

static int large(int in, int out) {
    void *block;
    char word = 0;
    size_t free, total;
    int failed = read(in, &word, 1) != 1 || cudaMemGetInfo(&free, &total);
    failed |= write(out, &word, 1) != 1;
    int granted = 0;
    for (int round = 0; round < ROUNDS; round++) {
        granted += !cudaMalloc(&block, free + (64 << 20));
    }
    failed |= write(out, &word, 1) != 1;
    printf("large: failed %d granted %d\n", failed, granted);
    return 0;
}

int main(int argc, char **argv) {
    int to_small[2], to_large[2];
    if (argc == 2) {
        return argv[1][0] == 's' ? small(3, 4) : large(3, 4);
    }
    if (pipe(to_small) || pipe(to_large)) {
        return 1;
    }
    for (int large = 0; large < 2; large++) {
        if (!fork()) {
            int in = dup(large ? to_large[0] : to_small[0]), out = dup(large ? to_small[1] : to_large[1]);
            dup2(in, 103), dup2(out, 104), dup2(103, 3), dup2(104, 4);
            execl(argv[0], argv[0], large ? "large" : "small", NULL);
            _exit(1);
        }
    }
    int first, second;
    wait(&first), wait(&second);
    return first || second;
}
