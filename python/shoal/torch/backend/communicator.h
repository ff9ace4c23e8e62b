// What a group of torch uses of the library: a communicator, shared memory, and errors turned into torch's exceptions.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <shoal/shoal.h>

#include "gil.h"
#include "types.h"

namespace {

std::string failure_text(const shoal_context *context, const shoal_comm *comm, shoal_status status)
{
    shoal_failure failure = SHOAL_FAILURE_INIT;
    if (shoal_last_failure(context, comm, &failure) == SHOAL_OK && failure.text[0])
        return failure.text;
    return shoal_status_text(status);
}

// Converts torch's deadline to milliseconds for the library, for which 0 means its own default.
uint32_t deadline_ms(milliseconds timeout)
{
    return static_cast<uint32_t>(std::clamp<int64_t>(timeout.count(), 1, UINT32_MAX - 1));
}

// Allocates bytes in memory that the other ranks of the host can map. They are freed with the last tensor that views them.
at::Tensor shared_bytes(shoal_context *context, int64_t bytes)
{
    WithoutGil released;
    TORCH_CHECK_VALUE(bytes >= 0, "shoal: a tensor of ", bytes, " bytes");
    void *memory;
    const shoal_status status = shoal_mem_alloc(context, std::max<size_t>(static_cast<size_t>(bytes), 1), &memory);
    TORCH_CHECK_WITH(OutOfMemoryError, status == SHOAL_OK, "shoal: ", failure_text(context, nullptr, status));
    const auto release = [context, owner = getpid()](void *at) {
        WithoutGil inner;
        if (owner == getpid() && shoal_mem_free(context, at) != SHOAL_OK)
            TORCH_WARN("shoal: a tensor's memory could not be freed: ", failure_text(context, nullptr, SHOAL_ERR_ARGUMENT));
    };
    return at::from_blob(memory, {bytes}, release, at::TensorOptions().dtype(at::kByte));
}

class Communicator {
  public:
    Communicator(shoal_context *context, shoal_comm *comm, std::string name, std::vector<int64_t> ranks)
        : context_(context), comm_(comm), name_(std::move(name)), ranks_(std::move(ranks)), owner_(getpid())
    {
    }
    Communicator(const Communicator &) = delete;
    Communicator &operator=(const Communicator &) = delete;
    ~Communicator()
    {
        close();
    }

    // The library may free a communicator only when no call is inside it: calls share this lock.
    template <class Call>
    auto with(Call call)
    {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        TORCH_CHECK_WITH(DistBackendError, comm_, "shoal: group ", name_, " was destroyed");
        return call(comm_);
    }

    void close()
    {
        if (!is_own()) // the child may have inherited a lock that a thread of the parent holds
            return;
        WithoutGil released;
        std::unique_lock<std::shared_mutex> lock(mutex_);
        if (comm_) {
            last_text_ = failure_text(nullptr, comm_, SHOAL_ERR_STATE);
            shoal_comm_free(comm_);
        }
        comm_ = nullptr;
    }

    // Does not take the lock, because abort has to wake the threads that are inside a call.
    void abort()
    {
        WithoutGil released;
        std::shared_lock<std::shared_mutex> lock(mutex_);
        if (comm_)
            shoal_comm_abort(comm_);
    }

    std::string explain(shoal_status status)
    {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        if (!comm_)
            return c10::str("group ", name_, " was destroyed: ", last_text_);
        shoal_failure failure = SHOAL_FAILURE_INIT;
        if (status == SHOAL_ERR_ARGUMENT || shoal_last_failure(nullptr, comm_, &failure) != SHOAL_OK)
            return failure_text(context_, nullptr, status);
        return failure.text + place_in_job(failure.rank);
    }

    // Returns false in a forked child.
    bool is_own() const
    {
        return owner_ == getpid();
    }

    shoal_context *context() const
    {
        return context_;
    }

    // Converts ranks of the group to ranks of the job.
    std::vector<int64_t> ranks_of(const std::vector<int> &own) const
    {
        std::vector<int64_t> ranks;
        for (const int rank : own)
            ranks.push_back(static_cast<size_t>(rank) < ranks_.size() ? ranks_[rank] : rank);
        return ranks;
    }

  private:
    // Returns text that names a rank's number in the job: messages of a group contain the group's ranks.
    std::string place_in_job(int rank) const
    {
        if (rank < 0 || static_cast<size_t>(rank) >= ranks_.size() || ranks_[rank] == rank)
            return "";
        return c10::str(" (rank ", rank, " of group ", name_, " is rank ", ranks_[rank], " of the job)");
    }

    std::shared_mutex mutex_;
    shoal_context *const context_;
    shoal_comm *comm_;
    const std::string name_;
    const std::vector<int64_t> ranks_;
    const pid_t owner_;
    std::string last_text_;
};

// Programs search the exceptions of a back-end for these words.
const char *timed_out(shoal_status status)
{
    return status == SHOAL_ERR_TIMEOUT ? "timed out: " : "";
}

[[noreturn]] void throw_status(Communicator &group, const char *title, shoal_status status)
{
    const std::string text = c10::str(title, ": ", timed_out(status), in_words_of_torch(group.explain(status)));
    if (status == SHOAL_ERR_ARGUMENT)
        C10_THROW_ERROR(ValueError, text);
    C10_THROW_ERROR(DistBackendError, text);
}

} // namespace
