#if defined(__x86_64__)
#define VIASD_TABLE panel_kernels_avx2
#define VIASD_LANES 8
#include "layer_skip/panel_kernels.inc"
#endif
