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

// Completes the futures of one work. It is made before the work can end, so that the end allocates nothing.
struct Completion {
    virtual ~Completion() = default;
    virtual void run() = 0;
    Completion *next = nullptr; // the next in the completer's queue
};

// Completes futures on threads of its own. Their callbacks may run long, may need the GIL, and may wait for other works whose
// futures are completed here. So there is always one more thread than are busy.
//
// With kMany threads or more, another one starts only if the head of the queue has waited for kStall, because most busy threads
// then wait for the GIL. A thread that is idle for kIdle ends, except the last one.
class Completer {
  public:
    // The completer of this process. A forked child makes a new one: it has none of the parent's threads, and may have
    // inherited held locks.
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

    // Queues a completion and takes ownership of it. Call prepare first. After finish, it neither runs nor frees the
    // completion, because Python is ending.
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
        } catch (...) { // no thread or memory is available: a busy thread runs it later
        }
        wake_.notify_one();
    }

    // Called before Python ends, because a thread that returns to Python afterwards would crash the process. Waits for running
    // callbacks.
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
        threads_++; // counted from here on: it will take from the queue once it runs
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
            completion.reset(); // it may hold objects of Python
            lock.lock();
            busy_--;
            done_.notify_all();
        }
    }

    // If the queue does not move, the busy threads may be waiting for completions in it.
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
    size_t waiting_ = 0, threads_ = 0, busy_ = 0; // queued completions; threads; busy threads
    bool is_finished_ = false, is_watched_ = false;
};

} // namespace
