#ifdef __x86_64__
#define TABLE row_kernels_avx2
#define VECTOR_BYTES 32
#include "sampling/row_kernels.inc"
#endif
