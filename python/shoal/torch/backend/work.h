// What a call of torch returns: its completion, its errors, its future. Several calls can be joined into one.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <shoal/shoal.h>

#include "communicator.h"
#include "completer.h"
#include "streams.h"
#include "operands.h"

namespace {

template <class T>
using Ref = c10::intrusive_ptr<T>;
using Clock = std::chrono::steady_clock;

// With SHOAL_TORCH_BLOCKING_WAIT=1, work.wait() of a call on a device also blocks the host.
bool waits_block()
{
    const char *value = std::getenv("SHOAL_TORCH_BLOCKING_WAIT");
    if (!value || !*value)
        return false;
    TORCH_CHECK_VALUE(!std::strcmp(value, "0") || !std::strcmp(value, "1"), "SHOAL_TORCH_BLOCKING_WAIT is \"", value,
                      "\", but must be 0 or 1");
    return *value == '1';
}

// The value of getFutureResult, as over NCCL (c10d::WorkResult, which older versions of torch lack).
enum class Result : int64_t { SUCCESS = 0, TIMEOUT = 1, COMM_ERROR = 2 };

Ref<c10::ivalue::Future> future_of_tensors(std::vector<c10::Device> devices = {})
{
    return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
}

// State that a work shares with the end of its request. It outlives a work that is dropped before its request is done.
struct Outcome {
    std::shared_ptr<Communicator> group;
    const char *title;
    Operands operands;
    std::once_flag once;
    std::exception_ptr error;
    Result result = Result::SUCCESS;
    std::function<void()> profile_end;

    // Set when a call on a device has been posted: its stream, its end there, and an error of the copies after it.
    std::optional<c10::Stream> stream;
    std::optional<c10::Event> end;
    std::exception_ptr error_on_stream;

    std::mutex mutex; // guards all below
    bool holds_tensors = true;
    Ref<c10::ivalue::Future> future, future_result;
    bool is_future_complete = false, is_result_complete = false;

    // Runs once, on the thread that learns of the end first; other threads wait for it.
    void settle(shoal_status status)
    {
        WithoutGil released; // another thread may be in here and need the GIL
        std::call_once(once, [&] {
            try {
                if (status != SHOAL_OK)
                    throw_status(*group, title, status);
                if (error_on_stream)
                    std::rethrow_exception(error_on_stream);
                if (!stream)
                    operands.bring_back();
            } catch (...) {
                error = std::current_exception();
                result = status == SHOAL_ERR_TIMEOUT ? Result::TIMEOUT : Result::COMM_ERROR;
                keep_for_stream();
            }
            let_go();
            if (profile_end)
                profile_end();
        });
    }

    // Puts the copies back on the stream, after the library's copies. The future is complete from here on, because the stream
    // orders its users. An error of these copies becomes the future's error. It is not thrown before somebody waits, because
    // the other ranks rely on this call.
    void follow(const c10::Stream &on)
    {
        stream = on;
        const c10::StreamGuard guard(on);
        try {
            operands.record_on(on);
            operands.bring_back();
        } catch (...) {
            error_on_stream = std::current_exception();
        }
        end.emplace(on.device_type());
        end->record(on);
        future = future_of_tensors({on.device()});
        if (error_on_stream)
            future->setError(error_on_stream);
        else
            future->markCompleted(c10::IValue(operands.outputs));
        is_future_complete = true;
        if (profile_end)
            std::exchange(profile_end, nullptr)();
    }

    // After a failure the library's copies may still run when the tensors are released. This records the stream that comes
    // after them.
    void keep_for_stream()
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (stream)
            operands.record_all_on(*stream);
    }

    void let_go()
    {
        std::lock_guard<std::mutex> lock(mutex);
        operands.let_go();
        holds_tensors = false;
    }

    bool must_be_kept()
    {
        std::lock_guard<std::mutex> lock(mutex);
        return holds_tensors;
    }

