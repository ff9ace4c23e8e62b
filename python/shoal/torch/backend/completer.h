// Threads that complete futures.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

#include "gil.h"

namespace {

// Runs what completes futures, on threads of its own: their callbacks may be long, may want the GIL, and may wait for other
// works whose futures are completed here, so there is always one more thread than are busy.
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

    // Sees to it that there is a thread; may throw.
    void prepare()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!threads_)
            start();
    }

    // After finish, a task is not run, and what it holds is never freed: Python ends.
    void push(std::function<void()> task)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_finished_) {
            (void)new std::function<void()>(std::move(task));
            return;
        }
        tasks_.push_back(std::move(task));
        try {
            if (tasks_.size() > idle_)
                start();
        } catch (const std::system_error &) { // no more threads are to be had: one that is busy comes to it later
        }
        wake_.notify_one();
    }

    // Before Python ends: a thread of ours that came back to it afterwards would end the process badly. Waits for what runs.
    void finish()
    {
        WithoutGil released;
        std::unique_lock<std::mutex> lock(mutex_);
        is_finished_ = true;
        done_.wait_for(lock, kFinish, [this] { return busy_ == 0 && tasks_.empty(); });
    }

  private:
    void start()
    {
        std::thread([this] { serve(); }).detach();
        threads_++;
    }

    void serve()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            idle_++;
            wake_.wait(lock, [this] { return !tasks_.empty(); });
            idle_--;
            std::function<void()> task = std::move(tasks_.front());
            tasks_.pop_front();
            busy_++;
            lock.unlock();
            run(std::move(task));
            lock.lock();
            busy_--;
            done_.notify_all();
        }
    }

    // The task, and what it holds, is gone when this returns.
    static void run(std::function<void()> task)
    {
        task();
    }

    static constexpr std::chrono::seconds kFinish{5};
    const pid_t owner_ = getpid();
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<std::function<void()>> tasks_;
    size_t threads_ = 0, idle_ = 0, busy_ = 0;
    bool is_finished_ = false;
};

} // namespace
