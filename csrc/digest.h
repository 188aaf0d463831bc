// A number for the bits in a stretch of memory: another one, but for a chance of about 2^-32, where any bit differs.
#pragma once

#include <cstdint>

namespace viasd {

uint64_t digest(const void* data, int64_t num_bytes, int num_threads);

}  // namespace viasd
