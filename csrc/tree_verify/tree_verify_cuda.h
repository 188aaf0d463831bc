// Entry points of build_tree, verify_tree and compact_kv on NVIDIA GPUs: all sequences of a call, one block each.
#pragma once

#include "cuda/launch_place.h"
#include "tree_verify/tree_verify_team.h"

namespace viasd {

void build_tree_cuda(const int64_t* parents, const int64_t* row_start, int64_t num_sequences, int64_t max_rows,
                     const TreeLinks& tree, const LaunchPlace& place);

template <class T>
void verify_tree_cuda(const VerifyTreeTask<T>& task, int64_t num_sequences, const LaunchPlace& place);

template <class Piece>
void compact_kv_cuda(const CompactKVTask<Piece>& task, const TeamCache<Piece>& k, const TeamCache<Piece>& v,
                     int64_t num_sequences, const LaunchPlace& place);

}  // namespace viasd
