// The kernels of viasd_kernels._cuda on the CPU: compiled with binding_cuda.cpp into a module with the same functions,
// so that tests without a GPU run what a GPU runs, but for launches and warp reductions. The members of a team take
// turns on one thread: each runs until it has to wait for the others.
#include <ucontext.h>

#include <array>
#include <functional>
#include <vector>

#include "acceptance/accept_chain_cuda.h"
#include "tree_verify/tree_verify_cuda.h"

namespace viasd {

namespace {

constexpr int TEAM_SIZE = 5;
constexpr size_t STACK_BYTES = 1 << 18;

struct Member {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
};

struct Meeting {
    ucontext_t outside;
    std::array<Member, TEAM_SIZE> members;
    std::array<double, TEAM_SIZE> slots;
    std::function<void(int rank)> run;
};

class TurnTeam {
  public:
    TurnTeam(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}

    int rank() const { return rank_; }
    int size() const { return TEAM_SIZE; }

    // Turns go round: who is on again knows that all others have come as far.
    void sync() const {
        swapcontext(&meeting_.members[rank_].context, &meeting_.members[(rank_ + 1) % TEAM_SIZE].context);
    }

    template <class T, class Combine>
    T all_reduce(T value, const Combine& combine) {
        const std::array<T, TEAM_SIZE> values = share(value);
        T result = values[0];
        for (int member = 1; member < TEAM_SIZE; ++member) result = combine(result, values[member]);
        return result;
    }

    TeamScan scan(double value) {
        const std::array<double, TEAM_SIZE> values = share(value);
        TeamScan scan = {0, 0};
        for (int member = 0; member < TEAM_SIZE; ++member) {
            if (member < rank_) scan.before += values[member];
            scan.total += values[member];
        }
        return scan;
    }

  private:
    template <class T>
    std::array<T, TEAM_SIZE> share(T value) {
        T* slots = reinterpret_cast<T*>(meeting_.slots.data());
        slots[rank_] = value;
        sync();
        std::array<T, TEAM_SIZE> values;
        std::copy(slots, slots + TEAM_SIZE, values.begin());
        sync();
        return values;
    }

    Meeting& meeting_;
    int rank_;
};

thread_local Meeting* met;

void take_part(int rank) { met->run(rank); }

// Calls run(team, sequence) in every member of one team, sequence after sequence.
template <class Run>
void for_each_sequence(int64_t num_sequences, const Run& run) {
    Meeting meeting;
    met = &meeting;
    meeting.run = [&](int rank) {
        TurnTeam team(meeting, rank);
        for (int64_t b = 0; b < num_sequences; ++b) {
            run(team, b);
            team.sync();
        }
    };
    for (int rank = 0; rank < TEAM_SIZE; ++rank) {
        Member& member = meeting.members[rank];
        getcontext(&member.context);
        member.context.uc_stack.ss_sp = member.stack.data();
        member.context.uc_stack.ss_size = member.stack.size();
        member.context.uc_link = rank + 1 < TEAM_SIZE ? &meeting.members[rank + 1].context : &meeting.outside;
        makecontext(&member.context, reinterpret_cast<void (*)()>(take_part), 1, rank);
    }
    swapcontext(&meeting.outside, &meeting.members[0].context);
}

}  // namespace

template <class T>
void accept_chain_cuda(const AcceptChainTask<T>& task, int64_t num_sequences, const LaunchPlace&) {
    for_each_sequence(num_sequences, [&](TurnTeam& team, int64_t b) { accept_chain_sequence(team, task, b); });
}

void build_tree_cuda(const int64_t* parents, const int64_t* row_start, int64_t num_sequences, int64_t max_rows,
                     const TreeLinks& tree, const LaunchPlace&) {
    const int64_t num_words = (max_rows + 63) / 64;
    for (int64_t b = 0; b < num_sequences; ++b) {
        const int64_t first = row_start[b];
        build_tree_sequence(parents + first, row_start[b + 1] - first, max_rows, num_words,
                            {tree.ancestors + first * num_words, tree.depth + first, tree.first_child + first,
                             tree.next_sibling + first});
    }
}

template <class T>
void verify_tree_cuda(const VerifyTreeTask<T>& task, int64_t num_sequences, const LaunchPlace&) {
    for_each_sequence(num_sequences, [&](TurnTeam& team, int64_t b) { verify_tree_sequence(team, task, b); });
}

template <class Piece>
void compact_kv_cuda(const CompactKVTask<Piece>& task, const TeamCache<Piece>& k, const TeamCache<Piece>& v,
                     int64_t num_sequences, const LaunchPlace&) {
    for (const TeamCache<Piece>& cache : {k, v}) {
        for_each_sequence(num_sequences, [&](TurnTeam& team, int64_t b) { compact_kv_sequence(team, task, cache, b); });
    }
}

template void accept_chain_cuda(const AcceptChainTask<float>&, int64_t, const LaunchPlace&);
template void accept_chain_cuda(const AcceptChainTask<Half>&, int64_t, const LaunchPlace&);
template void accept_chain_cuda(const AcceptChainTask<BFloat16>&, int64_t, const LaunchPlace&);
template void verify_tree_cuda(const VerifyTreeTask<float>&, int64_t, const LaunchPlace&);
template void verify_tree_cuda(const VerifyTreeTask<Half>&, int64_t, const LaunchPlace&);
template void verify_tree_cuda(const VerifyTreeTask<BFloat16>&, int64_t, const LaunchPlace&);
template void compact_kv_cuda(const CompactKVTask<WidePiece>&, const TeamCache<WidePiece>&, const TeamCache<WidePiece>&,
                              int64_t, const LaunchPlace&);
template void compact_kv_cuda(const CompactKVTask<NarrowPiece>&, const TeamCache<NarrowPiece>&,
                              const TeamCache<NarrowPiece>&, int64_t, const LaunchPlace&);

}  // namespace viasd
