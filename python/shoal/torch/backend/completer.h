// Threads that complete futures.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "gil.h"

namespace {

// What completes the futures of one work. Made before the work can end, so that nothing has to be allocated then.
struct Completion {
    virtual ~Completion() = default;
    virtual void run() = 0;
    Completion *next = nullptr; // of those that a completer has
};

// Runs what completes futures, on threads of its own: their callbacks may be long, may want the GIL, and may wait for other
// works whose futures are completed here. So there is one more thread than are busy. From kMany threads on another one starts
// only when the first in the queue has waited for kStall, as most that are busy then wait for the GIL. A thread that has had
// nothing to do for kIdle ends, except the last.
class Completer {
  public:
    // The process's. A forked child has none of its parent's threads, and may have its locks: it begins anew.
    static Completer &instance()
    {
        static std::atomic<Completer *> current{nullptr};
        Completer *completer = current.load();
        if (!completer || completer->owner_ != getpid()) {
            auto *made = new Completer; // never destroyed: its threads may run until the process ends
            if (current.compare_exchange_strong(completer, made))
                completer = made;
            else
                delete made;
        }
        return *completer;
    }

    // Starts a thread if there is none; may throw.
    void prepare()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!threads_)
            start();
    }

    // After prepare. Becomes the owner of a completion. After finish it is not run, and what it holds is never freed: Python ends.
    void push(Completion *completion) noexcept
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_finished_)
            return;
        *last_ = completion;
        last_ = &completion->next;
        waiting_++;
        try {
            if (waiting_ > threads_ - busy_ && threads_ < kMany) {
                start();
            } else if (waiting_ > threads_ - busy_ && !is_watched_) {
                std::thread([this] { watch(); }).detach();
                is_watched_ = true;
            }
        } catch (...) { // neither threads nor memory are to be had: a thread that is busy comes to it later
        }
        wake_.notify_one();
    }

    // Before Python ends: a thread of ours that came back to it afterwards would end the process badly. Waits for what runs.
    void finish()
    {
        WithoutGil released;
        std::unique_lock<std::mutex> lock(mutex_);
        is_finished_ = true;
        done_.wait_for(lock, kFinish, [this] { return busy_ == 0 && !first_; });
    }

  private:
    void start()
    {
        std::thread([this] { serve(); }).detach();
        threads_++; // it counts from here on, as it comes to what waits once it runs
    }

    void serve()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            if (!wake_.wait_for(lock, kIdle, [this] { return first_; })) {
                if (threads_ == 1)
                    continue;
                threads_--;
                return;
            }
            std::unique_ptr<Completion> completion(pop());
            busy_++;
            lock.unlock();
            completion->run();
            completion.reset(); // what it holds may be Python's
            lock.lock();
            busy_--;
            done_.notify_all();
        }
    }

    // If the queue does not move, busy threads may be waiting for its completions.
    void watch()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        while (Completion *const before = first_) {
            lock.unlock();
            std::this_thread::sleep_for(kStall);
            lock.lock();
            try {
                if (first_ && first_ == before)
                    start();
            } catch (...) { // as in push
            }
        }
        is_watched_ = false;
    }

    Completion *pop()
    {
        Completion *const popped = first_;
        first_ = popped->next;
        if (!first_)
            last_ = &first_;
        waiting_--;
        return popped;
    }

    static constexpr std::chrono::seconds kFinish{5}, kIdle{2};
    static constexpr std::chrono::milliseconds kStall{10};
    static constexpr size_t kMany = 32;
    const pid_t owner_ = getpid();
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Completion *first_ = nullptr, **last_ = &first_;
    size_t waiting_ = 0, threads_ = 0, busy_ = 0; // completions that no thread has; threads, and those that have one
    bool is_finished_ = false, is_watched_ = false;
};

} // namespace
