// A team of OpenMP threads that meets at barriers. Torch brings the one OpenMP runtime of the process; the number of
// threads comes from the caller. Built without OpenMP, a team has one member.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace viasd {

class Team {
  public:
    // Spins first, as the wait is mostly short, then lets others run: the processor may have other work than ours.
    void barrier() {
        if (size == 1) return;
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            waiting_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            if (spins < 4000) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
    }

    int size = 1;

  private:
    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// One member's part of [0, count), in multiples of `unit`.
struct Share {
    int64_t begin, end;
};

inline Share share(int64_t count, int member, int team_size, int64_t unit = 1) {
    const int64_t units = (count + unit - 1) / unit;
    const int64_t begin = units * member / team_size * unit, end = units * (member + 1) / team_size * unit;
    return {begin < count ? begin : count, end < count ? end : count};
}

// body(member, team) runs on every thread; it must not throw.
template <class Body>
void run_team(int num_threads, const Body& body) {
    Team team;
#if defined(_OPENMP)
    if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
        {
#pragma omp single
            team.size = omp_get_num_threads();
            body(omp_get_thread_num(), team);
        }
        return;
    }
#endif
    (void)num_threads;
    body(0, team);
}

}  // namespace viasd
