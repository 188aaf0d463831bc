#include "acceptance/accept_chain_cpu.h"

#include "acceptance/accept_chain.h"
#include "sampling/node_laws.h"

namespace viasd {

namespace {

template <class Real>
void accept_chains(const AcceptChainInputs& in, const AcceptChainOutputs& out) {
    NodeLaws<Real> laws(in.target_logits, in.draft_logits);
    const bool has_draft = in.draft_logits.data != nullptr;
    for (int64_t b = 0; b < in.num_sequences; ++b) {
        const int64_t first = in.row_start[b], num_rows = in.row_start[b + 1] - first;
        SequenceVerdict verdict;
        if (num_rows > 0) {
            const Real temperature = static_cast<Real>(in.temperature[b]);
            laws.start_sequence(first, temperature);
            const ChainRows rows = {in.row_tokens + first, in.uniforms + first, num_rows, in.target_logits.width,
                                    has_draft};
            verdict = walk_chain(rows, !(temperature > 0), laws);
        }
        out.num_accepted[b] = verdict.num_accepted;
        out.next_token[b] = verdict.next_token;
        out.status[b] = verdict.status;
    }
}

}  // namespace

void accept_chain_cpu(const AcceptChainInputs& in, const AcceptChainOutputs& out) {
    require_row_start(in.row_start, in.num_sequences, in.num_rows);
    if (is_double(in.target_logits) || is_double(in.draft_logits)) {
        accept_chains<double>(in, out);
    } else {
        accept_chains<float>(in, out);
    }
}

}  // namespace viasd
