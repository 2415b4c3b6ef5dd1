// Makes and destroys a descriptor of cublasLt as often as a month of training does, and tells whether memory grew.
#include <stdio.h>
#include <unistd.h>

int cublasLtMatmulDescCreate(void **descriptor, int compute, int scale);
int cublasLtMatmulDescDestroy(void *descriptor);
int cublasLtMatrixLayoutCreate(void **layout, int type, unsigned long rows, unsigned long columns, long leading);
int cublasLtMatrixLayoutDestroy(void *layout);

static long resident(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*s %ld", &pages) != 1) pages = -1;
    if (file) fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

int main(void) {
    void *kept, *descriptor, *layout;
    int failed = cublasLtMatmulDescCreate(&kept, 68, 0), same = 0;
    long before = resident();
    for (int call = 0; call < 500000; call++) {
        failed |= cublasLtMatmulDescCreate(&descriptor, 68, 0) | cublasLtMatrixLayoutCreate(&layout, 0, 8, 8, 8);
        same += descriptor == kept || layout == kept || layout == descriptor;
        failed |= cublasLtMatmulDescDestroy(descriptor) | cublasLtMatrixLayoutDestroy(layout);
    }
    long grown = resident() - before;
    printf("failed %d same %d grown %s\n", failed, same, grown < (8 << 20) ? "no" : "yes");
    return 0;
}