    // Call this after settle. A callback may call it again.
    void complete_futures()
    {
        WithoutGil released;
        complete(&Outcome::future, &Outcome::is_future_complete, [this](auto &of_tensors) {
            if (error)
                of_tensors.setErrorIfNeeded(error);
            else
                of_tensors.markCompleted(c10::IValue(operands.outputs));
        });
        complete(&Outcome::future_result, &Outcome::is_result_complete, [this](auto &of_result) {
            of_result.markCompleted(c10::IValue(static_cast<int64_t>(result)));
        });
    }

  private:
    // Runs once, on the thread that comes first; other threads wait for it.
    template <class Mark>
    void complete(Ref<c10::ivalue::Future> Outcome::*member, bool Outcome::*is_taken, Mark mark)
    {
        std::unique_lock<std::mutex> lock(mutex);
        const Ref<c10::ivalue::Future> taken = this->*member;
        const bool is_first = taken && !std::exchange(this->*is_taken, true);
        lock.unlock();
        if (is_first)
            mark(*taken);
        else if (taken && !taken->completed())
            taken->wait();
    }
};

// Runs when a request is done, and completes its futures.
struct Ending : Completion {
    explicit Ending(std::shared_ptr<Outcome> of) : outcome(std::move(of))
    {
    }
    void run() override
    {
        outcome->settle(status);
        outcome->complete_futures();
    }

    const std::shared_ptr<Outcome> outcome;
    shoal_status status = SHOAL_PENDING;
};

// Runs on the driving thread, in a frame of C. It throws nothing, and frees nothing, as the tensors may be Python's.
void when_done(void *arg, shoal_status status) noexcept
{
    auto *ending = static_cast<Ending *>(arg);
    ending->status = status;
    Completer::instance().push(ending);
}

class ShoalWork : public c10d::Work {
  public:
    // Made before its operation is posted, because a profile counts from here on; posted() follows. A profile shows the shapes
    // of `inputs`, which are copied only while one is recorded.
    ShoalWork(int rank, c10d::OpType type, std::shared_ptr<Outcome> outcome, at::TensorList inputs)
        : Work(rank, type, outcome->title, at::hasCallbacks() ? std::optional<Tensors>(inputs.vec()) : std::nullopt),
          outcome_(std::move(outcome))
    {
        outcome_->profile_end = std::move(recordFunctionEndCallback_);
        recordFunctionEndCallback_ = nullptr;
    }

    void posted(shoal_request *request)
    {
        request_ = request;
        is_posted_ = true;
    }

    // For a call on a device, after posted.
    void follow(const c10::Stream &stream)
    {
        outcome_->follow(stream);
    }

    ~ShoalWork() override
    {
        if (!is_posted_) {
            if (outcome_->profile_end)
                outcome_->profile_end();
            return;
        }
        if (!outcome_->group->is_own()) // in a forked child a thread of the parent may have held the library's locks
            return;
        WithoutGil released;
        const shoal_status status = shoal_request_test(request_);
        if (status == SHOAL_PENDING && outcome_->must_be_kept())
            keep(); // keeps the tensors
        else if (status != SHOAL_PENDING)
            outcome_->settle(status); // copies results back, or keeps memory for the stream
        shoal_request_free(request_);
    }

