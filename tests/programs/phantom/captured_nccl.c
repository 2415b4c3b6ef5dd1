// Operations of NCCL that a stream captures: they run at each launch of the graph, and not before.

#include <stddef.h>
#include <stdio.h>

typedef struct {
    char bytes[128];
} Id;

int cudaGraphInstantiate(void **, void *, unsigned long long);
int cudaGraphLaunch(void *, void *);
int cudaMalloc(void **, size_t);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemset(void *, int, size_t);
int cudaStreamBeginCapture(void *, int);
int cudaStreamCreateWithFlags(void **, unsigned);
int cudaStreamEndCapture(void *, void **);
int cudaStreamSynchronize(void *);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);
int ncclGetUniqueId(Id *);
int ncclGroupEnd(void);
int ncclGroupStart(void);

enum { COUNT = 8, UINT8 = 1, SUM = 0 };

static void *comm, *stream, *from, *to;
static int failed;

static int result(void) {
    char bytes[COUNT] = {-1};
    failed += cudaMemcpy(bytes, to, COUNT, 2) != 0;
    return bytes[0];
}

static void all_reduce(void) { failed += ncclAllReduce(from, to, COUNT, UINT8, SUM, comm, stream) != 0; }

static void *captured(int is_group) {
    void *graph = NULL, *exec = NULL;
    failed += cudaStreamBeginCapture(stream, 0) != 0;
    if (is_group) {
        failed += ncclGroupStart() != 0;
        failed += ncclBroadcast(from, to, COUNT, UINT8, 0, comm, stream) != 0;
        failed += ncclGroupEnd() != 0;
    } else {
        all_reduce();
    }
    failed += cudaStreamEndCapture(stream, &graph) != 0;
    failed += cudaGraphInstantiate(&exec, graph, 0) != 0;
    return exec;
}

static int launched(void *exec, int value) {
    cudaMemset(from, value, COUNT);
    failed += cudaGraphLaunch(exec, stream) != 0;
    failed += cudaStreamSynchronize(stream) != 0;
    return result();
}

int main(void) {
    Id id;
    cudaStreamCreateWithFlags(&stream, 1);
    cudaMalloc(&from, COUNT), cudaMalloc(&to, COUNT);
    failed += ncclGetUniqueId(&id) != 0 || ncclCommInitRank(&comm, 1, id, 0) != 0;

    cudaMemset(from, 5, COUNT), cudaMemset(to, 0, COUNT);
    all_reduce();
    printf("eager %d\n", result());

    cudaMemset(to, 0, COUNT);
    void *exec = captured(0);
    printf("captured %d", result());
    printf(" then %d\n", launched(exec, 5));
    printf("launched %d", launched(exec, 7));
    printf(" then %d\n", launched(exec, 9));
    exec = captured(1);
    printf("grouped %d", result());
    printf(" then %d\n", launched(exec, 3));
    printf("failed %d\n", failed);
    return 0;
}
