// Threads of the one OpenMP runtime that torch has loaded; a build without OpenMP works on one.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace viasd {

inline int worker_index() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Calls work(i, worker) for every i in [0, count); `worker`, below num_threads, says whose scratch to use. The work
// must not throw.
template <class Work>
void parallel_for(int64_t count, int num_threads, const Work& work) {
    if (num_threads <= 1) {
        for (int64_t i = 0; i < count; ++i) work(i, 0);
        return;
    }
#pragma omp parallel for num_threads(num_threads) schedule(guided)
    for (int64_t i = 0; i < count; ++i) work(i, worker_index());
}

// How the threads of a call are spread: over its items (sequences, rows), or over the vocabulary of one row after
// another.
struct ThreadSplit {
    int over_items;
    int within_row;
};

inline ThreadSplit share_threads(int num_threads, int64_t num_items, int64_t num_rows, int64_t width) {
    constexpr int64_t WORTH_A_THREAD =
        131072;  // numbers to read; with fewer, waking a thread takes longer than working
    const int64_t useful = std::min<int64_t>(num_threads, num_rows * width / WORTH_A_THREAD);
    const int over_items = static_cast<int>(std::min(useful, num_items));
    const int within_row = static_cast<int>(std::min(useful, width / WORTH_A_THREAD));
    return over_items >= within_row ? ThreadSplit{std::max(over_items, 1), 1} : ThreadSplit{1, within_row};
}

// Threads that work through the same phases and meet at barriers in between.
class Team {
  public:
    // Spins first, as the wait is mostly short. Then it sleeps: on a busy machine the member waited for has lost its
    // processor to another program, and gets ours only if we leave it.
    void barrier() {
        if (size == 1) return;
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            waiting_.store(0, std::memory_order_relaxed);
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                round_.store(round + 1, std::memory_order_release);
            }
            everyone_.notify_all();
            return;
        }
        const auto passed = [&] { return round_.load(std::memory_order_acquire) != round; };
        const auto end = std::chrono::steady_clock::now() + SPIN_TIME;
        do {
            for (int spins = 0; spins < 32; ++spins) {
                if (passed()) return;
                relax();
            }
        } while (std::chrono::steady_clock::now() < end);
        std::unique_lock<std::mutex> lock(mutex_);
        everyone_.wait(lock, passed);
    }

    int size = 1;

  private:
    static constexpr std::chrono::microseconds SPIN_TIME{50};

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::mutex mutex_;
    std::condition_variable everyone_;
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
#ifdef _OPENMP
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
