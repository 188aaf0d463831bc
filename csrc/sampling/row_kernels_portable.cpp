#define TABLE row_kernels_portable
#define VECTOR_BYTES 16
#include "sampling/row_kernels.inc"
