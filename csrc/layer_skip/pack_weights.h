// Weight matrices into panels, in the fewest bytes that hold every weight exactly.
#pragma once

#include <cstdint>

#include "layer_skip/panel_kernels.h"

namespace viasd {

// A row-major [num_outputs, depth] matrix. `halves`: panels of its first and of its second half are to lie in turn.
struct WeightMatrix {
    Element element;
    const void* data;
    int64_t row_stride;  // in elements
    int64_t num_outputs, depth;
    bool halves;

    int64_t num_panels() const {
        const int64_t parts = halves ? 2 : 1;
        return parts * round_up(num_outputs / parts, PANEL) / PANEL;
    }
};

// The coding of fewest bytes that loses nothing: levels where every 32 inputs of an output lie evenly spaced on at most
// 256 levels, as weights do that were quantised once and widened again; bfloat16 where all weights fit it; else the
// matrix's own element.
Coding smallest_coding(const WeightMatrix& matrix, int num_threads);

// `coding` is the matrix's own element or one that holds all its weights. panels: num_panels of panel_bytes each.
void pack_weights(const WeightMatrix& matrix, Coding coding, void* panels, int num_threads);

}  // namespace viasd
