// Entry point of accept_chain on NVIDIA GPUs: all sequences of a call, one block each.
#pragma once

#include "acceptance/accept_chain_team.h"
#include "cuda/launch_place.h"

namespace viasd {

template <class T>
void accept_chain_cuda(const AcceptChainTask<T>& task, int64_t num_sequences, const LaunchPlace& place);

}  // namespace viasd
