// A few persistent threads that share the tasks of one call. An idle thread spins for at most ~30 us, then sleeps.
#pragma once

#include <functional>

namespace headgate {

// Runs task(0) .. task(count - 1), each once, on the caller and up to threads - 1 others; returns when all are done.
// threads = 1 starts no thread. A call that finds the threads busy with another call runs its tasks alone.
void run_tasks(int count, int threads, const std::function<void(int)>& task);

}  // namespace headgate
