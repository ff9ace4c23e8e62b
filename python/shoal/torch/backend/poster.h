// Posting: what all calls of the back-end have in common, and what torch asks of it besides calls.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <shoal/shoal.h>

#include "communicator.h"
#include "types.h"
#include "work.h"

namespace {

// In torch 2.4 only some option structs have asyncOp; in later versions all do. Without it, the call counts as asynchronous.
template <class Options, class = void>
struct HasAsync : std::false_type {
};
template <class Options>
struct HasAsync<Options, std::void_t<decltype(std::declval<Options>().asyncOp)>> : std::true_type {
};

template <class Options>
bool is_async(const Options &options)
{
    if constexpr (HasAsync<Options>::value)
        return options.asyncOp;
    else
        return true;
}

// A group's calls: their deadlines, their waits, and the calls between startCoalescing and endCoalescing.
class Poster : public c10d::Backend {
  public:
    Poster(std::shared_ptr<Communicator> group, int rank, int size, milliseconds timeout)
        : Backend(rank, size), group_(std::move(group)), timeout_(timeout)
    {
    }

    const std::string getBackendName() const override
    {
        return "shoal";
    }

    // Returns true if batch_isend_irecv is one work, which devices need. On a machine without a device each message is its own
    // work, as over Gloo. (A torch built for a device reports that device on every machine.)
    bool supportsCoalescing() const
    {
        const std::optional<c10::DeviceType> type = at::getAccelerator();
        return type && c10::impl::hasDeviceGuardImpl(*type) && c10::impl::VirtualGuardImpl(*type).deviceCount() > 0;
    }

    void startCoalescing() override
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        coalesced_.emplace(); // replaces one that was never ended: torch does not end it after an exception
    }

    Ref<c10d::Work> endCoalescing() override
    {
        std::optional<Coalesced> ended = take_coalesced();
        TORCH_CHECK_VALUE(ended, "shoal: coalescing has not begun");
        if (!ended->messages.empty())
            ended->works.push_back(exchange(ended->messages, std::move(ended->operands)));
        return c10::make_intrusive<JointWork>(rank_, std::move(ended->works));
    }

    void setTimeout(milliseconds timeout)
    {
        timeout_ = timeout;
    }

    void abort()
    {
        group_->abort();
    }

    void shutdown()
    {
        group_->close();
    }

    void setSequenceNumberForGroup() override
    {
    }

    uint64_t getSequenceNumberForGroup() override
    {
        return sequence_;
    }

    Ref<Options> getBackendOptions()
    {
        return c10::make_intrusive<Options>(getBackendName(), timeout_.load());
    }

  protected:
    // Messages come without options, so it is unknown whether the caller waits for them at once.
    struct Message {
        milliseconds timeout = c10d::kUnsetTimeout;
    };

    template <class Options, class Post>
    Ref<c10d::Work> start(c10d::OpType type, const char *title, at::TensorList inputs, const Options &o, Operands operands,
                          Post post)
    {
        return start(type, title, inputs, o, std::move(operands), 1, post);
    }

    // Posts a call and, if it is synchronous, waits for it. On a device the current stream waits, not the host.
    template <class Options, class Post>
    Ref<c10d::Work> start(c10d::OpType type, const char *title, at::TensorList inputs, const Options &o, Operands operands,
                          double scale, Post post)
    {
        WithoutGil released;
        const bool is_at_once = !is_async(o) && !is_coalescing();
        std::optional<c10::Stream> stream;
        if (const std::optional<c10::Device> device = operands.device())
            stream = streams_.enter(*device, type, is_at_once);
        const bool waits = is_at_once && !stream;
        shoal_options options = SHOAL_OPTIONS_INIT;
        options.stream = stream ? handle_of(*stream) : nullptr;
        options.timeout_ms = deadline_ms(o.timeout.count() <= 0 ? timeout_.load() : o.timeout);
        options.wait_ms = waits ? static_cast<uint32_t>(kSlice.count()) : 0;
        options.scale = scale;
        auto outcome = std::make_shared<Outcome>();
        outcome->group = group_;
        outcome->title = title;
        outcome->operands = std::move(operands);
        auto work = c10::make_intrusive<ShoalWork>(rank_, type, outcome, inputs);
        shoal_request *request = nullptr;
        const shoal_status status = group_->with([&](shoal_comm *comm) { return post(comm, &options, &request); });
        if (status != SHOAL_OK && stream)
            outcome->operands.record_all_on(*stream); // some of the library's copies may be in progress
        if (status != SHOAL_OK)
            throw_status(*group_, title, status);
        work->posted(request);
        sequence_++;
        if (stream)
            work->follow(*stream);
        if (waits)
            work->wait_on(kNoTimeout, true);
        else
            collect(work);
        return work;
    }

