// What a call of torch returns: its end, its errors, its future; and several such as one.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <shoal/shoal.h>

#include "communicator.h"
#include "completer.h"
#include "operands.h"

namespace {

template <class T>
using Ref = c10::intrusive_ptr<T>;

// What a work and the end of its request share. Outlives a work that is dropped before its request is done.
struct Outcome {
    std::shared_ptr<Communicator> group;
    const char *title;
    Operands operands;
    std::once_flag once;
    std::exception_ptr error;
    std::function<void()> profile_end;
    Ref<c10::ivalue::Future> future;

    // Once, on whichever thread learns of the end first; the others wait for it.
    void settle(shoal_status status)
    {
        WithoutGil released; // another thread may be at it, and want the GIL
        std::call_once(once, [&] {
            try {
                if (status != SHOAL_OK)
                    throw_status(*group, title, status);
                operands.bring_back();
            } catch (...) {
                error = std::current_exception();
            }
            operands.let_go();
            if (profile_end)
                profile_end();
        });
    }

    void complete_future()
    {
        if (error)
            future->setErrorIfNeeded(error);
        else
            future->markCompleted(c10::IValue(operands.outputs));
    }
};

// On the driving thread, which frees nothing: tensors may be Python's.
void when_done(void *arg, shoal_status status)
{
    auto *held = static_cast<std::shared_ptr<Outcome> *>(arg);
    Completer::instance().push([held, status] {
        const std::unique_ptr<std::shared_ptr<Outcome>> outcome(held);
        (*outcome)->settle(status);
        if ((*outcome)->future)
            (*outcome)->complete_future();
    });
}

class ShoalWork : public c10d::Work {
  public:
    // Made before its operation is posted, as a profile counts from here on; then posted() follows. inputs: what a profile
    // shows the shapes of; they are copied only where one is taken.
    ShoalWork(int rank, c10d::OpType type, std::shared_ptr<Outcome> outcome, at::TensorList inputs)
        : Work(rank, type, outcome->title, at::hasCallbacks() ? std::optional<Tensors>(inputs.vec()) : std::nullopt),
          outcome_(std::move(outcome))
    {
        outcome_->profile_end = std::move(recordFunctionEndCallback_);
        recordFunctionEndCallback_ = nullptr;
    }

    // NULL: it is done.
    void posted(shoal_request *request)
    {
        request_ = request;
        is_posted_ = true;
    }

    ~ShoalWork() override
    {
        if (!is_posted_) {
            if (outcome_->profile_end)
                outcome_->profile_end();
            return;
        }
        WithoutGil released;
        const shoal_status status = shoal_request_test(request_);
        if (status == SHOAL_PENDING)
            keep(); // the tensors
        else if (status == SHOAL_OK)
            outcome_->settle(status); // copies are brought back, whoever asked for it
        shoal_request_free(request_);
    }

    bool isCompleted() override
    {
        WithoutGil released;
        const shoal_status status = shoal_request_test(request_);
        if (status == SHOAL_PENDING)
            return false;
        outcome_->settle(status);
        return true;
    }

    bool isSuccess() const override
    {
        return const_cast<ShoalWork *>(this)->isCompleted() && !outcome_->error;
    }

    std::exception_ptr exception() const override
    {
        return const_cast<ShoalWork *>(this)->isCompleted() ? outcome_->error : nullptr;
    }

    Tensors result() override
    {
        return outcome_->operands.outputs;
    }

    void synchronize() override
    {
        wait(kNoTimeout);
    }

    bool wait(milliseconds timeout) override
    {
        return wait_on(timeout, false);
    }

    // has_waited: a slice has passed already, and a signal may be there.
    bool wait_on(milliseconds timeout, bool has_waited)
    {
        WithoutGil released;
        shoal_status status;
        milliseconds left = timeout > kNoTimeout ? timeout : milliseconds::max();
        for (;;) {
            const milliseconds slice = std::min(left, kSlice);
            if (has_waited && shoal_request_test(request_) == SHOAL_PENDING)
                raise_signals();
            status = shoal_request_wait(request_, static_cast<uint32_t>(slice.count()));
            if (status != SHOAL_PENDING)
                break;
            has_waited = true;
            left -= slice;
            TORCH_CHECK_WITH(DistBackendError, left.count() > 0, outcome_->title, ": this wait timed out after ",
                             timeout.count(), " ms; nothing is lost, it may be waited for again");
        }
        outcome_->settle(status);
        if (outcome_->error)
            std::rethrow_exception(outcome_->error);
        return true;
    }

    void abort() override
    {
        outcome_->group->abort();
    }

    Ref<c10::ivalue::Future> getFuture() override
    {
        WithoutGil released;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (outcome_->future)
                return outcome_->future;
            outcome_->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
        }
        if (isCompleted())
            outcome_->complete_future();
        else
            listen();
        return outcome_->future;
    }

  private:
    void keep()
    {
        try {
            listen();
        } catch (const std::system_error &) { // no thread is to be had; nobody will know when they can be freed
            (void)new std::shared_ptr<Outcome>(outcome_);
        }
    }

    void listen()
    {
        Completer::instance().prepare();
        if (is_listening_.exchange(true))
            return;
        shoal_request_on_done(request_, when_done, new std::shared_ptr<Outcome>(outcome_));
    }

    const std::shared_ptr<Outcome> outcome_;
    shoal_request *request_ = nullptr;
    bool is_posted_ = false;
    std::atomic<bool> is_listening_{false};
};

// The works between startCoalescing and endCoalescing, as one.
class JointWork : public c10d::Work {
  public:
    JointWork(int rank, std::vector<Ref<c10d::Work>> works) : Work(rank, c10d::OpType::COALESCED), works_(std::move(works))
    {
    }

    bool isCompleted() override
    {
        return std::all_of(works_.begin(), works_.end(), [](const auto &work) { return work->isCompleted(); });
    }

    bool isSuccess() const override
    {
        return std::all_of(works_.begin(), works_.end(), [](const auto &work) { return work->isSuccess(); });
    }

    std::exception_ptr exception() const override
    {
        for (const auto &work : works_)
            if (std::exception_ptr error = work->exception())
                return error;
        return nullptr;
    }

    bool wait(milliseconds timeout) override
    {
        const auto until = std::chrono::steady_clock::now() + timeout;
        for (const auto &work : works_) {
            const auto left = std::chrono::duration_cast<milliseconds>(until - std::chrono::steady_clock::now());
            work->wait(timeout > kNoTimeout ? std::max(left, milliseconds(1)) : timeout);
        }
        return true;
    }

    Tensors result() override
    {
        return outputs_of(works_);
    }

    void synchronize() override
    {
        wait(kNoTimeout);
    }

    // Of the outputs of all works, in their order.
    Ref<c10::ivalue::Future> getFuture() override
    {
        const auto type = c10::ListType::create(c10::TensorType::get());
        c10::List<Ref<c10::ivalue::Future>> futures(c10::FutureType::create(type));
        for (const auto &work : works_)
            futures.push_back(work->getFuture());
        const auto value_of = [works = works_](c10::ivalue::Future &all) {
            all.value(); // throws what one of them failed with
            return c10::IValue(outputs_of(works));
        };
        return c10::collectAll(futures)->then(value_of, type);
    }

  private:
    static Tensors outputs_of(const std::vector<Ref<c10d::Work>> &works)
    {
        Tensors outputs;
        for (const auto &work : works)
            for (const Tensor &output : work->result())
                outputs.push_back(output);
        return outputs;
    }

    const std::vector<Ref<c10d::Work>> works_;
};

} // namespace
