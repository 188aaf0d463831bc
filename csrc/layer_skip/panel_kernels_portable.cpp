#define VIASD_TABLE panel_kernels_portable
#define VIASD_LANES 4
#include "layer_skip/panel_kernels.inc"
