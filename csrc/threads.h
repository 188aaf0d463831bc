// Threads of the one OpenMP runtime that torch has loaded; a build without OpenMP works on one.
#pragma once

#include <algorithm>
#include <cstdint>

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
struct Team {
    int over_items;
    int within_row;
};

inline Team share_threads(int num_threads, int64_t num_items, int64_t num_rows, int64_t width) {
    constexpr int64_t WORTH_A_THREAD = 16384;  // numbers to read; with fewer, waking a thread takes longer than working
    const int64_t useful = std::min<int64_t>(num_threads, num_rows * width / WORTH_A_THREAD);
    const int over_items = static_cast<int>(std::min(useful, num_items));
    const int within_row = static_cast<int>(std::min(useful, width / WORTH_A_THREAD));
    return over_items >= within_row ? Team{std::max(over_items, 1), 1} : Team{1, within_row};
}

}  // namespace viasd
