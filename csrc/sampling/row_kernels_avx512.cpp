#ifdef __x86_64__
#define TABLE row_kernels_avx512
#define VECTOR_BYTES 64
#include "sampling/row_kernels.inc"
#endif
