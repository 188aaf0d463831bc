// accept_chain by teams of threads, one for a sequence: rows behind a rejection are not read.
#pragma once

#include "acceptance/accept_chain.h"
#include "sampling/team_laws.h"

namespace viasd {

template <class T>
struct AcceptChainTask {
    const int64_t* row_tokens;  // [R]
    const double* uniforms;     // [R]
    const int64_t* row_start;   // [B + 1]
    const double* temperature;  // [B]
    TeamMatrix<T> target_logits;
    TeamMatrix<T> draft_logits;  // data is null where the caller gave none
    float* weights;              // [B, V + Vd]
    int32_t* num_accepted;       // [B], as the others
    int32_t* next_token;
    int32_t* status;
};

template <class T, class Team>
HOST_DEVICE inline void accept_chain_sequence(Team& team, const AcceptChainTask<T>& task, int64_t b) {
    const int64_t first = task.row_start[b], num_rows = task.row_start[b + 1] - first;
    SequenceVerdict verdict;
    if (num_rows > 0) {
        const float temperature = static_cast<float>(task.temperature[b]);
        float* weights = task.weights + b * (task.target_logits.width + task.draft_logits.width);
        TeamLaws<T, Team> laws(team, task.target_logits, task.draft_logits, weights, first, temperature);
        const ChainRows rows = {task.row_tokens + first, task.uniforms + first, num_rows, task.target_logits.width,
                                task.draft_logits.data != nullptr};
        verdict = walk_chain(rows, !(temperature > 0), laws);
    }
    if (team.rank() == 0) {
        task.num_accepted[b] = verdict.num_accepted;
        task.next_token[b] = verdict.next_token;
        task.status[b] = verdict.status;
    }
}

}  // namespace viasd