    // On a device, this includes the work that follows the library's part on the stream.
    bool isCompleted() override
    {
        return is_settled() && (!outcome_->end || outcome_->error || outcome_->end->query());
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

    // On a device the current stream waits. The host waits only with a timeout or in blocking mode.
    bool wait(milliseconds timeout) override
    {
        if (!outcome_->stream)
            return wait_on(timeout, false);
        WithoutGil released;
        outcome_->end->block(current_stream(outcome_->stream->device()));
        if (timeout > kNoTimeout || waits_block())
            wait_on_stream(timeout);
        else
            throw_known();
        outcome_->let_go(); // memory reused on the current stream is then used after this call
        return true;
    }

    // has_waited: a slice has passed, so a signal may be pending.
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
            check_left(left.count() > 0, timeout);
        }
        outcome_->settle(status);
        outcome_->complete_futures(); // a future taken earlier is complete when this returns, as over other back-ends
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
        return future_in(&Outcome::future, [] { return future_of_tensors(); });
    }

    // A future of a Result. It completes when the request is done, also on a device.
    Ref<c10::ivalue::Future> getFutureResult()
    {
        return future_in(&Outcome::future_result, [] { return c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get()); });
    }

  private:
    bool is_settled()
    {
        WithoutGil released;
        const shoal_status status = shoal_request_test(request_);
        if (status == SHOAL_PENDING)
            return false;
        outcome_->settle(status);
        return true;
    }

    void throw_known()
    {
        const std::exception_ptr error = is_settled() ? outcome_->error : outcome_->error_on_stream;
        if (error)
            std::rethrow_exception(error);
    }

    // The host waits for the request, then for the copies back that follow it on the stream.
    void wait_on_stream(milliseconds timeout)
    {
        const auto begun = Clock::now();
        wait_on(timeout, false);
        for (auto looked = begun; !outcome_->end->query(); std::this_thread::sleep_for(kPause)) {
            const auto now = Clock::now();
            check_left(timeout <= kNoTimeout || now - begun < timeout, timeout);
            if (now - looked < kSlice)
                continue;
            raise_signals();
            looked = now;
        }
    }

    void check_left(bool is_left, milliseconds timeout) const
    {
        TORCH_CHECK_WITH(DistBackendError, is_left, outcome_->title, ": this wait timed out after ", timeout.count(),
                         " ms; nothing is lost, it may be waited for again");
    }

    template <class Make>
    Ref<c10::ivalue::Future> future_in(Ref<c10::ivalue::Future> Outcome::*member, Make make)
    {
        WithoutGil released;
        {
            std::lock_guard<std::mutex> lock(outcome_->mutex);
            if ((*outcome_).*member)
                return (*outcome_).*member;
            (*outcome_).*member = make();
        }
        if (is_settled())
            outcome_->complete_futures();
        else
            listen();
        return (*outcome_).*member;
    }

    void keep()
    {
        try {
            listen();
        } catch (const std::exception &) { // no thread or memory is available: leak the tensors, as their end stays unknown
            (void)new std::shared_ptr<Outcome>(outcome_);
        }
    }

    void listen()
    {
        Completer::instance().prepare();
        auto ending = std::make_unique<Ending>(outcome_);
        if (!is_listening_.exchange(true))
            shoal_request_on_done(request_, when_done, ending.release());
    }

    static constexpr std::chrono::microseconds kPause{50};
    const std::shared_ptr<Outcome> outcome_;
    shoal_request *request_ = nullptr;
    bool is_posted_ = false;
    std::atomic<bool> is_listening_{false};
};

// Joins the works between startCoalescing and endCoalescing.
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
        const auto until = Clock::now() + timeout;
        for (const auto &work : works_) {
            const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
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

    // A future of the outputs of all works, in their order. The future of collectAll has no devices, so a stream that waited
    // for it would wait for nothing. This one has the devices of the works.
    Ref<c10::ivalue::Future> getFuture() override
    {
        Futures parts;
        c10::List<Ref<c10::ivalue::Future>> list(c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
        std::vector<c10::Device> devices;
        for (const auto &work : works_) {
            parts.push_back(work->getFuture());
            list.push_back(parts.back());
            devices.insert(devices.end(), parts.back()->devices().begin(), parts.back()->devices().end());
        }
        const auto joint = future_of_tensors(std::move(devices));
        c10::collectAll(list)->addCallback([joint, parts, works = works_](c10::ivalue::Future &all) {
            try {
                all.value(); // throws the error of one that failed
                complete(*joint, parts, outputs_of(works));
            } catch (const std::exception &) {
                joint->setError(std::current_exception());
            }
        });
        return joint;
    }

  private:
    using Futures = std::vector<Ref<c10::ivalue::Future>>;

    // The future's events are recorded on streams of the pool, which wait for the parts, so that the current streams need not
    // wait.
    static void complete(c10::ivalue::Future &joint, const Futures &parts, const Tensors &outputs)
    {
        std::vector<c10::Stream> streams;
        for (const c10::Device &device : joint.devices())
            streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
        const c10::MultiStreamGuard guard(streams);
        for (const auto &part : parts)
            part->wait();
        joint.markCompleted(c10::IValue(outputs));
    }

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
