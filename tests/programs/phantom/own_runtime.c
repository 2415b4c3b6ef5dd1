/* A runtime that a wheel brings: without the phantom's answers it knows no device. */
int cudaMemcpy(void *to, const void *from, unsigned long size, int kind) {
    (void)to, (void)from, (void)size, (void)kind;
    return 100;
}
