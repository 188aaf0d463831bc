// How drafted tokens came about, and what marks a row without one.
#pragma once

#include <cstdint>

namespace viasd {

constexpr int64_t UNUSED_TOKEN = -1;

enum class Proposal : int32_t { DETERMINISTIC = 0, WITHOUT_REPLACEMENT = 1, WITH_REPLACEMENT = 2 };

}  // namespace viasd