    // Sends or receives a tensor. Messages on a device between startCoalescing and endCoalescing are posted together at the
    // end: one after another on a stream, they could wait for each other. An exception ends the coalescing, because torch then
    // calls no endCoalescing, and later messages would be listed but never sent.
    Ref<c10d::Work> message(c10d::OpType type, const char *title, const Tensors &tensors, int peer, int tag)
    {
        try {
            const Tensor &tensor = only(tensors);
            if (list(type, tensor, peer, tag))
                return c10::make_intrusive<JointWork>(rank_, std::vector<Ref<c10d::Work>>());
            return post_message(type, title, tensor, peer, tag);
        } catch (...) {
            take_coalesced();
            throw;
        }
    }

    const std::shared_ptr<Communicator> group_;
    std::atomic<milliseconds> timeout_;
    WorkStreams streams_;

  private:
    // The works since startCoalescing, and the messages that are not posted yet.
    struct Coalesced {
        std::vector<Ref<c10d::Work>> works;
        std::vector<shoal_message> messages;
        Operands operands; // of the messages
    };

    // Adds a message to the list for endCoalescing. Returns false if it has to be posted at once.
    bool list(c10d::OpType type, const Tensor &tensor, int peer, int tag)
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        if (!coalesced_ || tensor.is_cpu())
            return false;
        coalesced_->messages.push_back(message_of(coalesced_->operands, type, tensor, peer, tag));
        return true;
    }

    Ref<c10d::Work> post_message(c10d::OpType type, const char *title, const Tensor &tensor, int peer, int tag)
    {
        Operands operands;
        const shoal_message one = message_of(operands, type, tensor, peer, tag);
        return start(type, title, tensor, Message(), std::move(operands), [&](auto *comm, auto *options, auto *out) {
            if (one.is_send)
                return shoal_send_post(comm, one.buffer, one.count, one.type, peer, tag, options, out);
            return shoal_recv_post(comm, one.buffer, one.count, one.type, peer, tag, options, out);
        });
    }

    static shoal_message message_of(Operands &operands, c10d::OpType type, const Tensor &tensor, int peer, int tag)
    {
        const Moved moved(tensor.scalar_type());
        const bool is_send = type == c10d::OpType::SEND;
        void *memory = is_send ? operands.input(tensor) : operands.output(tensor);
        if (is_send)
            operands.outputs.push_back(tensor);
        return {is_send, memory, moved.count(tensor.numel()), moved.type, peer, tag};
    }

    Ref<c10d::Work> exchange(const std::vector<shoal_message> &messages, Operands operands)
    {
        const Tensors tensors = operands.outputs;
        return start(c10d::OpType::COALESCED, "shoal:batch_isend_irecv", tensors, Message(), std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_exchange_post(comm, messages.data(), messages.size(), options, out);
                     });
    }

    std::optional<Coalesced> take_coalesced()
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        return std::exchange(coalesced_, std::nullopt);
    }

    bool is_coalescing()
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        return coalesced_.has_value();
    }

    void collect(const Ref<c10d::Work> &work)
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        if (coalesced_)
            coalesced_->works.push_back(work);
    }

    std::atomic<uint64_t> sequence_{0};
    std::mutex coalescing_mutex_;
    std::optional<Coalesced> coalesced_;
};

} // namespace
