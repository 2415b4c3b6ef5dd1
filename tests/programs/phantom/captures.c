/* What CUDA forbids while a stream is captured, on the phantom device. Each line has the status of the calls inside
 * a capture, then the status of the end of the capture; tests/phantom/calls.rs has the expected ones. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GLOBAL, THREAD_LOCAL, RELAXED };
int cudaStreamCreateWithFlags(void **, unsigned), cudaStreamBeginCapture(void *, int), cudaStreamEndCapture(void *, void **);
int cudaStreamBeginCaptureToGraph(void *, void *, const void *, const void *, size_t, int), cudaGraphCreate(void **, unsigned);
int cudaStreamIsCapturing(void *, int *), cudaStreamSynchronize(void *), cudaStreamQuery(void *), cudaDeviceSynchronize(void);
int cudaStreamWaitEvent(void *, void *, unsigned), cudaThreadExchangeStreamCaptureMode(int *), cudaGetLastError(void);
int cudaEventCreate(void **), cudaEventRecord(void *, void *), cudaEventQuery(void *), cudaEventSynchronize(void *);
int cudaEventRecordWithFlags(void *, void *, unsigned), cudaEventElapsedTime(float *, void *, void *);
int cudaMalloc(void **, size_t), cudaFree(void *), cudaHostAlloc(void **, size_t, unsigned), cudaMallocAsync(void **, size_t, void *);
int cudaMemcpy(void *, const void *, size_t, int), cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemsetAsync(void *, int, size_t, void *), cudaMemset(void *, int, size_t), cudaLaunchHostFunc(void *, void (*)(void *), void *);
int cudaStreamAddCallback(void *, void (*)(void *, int, void *), void *, unsigned), cudaStreamAttachMemAsync(void *, void *, size_t, unsigned);
int cudaGraphInstantiate(void **, void *, unsigned long long), cudaGraphLaunch(void *, void *), cudaGraphExecDestroy(void *);
int cuStreamSynchronize(void *), cuMemAlloc_v2(void **, size_t), cuCtxSynchronize(void);

static void *stream, *other, *blocking, *memory, *before, *inside;
static char *host;
static int called;

static void begin(const char *name, void *on, int mode) {
    printf("%s:", name);
    int status = cudaStreamBeginCapture(on, mode);
    if (status) printf(" begin %d", status);
}

static void end(void *on) {
    void *graph = &graph;
    int status = cudaStreamIsCapturing(on, &(int){0}), state = 9, ended;
    if (status == 0) cudaStreamIsCapturing(on, &state);
    ended = cudaStreamEndCapture(on, &graph);
    printf(" | state %d end %d%s", state, ended, graph ? "" : " null");
    cudaStreamIsCapturing(on, &state);
    printf(" then %d\n", state);
    cudaGetLastError();
}

#define TELL(call) printf(" %d", call)
static void host_function(void *argument) { (void)argument; called++; }
static void callback(void *on, int status, void *argument) { (void)on, (void)status, (void)argument; called += 100; }

static void *allocates(void *mode) {
    void *mine = NULL;
    if (mode) cudaThreadExchangeStreamCaptureMode(mode);
    TELL(cudaMalloc(&mine, 1000));
    TELL(cudaEventQuery(before));
    return NULL;
}

static void *ends(void *on) {
    TELL(cudaStreamEndCapture(on, &(void *){0}));
    return NULL;
}

static void in_thread(void *(*work)(void *), void *argument) {
    pthread_t thread;
    pthread_create(&thread, NULL, work, argument);
    pthread_join(thread, NULL);
}

int main(void) {
    void *mine = NULL, *graph, *exec;
    int mode;
    float time;
    cudaStreamCreateWithFlags(&stream, 1), cudaStreamCreateWithFlags(&other, 1), cudaStreamCreateWithFlags(&blocking, 0);
    cudaEventCreate(&before), cudaEventCreate(&inside);
    cudaMalloc(&memory, 64);
    cudaHostAlloc((void **)&host, 64, 0);
    cudaMemset(memory, 1, 64);
    cudaEventRecord(before, other);

    begin("synchronize", stream, RELAXED), TELL(cudaStreamSynchronize(stream)), TELL(cudaGetLastError());
    TELL(cudaMemsetAsync(memory, 0, 8, stream)), end(stream);
    begin("driver synchronize", stream, RELAXED), TELL(cuStreamSynchronize(stream)), end(stream);
    begin("query", stream, RELAXED), TELL(cudaStreamQuery(stream)), end(stream);
    begin("others", stream, GLOBAL), TELL(cudaStreamQuery(other)), TELL(cudaStreamSynchronize(NULL)), end(stream);
    begin("device", stream, RELAXED), TELL(cudaDeviceSynchronize()), end(stream);
    begin("context", stream, RELAXED), TELL(cuCtxSynchronize()), end(stream);
    begin("callback", stream, RELAXED), TELL(cudaStreamAddCallback(stream, callback, NULL, 0)), end(stream);
    begin("attach", stream, RELAXED), TELL(cudaStreamAttachMemAsync(stream, memory, 0, 4)), end(stream);

    begin("malloc", stream, GLOBAL), TELL(cudaMalloc(&mine, 64)), end(stream);
    begin("malloc local", stream, THREAD_LOCAL), TELL(cudaMalloc(&mine, 64)), end(stream);
    begin("malloc relaxed", stream, RELAXED), TELL(cudaMalloc(&mine, 64)), TELL(cudaFree(mine)), end(stream);
    begin("driver malloc", stream, GLOBAL), TELL(cuMemAlloc_v2(&mine, 64)), end(stream);
    begin("free", stream, GLOBAL), TELL(cudaFree(memory)), end(stream);
    begin("pinned", stream, GLOBAL), TELL(cudaHostAlloc(&mine, 64, 0)), end(stream);
    mode = RELAXED;
    begin("exchanged", stream, GLOBAL), TELL(cudaThreadExchangeStreamCaptureMode(&mode)), TELL(mode);
    TELL(cudaMalloc(&mine, 64)), TELL(cudaThreadExchangeStreamCaptureMode(&mode)), TELL(mode), end(stream);
    mode = 7;
    printf("mode 7: %d, capture %d\n", cudaThreadExchangeStreamCaptureMode(&mode), cudaStreamBeginCapture(stream, 7));
    begin("thread", stream, GLOBAL), in_thread(allocates, NULL), end(stream);
    begin("thread local", stream, THREAD_LOCAL), in_thread(allocates, NULL), end(stream);
    mode = THREAD_LOCAL;
    begin("local thread", stream, GLOBAL), in_thread(allocates, &mode), end(stream);

    begin("copy", stream, GLOBAL), TELL(cudaMemcpy(host, memory, 8, 2)), end(stream);
    begin("copy relaxed", stream, RELAXED), TELL(cudaMemcpy(host, memory, 8, 2)), end(stream);
    begin("legacy", blocking, RELAXED), TELL(cudaMemsetAsync(memory, 1, 8, NULL)), TELL(cudaGetLastError()), end(blocking);
    begin("legacy copy", blocking, RELAXED), TELL(cudaMemcpy(host, memory, 8, 2)), end(blocking);
    begin("legacy query", blocking, RELAXED), TELL(cudaStreamQuery(NULL)), end(blocking);
    begin("legacy state", blocking, RELAXED), TELL(cudaStreamIsCapturing(NULL, &mode)), end(blocking);
    begin("on legacy", NULL, RELAXED), end(NULL);
    begin("per thread", (void *)2, RELAXED), TELL(cudaMemsetAsync(memory, 1, 8, (void *)2)), end((void *)2);

    begin("event", stream, GLOBAL), TELL(cudaEventRecord(inside, stream)), TELL(cudaEventQuery(inside)), end(stream);
    printf("event later: %d %d %d\n", cudaEventQuery(inside), cudaEventSynchronize(inside), cudaEventElapsedTime(&time, inside, inside));
    cudaGetLastError();
    begin("event before", stream, GLOBAL), TELL(cudaEventQuery(before)), end(stream);
    begin("event relaxed", stream, RELAXED), TELL(cudaEventSynchronize(before)), end(stream);
    begin("isolation", stream, RELAXED), TELL(cudaStreamWaitEvent(stream, before, 0)), end(stream);
    begin("external wait", stream, RELAXED), TELL(cudaStreamWaitEvent(stream, before, 1)), end(stream);
    begin("merge", stream, RELAXED), cudaStreamBeginCapture(other, RELAXED), TELL(cudaEventRecord(inside, other));
    TELL(cudaStreamWaitEvent(stream, inside, 0)), TELL(cudaStreamEndCapture(other, &graph)), end(stream);

    begin("fork", stream, RELAXED), TELL(cudaEventRecord(inside, stream)), TELL(cudaStreamWaitEvent(other, inside, 0));
    TELL(cudaMemsetAsync(memory, 1, 8, other)), end(stream);
    begin("joined", stream, RELAXED), TELL(cudaEventRecord(inside, stream)), TELL(cudaStreamWaitEvent(other, inside, 0));
    TELL(cudaMemsetAsync(memory, 1, 8, other)), TELL(cudaEventRecord(inside, other)), TELL(cudaStreamWaitEvent(stream, inside, 0)), end(stream);
    begin("unmatched", stream, RELAXED), TELL(cudaEventRecord(inside, stream)), TELL(cudaStreamWaitEvent(other, inside, 0));
    TELL(cudaStreamEndCapture(other, &graph)), end(stream);
    begin("wrong thread", stream, GLOBAL), in_thread(ends, stream), end(stream);
    begin("twice", stream, RELAXED), TELL(cudaStreamBeginCapture(stream, RELAXED)), end(stream);
    begin("twice ended", stream, RELAXED), end(stream);
    printf("not begun: %d\n", cudaStreamEndCapture(stream, &graph));
    cudaGetLastError();

    /* Into a graph that exists: its end gives that graph. */
    void *own, *ended = NULL;
    cudaGraphCreate(&own, 0);
    printf("to a graph: %d", cudaStreamBeginCaptureToGraph(stream, own, NULL, NULL, 0, RELAXED));
    printf(" %d", cudaStreamBeginCaptureToGraph(stream, own, NULL, NULL, 0, RELAXED));
    printf(" %d", cudaStreamBeginCaptureToGraph(other, NULL, NULL, NULL, 0, RELAXED));
    cudaStreamIsCapturing(stream, &mode);
    printf(" | state %d end %d", mode, cudaStreamEndCapture(stream, &ended));
    printf(" %s then", ended == own ? "same" : "another");
    cudaStreamIsCapturing(stream, &mode);
    printf(" %s", mode ? "more" : "nothing");
    printf(" %d\n", cudaGetLastError());

    /* Captured work has its effect when the graph is launched, and not before. */
    cudaMemset(memory, 1, 64);
    cudaStreamBeginCapture(stream, GLOBAL);
    cudaMemsetAsync(memory, 7, 8, stream);
    cudaMemcpyAsync(host, memory, 8, 2, stream);
    cudaLaunchHostFunc(stream, host_function, NULL);
    cudaEventRecordWithFlags(inside, stream, 1);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    memset(host, 0, 64);
    char now[8];
    cudaMemcpy(now, memory, 8, 2);
    printf("captured: memory %d host %d called %d\n", now[0], host[0], called);
    cudaGraphLaunch(exec, stream), cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(now, memory, 8, 2);
    printf("launched: memory %d host %d called %d event %d\n", now[0], host[0], called, cudaEventQuery(inside));

    /* A captured launch makes a child graph, which keeps its nodes when the executable graph is destroyed. */
    cudaMemset(memory, 1, 64), memset(host, 0, 64);
    for (int depth = 0; depth < 2; depth++) {
        cudaStreamBeginCapture(stream, GLOBAL);
        cudaMemsetAsync(memory, 3 + depth, 8, stream);
        cudaGraphLaunch(exec, stream);
        cudaMemsetAsync(memory, 5 + depth, 8, stream);
        cudaStreamEndCapture(stream, &graph);
        cudaGraphExecDestroy(exec);
        cudaGraphInstantiate(&exec, graph, 0);
    }
    cudaMemcpy(now, memory, 8, 2);
    printf("nested: memory %d host %d called %d", now[0], host[0], called);
    cudaGraphLaunch(exec, stream);
    cudaMemcpy(now, memory, 8, 2);
    printf(" launched: memory %d host %d called %d\n", now[0], host[0], called);
    return 0;
}
