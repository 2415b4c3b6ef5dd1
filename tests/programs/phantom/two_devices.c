/* Events of two phantom devices. Prints each status; tests/phantom/calls.rs has the expected ones. */
#include <stdio.h>

int cudaSetDevice(int), cudaStreamCreateWithFlags(void **, unsigned), cudaStreamSynchronize(void *), cudaStreamQuery(void *);
int cudaEventCreate(void **), cudaEventRecord(void *, void *), cudaEventQuery(void *), cudaEventSynchronize(void *);
int cudaEventElapsedTime(float *, void *, void *), cudaStreamWaitEvent(void *, void *, unsigned), cudaGetLastError(void);
int cudaGraphCreate(void **, unsigned), cudaGraphInstantiate(void **, void *, unsigned long long), cudaGraphLaunch(void *, void *);

int main(void) {
    void *streams[2], *events[2], *late, *graph, *work;
    float milliseconds = -1;
    cudaGraphCreate(&graph, 0);
    cudaGraphInstantiate(&work, graph, 0);
    for (int device = 0; device < 2; device++) {
        cudaSetDevice(device);
        cudaStreamCreateWithFlags(&streams[device], 1);
        cudaEventCreate(&events[device]);
    }
    cudaEventCreate(&late);
    printf("record elsewhere %d", cudaEventRecord(events[0], streams[1]));
    printf(" last error %d\n", cudaGetLastError());

    /* A stream of device 0 with no work of its own waits for work of device 1. */
    cudaGraphLaunch(work, streams[1]);
    cudaEventRecord(events[1], streams[1]);
    cudaGraphLaunch(work, streams[1]);
    cudaEventRecord(late, streams[1]);
    printf("wait %d", cudaStreamWaitEvent(streams[0], events[1], 0));
    printf(" query %d %d", cudaStreamQuery(streams[0]), cudaEventQuery(events[1]));
    printf(" synchronize %d", cudaStreamSynchronize(streams[0]));
    printf(" query %d %d %d\n", cudaStreamQuery(streams[0]), cudaEventQuery(events[1]), cudaEventQuery(late));

    cudaEventRecord(events[0], streams[0]);
    cudaEventSynchronize(events[0]);
    cudaEventSynchronize(late);
    printf("elapsed across %d", cudaEventElapsedTime(&milliseconds, events[0], events[1]));
    printf(" last error %d", cudaGetLastError());
    printf(" time %.0f", milliseconds);
    printf(" on one %d\n", cudaEventElapsedTime(&milliseconds, events[1], late));
    return milliseconds > 0 ? 0 : 1;
}
