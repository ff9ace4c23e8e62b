// Posting: what all calls of the back-end do alike, and what torch asks of it beside calls.
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

// torch 2.4 has asyncOp in some structs of options, later versions in all. Without it nobody knows: a work is waited for.
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

// A group's calls: their deadline, who waits for them, and those between startCoalescing and endCoalescing.
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

    // Whether batch_isend_irecv is one work, which devices need. Where the machine has none, each message is a work, as over
    // Gloo. A torch that was built for a device names it on every machine.
    bool supportsCoalescing() const
    {
        const std::optional<c10::DeviceType> type = at::getAccelerator();
        return type && c10::impl::hasDeviceGuardImpl(*type) && c10::impl::VirtualGuardImpl(*type).deviceCount() > 0;
    }

    void startCoalescing() override
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        coalesced_.emplace(); // anew where the last one was never ended: torch does not end it when an exception leaves it
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
    // Messages come without options; whether they will be waited for at once nobody knows.
    struct Message {
        milliseconds timeout = c10d::kUnsetTimeout;
    };

    template <class Options, class Post>
    Ref<c10d::Work> start(c10d::OpType type, const char *title, at::TensorList inputs, const Options &o, Operands operands,
                          Post post)
    {
        return start(type, title, inputs, o, std::move(operands), 1, post);
    }

    // Posts a call; waits for it where the caller would do so at once. On a device nobody waits: the current stream does.
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
            outcome->operands.record_all_on(*stream); // some of the library's copies may be under way
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

    // Sends or receives a tensor. Several on a device between startCoalescing and endCoalescing are posted together at the end:
    // one behind another on a stream, they could wait for each other. An exception ends the coalescing: torch calls no
    // endCoalescing then, and later messages would be listed and never sent.
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

    // Lists a message for endCoalescing; false where it is to be posted at once.
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
