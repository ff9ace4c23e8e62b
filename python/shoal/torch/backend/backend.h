// The back-end of torch.distributed: each collective and message of torch as a call of the library.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <shoal/shoal.h>

#include "poster.h"
#include "types.h"

namespace {

class ShoalBackend : public Poster {
  public:
    using Poster::Poster;

    // ---- collectives ----

    Ref<c10d::Work> broadcast(Tensors &tensors, const c10d::BroadcastOptions &o) override
    {
        const Tensor &tensor = only(tensors);
        const Moved moved(tensor.scalar_type());
        Operands operands;
        void *memory = operands.output(tensor, o.rootRank == rank_);
        return start(c10d::OpType::BROADCAST, "shoal:broadcast", tensors, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_broadcast_post(comm, memory, memory, moved.count(tensor.numel()), moved.type,
                                                     checked_root(o.rootRank), options, out);
                     });
    }

    Ref<c10d::Work> allreduce(Tensors &tensors, const c10d::AllreduceOptions &o) override
    {
        const Tensor &tensor = only(tensors);
        const Reduced reduced = reduction(tensor.scalar_type(), o.reduceOp);
        Operands operands;
        void *memory = operands.output(tensor, true);
        return start(c10d::OpType::ALLREDUCE, "shoal:all_reduce", tensors, o, std::move(operands), reduced.scale,
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_allreduce_post(comm, memory, memory, count(tensor), reduced.type, reduced.op, options,
                                                     out);
                     });
    }

    Ref<c10d::Work> allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &o) override
    {
        TORCH_CHECK_VALUE(!tensors.empty(), "shoal: no tensors to reduce");
        check_types(tensors, tensors[0].scalar_type());
        const Reduced reduced = reduction(tensors[0].scalar_type(), o.reduceOp);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (const Tensor &tensor : tensors) {
            void *memory = operands.output(tensor, true);
            parts.push_back({memory, memory, count(tensor)});
        }
        return start(c10d::OpType::COALESCED, "shoal:all_reduce_coalesced", tensors, o, std::move(operands), reduced.scale,
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_allreduce_coalesced_post(comm, parts.data(), parts.size(), reduced.type, reduced.op,
                                                               options, out);
                     });
    }

    Ref<c10d::Work> reduce(Tensors &tensors, const c10d::ReduceOptions &o) override
    {
        const Tensor &tensor = only(tensors);
        const Reduced reduced = reduction(tensor.scalar_type(), o.reduceOp);
        const bool is_root = o.rootRank == rank_;
        Operands operands;
        void *memory = is_root ? operands.output(tensor, true) : operands.input(tensor);
        if (!is_root)
            operands.outputs.push_back(tensor);
        return start(c10d::OpType::REDUCE, "shoal:reduce", tensors, o, std::move(operands), reduced.scale,
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_reduce_post(comm, memory, is_root ? memory : nullptr, count(tensor), reduced.type,
                                                  reduced.op, checked_root(o.rootRank), options, out);
                     });
    }

    Ref<c10d::Work> allgather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &o) override
    {
        TORCH_CHECK_VALUE(outputs.size() == 1, "shoal: one list of outputs is wanted here, not ", outputs.size());
        const Tensor &input = only(inputs);
        const Tensors &parts = outputs[0];
        check_parts(parts, input.scalar_type());
        TORCH_CHECK_VALUE(parts[rank_].numel() == input.numel(), "shoal: the input has ", input.numel(),
                          " elements, but this rank's part of the output ", parts[rank_].numel());
        const Moved moved(input.scalar_type());
        const std::vector<size_t> counts = lengths(parts, moved.factor);
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(parts);
        return start(c10d::OpType::ALLGATHER, "shoal:all_gather", inputs, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         if (are_equal_lengths(parts))
                             return shoal_allgather_post(comm, source, dest, counts[0], moved.type, options, out);
                         return shoal_allgatherv_post(comm, source, dest, counts.data(), nullptr, moved.type, options, out);
                     });
    }

    Ref<c10d::Work> _allgather_base(Tensor &output, Tensor &input, const c10d::AllgatherOptions &o) override
    {
        check_gathered(output, input);
        const Moved moved(input.scalar_type());
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(output);
        return start(c10d::OpType::_ALLGATHER_BASE, "shoal:all_gather_into_tensor", input, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_allgather_post(comm, source, dest, moved.count(input.numel()), moved.type, options, out);
                     });
    }

    Ref<c10d::Work> allgather_coalesced(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty() && static_cast<int>(outputs.size()) == size_, "shoal: ", outputs.size(),
                          " lists of outputs of ", inputs.size(), " inputs for ", size_, " ranks");
        for (const Tensors &list : outputs)
            TORCH_CHECK_VALUE(list.size() == inputs.size(), "shoal: a list of ", list.size(), " outputs for ", inputs.size(),
                              " inputs");
        std::vector<Tensors> rows(inputs.size());
        for (size_t i = 0; i < inputs.size(); i++) {
            check_tensor(inputs[i]);
            for (const Tensors &list : outputs)
                rows[i].push_back(list[i]);
            check_parts(rows[i], inputs[i].scalar_type());
            check_equal(rows[i], inputs[i]);
        }
        if (inputs.size() == 1) // both shims make this call of it
            return allgather(rows, inputs, o);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (size_t i = 0; i < inputs.size(); i++) // moved as bytes, as the types may differ
            parts.push_back({operands.input(inputs[i]), operands.output(rows[i]), inputs[i].nbytes()});
        operands.outputs.clear(); // in the caller's order
        for (const Tensors &list : outputs)
            operands.outputs.insert(operands.outputs.end(), list.begin(), list.end());
        return gather_each("shoal:all_gather_coalesced", inputs, o, std::move(operands), parts);
    }

    Ref<c10d::Work> allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs, const c10d::AllgatherOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "shoal: ", outputs.size(), " outputs for ",
                          inputs.size(), " inputs");
        if (inputs.size() == 1) // both shims make this call of it
            return _allgather_base(outputs[0], inputs[0], o);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (size_t i = 0; i < inputs.size(); i++) { // moved as bytes, as the types may differ
            check_gathered(outputs[i], inputs[i]);
            parts.push_back({operands.input(inputs[i]), operands.output(outputs[i]), inputs[i].nbytes()});
        }
        return gather_each("shoal:all_gather_into_tensor_coalesced", inputs, o, std::move(operands), parts);
    }

    Ref<c10d::Work> gather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::GatherOptions &o) override
    {
        const Tensor &input = only(inputs);
        const Moved moved(input.scalar_type());
        const int root = checked_root(o.rootRank);
        Operands operands;
        void *source = operands.input(input), *dest = nullptr;
        if (root == rank_) {
            TORCH_CHECK_VALUE(outputs.size() == 1, "shoal: the root needs one list of outputs, not ", outputs.size());
            check_parts(outputs[0], input.scalar_type());
            check_equal(outputs[0], input);
            dest = operands.output(outputs[0]);
        } else {
            TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "shoal: only the root, rank ", root, ", has outputs");
        }
        return start(c10d::OpType::GATHER, "shoal:gather", inputs, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_gather_post(comm, source, dest, moved.count(input.numel()), moved.type, root,
                                                  options, out);
                     });
    }

    Ref<c10d::Work> scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ScatterOptions &o) override
    {
        const Tensor &output = only(outputs);
        const Moved moved(output.scalar_type());
        const int root = checked_root(o.rootRank);
        Operands operands;
        void *dest = operands.output(output), *source = nullptr;
        if (root == rank_) {
            TORCH_CHECK_VALUE(inputs.size() == 1, "shoal: the root needs one list of inputs, not ", inputs.size());
            check_parts(inputs[0], output.scalar_type());
            check_equal(inputs[0], output);
            source = operands.input(inputs[0]);
        } else {
            TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "shoal: only the root, rank ", root, ", has inputs");
        }
        return start(c10d::OpType::SCATTER, "shoal:scatter", root == rank_ ? at::TensorList(inputs[0]) : at::TensorList(),
                     o, std::move(operands), [&](auto *comm, auto *options, auto *out) {
                         return shoal_scatter_post(comm, source, dest, moved.count(output.numel()), moved.type,
                                                   root, options, out);
                     });
    }

    Ref<c10d::Work> reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ReduceScatterOptions &o) override
    {
        TORCH_CHECK_VALUE(inputs.size() == 1, "shoal: one list of inputs is wanted here, not ", inputs.size());
        const Tensor &output = only(outputs);
        const Tensors &parts = inputs[0];
        check_parts(parts, output.scalar_type());
        TORCH_CHECK_VALUE(parts[rank_].numel() == output.numel(), "shoal: the output has ", output.numel(),
                          " elements, but this rank's part of the input ", parts[rank_].numel());
        const Reduced reduced = reduction(output.scalar_type(), o.reduceOp);
        const std::vector<size_t> counts = lengths(parts, 1);
        Operands operands;
        void *source = operands.input(parts), *dest = operands.output(output);
        return start(
            c10d::OpType::REDUCE_SCATTER, "shoal:reduce_scatter", parts, o, std::move(operands), reduced.scale,
            [&](auto *comm, auto *options, auto *out) {
                if (are_equal_lengths(parts))
                    return shoal_reduce_scatter_post(comm, source, dest, counts[0], reduced.type, reduced.op, options, out);
                return shoal_reduce_scatterv_post(comm, source, dest, counts.data(), reduced.type, reduced.op, options, out);
            });
    }

    Ref<c10d::Work> _reduce_scatter_base(Tensor &output, Tensor &input, const c10d::ReduceScatterOptions &o) override
    {
        check_gathered(input, output);
        const Reduced reduced = reduction(output.scalar_type(), o.reduceOp);
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(output);
        return start(c10d::OpType::_REDUCE_SCATTER_BASE, "shoal:reduce_scatter_tensor", input, o, std::move(operands),
                     reduced.scale, [&](auto *comm, auto *options, auto *out) {
                         return shoal_reduce_scatter_post(comm, source, dest, count(output), reduced.type, reduced.op, options,
                                                          out);
                     });
    }

    Ref<c10d::Work> reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                    const c10d::ReduceScatterOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "shoal: ", outputs.size(), " outputs for ",
                          inputs.size(), " inputs");
        if (inputs.size() == 1)
            return _reduce_scatter_base(outputs[0], inputs[0], o);
        check_types(inputs, inputs[0].scalar_type());
        const Reduced reduced = reduction(inputs[0].scalar_type(), o.reduceOp);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (size_t i = 0; i < inputs.size(); i++) {
            check_gathered(inputs[i], outputs[i]);
            parts.push_back({operands.input(inputs[i]), operands.output(outputs[i]), count(outputs[i])});
        }
        return start(c10d::OpType::COALESCED, "shoal:reduce_scatter_tensor_coalesced", inputs, o, std::move(operands),
                     reduced.scale, [&](auto *comm, auto *options, auto *out) {
                         return shoal_reduce_scatter_coalesced_post(comm, parts.data(), parts.size(), reduced.type, reduced.op,
                                                                    options, out);
                     });
    }

    Ref<c10d::Work> alltoall_base(Tensor &output, Tensor &input, std::vector<int64_t> &output_splits,
                                  std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &o) override
    {
        check_types({output, input}, input.scalar_type());
        const Moved moved(input.scalar_type());
        const std::vector<size_t> gives = split_counts(input, input_splits, size_, moved.factor),
                                  takes = split_counts(output, output_splits, size_, moved.factor);
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(output);
        return start(c10d::OpType::ALLTOALL_BASE, "shoal:all_to_all_single", input, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         // Calls alltoallv even if the splits are even: other ranks may have passed explicit splits.
                         return shoal_alltoallv_post(comm, source, gives.data(), nullptr, dest, takes.data(), nullptr,
                                                     moved.type, options, out);
                     });
    }

    Ref<c10d::Work> alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty(), "shoal: no inputs");
        check_parts(inputs, inputs[0].scalar_type());
        check_parts(outputs, inputs[0].scalar_type());
        const Moved moved(inputs[0].scalar_type());
        const std::vector<size_t> gives = lengths(inputs, moved.factor), takes = lengths(outputs, moved.factor);
        Operands operands;
        void *source = operands.input(inputs), *dest = operands.output(outputs);
        return start(c10d::OpType::ALLTOALL, "shoal:all_to_all", inputs, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_alltoallv_post(comm, source, gives.data(), nullptr, dest, takes.data(), nullptr,
                                                     moved.type, options, out);
                     });
    }

    // A barrier of the processes. First waits for the current streams of the devices that the group has served.
    Ref<c10d::Work> barrier(const c10d::BarrierOptions &o) override
    {
        {
            WithoutGil released;
            streams_.wait_for_current();
        }
        return start(c10d::OpType::BARRIER, "shoal:barrier", {}, o, Operands(),
                     [](auto *comm, auto *options, auto *out) { return shoal_barrier_post(comm, options, out); });
    }

    // If its deadline passes, the library's barrier names the ranks that are missing.
    void monitoredBarrier(const c10d::BarrierOptions &o, bool) override
    {
        barrier(o)->wait(kNoTimeout);
    }

    // ---- messages ----

    Ref<c10d::Work> send(Tensors &tensors, int peer, int tag) override
    {
        return message(c10d::OpType::SEND, "shoal:send", tensors, peer, tag);
    }

    Ref<c10d::Work> recv(Tensors &tensors, int peer, int tag) override
    {
        return message(c10d::OpType::RECV, "shoal:recv", tensors, peer, tag);
    }

    Ref<c10d::Work> recvAnysource(Tensors &, int) override
    {
        TORCH_CHECK_NOT_IMPLEMENTED(false, "shoal: a receive from any rank is not supported: pass src to recv()");
    }

    // ---- memory ----

    // Allocates DDP's buckets. For complex gradients DDP expects real numbers, two for each, as in the buckets that it
    // allocates itself.
    at::Tensor allocateTensor(long size, at::TensorOptions options)
    {
        const auto type = c10::typeMetaToScalarType(options.dtype());
        if (!c10::isComplexType(type))
            return allocate(size, options);
        return allocate(2 * size, options.dtype(c10::toRealValueType(type)));
    }

    // Returns ordinary memory if there is no shared memory; the library has logged why.
    at::Tensor allocate(long size, at::TensorOptions options)
    {
        const auto type = c10::typeMetaToScalarType(options.dtype());
        const int64_t bytes = size * static_cast<int64_t>(c10::elementSize(type));
        if (bytes >= refused_ || !options.device().is_cpu())
            return at::empty({size}, options);
        try {
            return shared_bytes(group_->context(), bytes).view(type);
        } catch (const c10::OutOfMemoryError &) {
            refused_ = bytes; // so that later steps do not try again
            return at::empty({size}, options);
        }
    }

    // Returns true for the CPU only, which has no device number.
    bool supportsTensorAlloc(c10::DeviceIndex device)
    {
        return device < 0;
    }

    // ---- life ----

    // Makes a group of the named ranks of this group, in that order. They all call it. Returns no group on other ranks.
    Ref<c10d::Backend> split(const Ref<c10d::Store> &store, const std::vector<int> &ranks, const Ref<Options> &options)
    {
        const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
        if (mine == ranks.end())
            return nullptr;
        const milliseconds timeout = options ? options->timeout : timeout_.load();
        pybind11::gil_scoped_acquire gil;
        const pybind11::object join = pybind11::module_::import("shoal.torch").attr("join");
        return pybind11::cast<Ref<c10d::Backend>>(
            join(store, mine - ranks.begin(), ranks.size(), timeout, "split", group_->ranks_of(ranks)));
    }

    bool supportsShrinking() const
    {
        return true;
    }

    // For torch.distributed.shrink_group: a group of all ranks except the excluded ones, which all of them call.
    Ref<c10d::Backend> shrink(const std::vector<int64_t> &excluded, int flags, const Ref<Options> &options)
    {
        const std::vector<int> gone(excluded.begin(), excluded.end());
        const milliseconds timeout = options ? options->timeout : timeout_.load();
        shoal_comm_options made = SHOAL_COMM_OPTIONS_INIT;
        made.timeout_ms = made.create_timeout_ms = deadline_ms(timeout);
        WithoutGil released;
        if (flags & kShrinkAbort)
            group_->abort();
        shoal_comm *smaller = nullptr;
        const shoal_status status = group_->with([&](auto *comm) {
            return shoal_comm_shrink(comm, gone.data(), gone.size(), &made, &smaller);
        });
        TORCH_CHECK_WITH(DistBackendError, status == SHOAL_OK, "shoal:shrink: ", timed_out(status),
                         failure_text(group_->context(), nullptr, status));
        const int size = shoal_comm_size(smaller);
        std::vector<int> left;
        for (int rank = 0; rank < size_; rank++)
            if (std::find(gone.begin(), gone.end(), rank) == gone.end())
                left.push_back(rank);
        check_left(smaller, left);
        auto group = std::make_shared<Communicator>(group_->context(), smaller, "shrunk", group_->ranks_of(left));
        return c10::make_intrusive<ShoalBackend>(std::move(group), shoal_comm_rank(smaller), size, timeout);
    }

  private:
    static constexpr int kShrinkAbort = 1; // torch.distributed.SHRINK_ABORT

    // torch numbers the ranks of the new group by this rank's list of excluded ranks, so no other rank may be missing. The
    // ranks compare: they all continue, or they all get an error. Frees the communicator in that case.
    void check_left(shoal_comm *smaller, const std::vector<int> &left) const
    {
        struct Listed {
            int32_t rank, left;
        };
        std::vector<Listed> there(shoal_comm_size(smaller));
        const Listed own = {rank_, static_cast<int32_t>(left.size())};
        const shoal_status status = shoal_allgather(smaller, &own, there.data(), 2, SHOAL_INT32, nullptr);
        const auto other = std::find_if(there.begin(), there.end(), [&](const Listed &each) { return each.left != own.left; });
        std::string lost;
        for (const int rank : left)
            if (std::none_of(there.begin(), there.end(), [rank](const Listed &each) { return each.rank == rank; }))
                lost += c10::str(lost.empty() ? "" : ", ", rank);
        if (status == SHOAL_OK && lost.empty() && other == there.end())
            return;
        const std::string failure = status == SHOAL_OK ? "" : failure_text(group_->context(), smaller, status);
        shoal_comm_free(smaller);
        TORCH_CHECK_WITH(DistBackendError, status == SHOAL_OK, "shoal:shrink: ", timed_out(status), failure);
        TORCH_CHECK_WITH(DistBackendError, lost.empty(), "shoal:shrink: more ranks are lost than ranks_to_exclude lists: ", lost,
                         "; exclude them as well, on all remaining ranks");
        TORCH_CHECK_WITH(DistBackendError, false, "shoal:shrink: ranks_to_exclude differs between the ranks: ",
                         size_ - own.left, " here, and ", size_ - other->left, " on rank ", other->rank,
                         "; pass the same list on all remaining ranks");
    }

    static size_t count(const Tensor &tensor)
    {
        return static_cast<size_t>(tensor.numel());
    }

    int checked_root(int64_t rank) const
    {
        TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "shoal: there is no rank ", rank, " in a group of ", size_);
        return static_cast<int>(rank);
    }

    void check_parts(const Tensors &parts, at::ScalarType type) const
    {
        TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == size_, "shoal: a list of ", parts.size(), " tensors for ", size_,
                          " ranks");
        check_types(parts, type);
    }

    void check_equal(const Tensors &parts, const Tensor &one) const
    {
        TORCH_CHECK_VALUE(are_equal_lengths(parts) && parts[0].numel() == one.numel(),
                          "shoal: the tensors of the list must have as many elements as this rank's, ", one.numel());
    }

    void check_gathered(const Tensor &all, const Tensor &part) const
    {
        check_types({all, part}, part.scalar_type());
        TORCH_CHECK_VALUE(all.numel() == part.numel() * size_, "shoal: the larger tensor must have ", size_,
                          " times the elements of the smaller, but has ", all.numel(), " to ", part.numel());
    }

    Ref<c10d::Work> gather_each(const char *title, at::TensorList inputs, const c10d::AllgatherOptions &o, Operands operands,
                                const std::vector<shoal_tensor> &parts)
    {
        const shoal_type type = moved_together(inputs);
        return start(c10d::OpType::COALESCED, title, inputs, o, std::move(operands), [&](auto *comm, auto *options, auto *out) {
            return shoal_allgather_coalesced_post(comm, parts.data(), parts.size(), type, options, out);
        });
    }

    std::atomic<int64_t> refused_{std::numeric_limits<int64_t>::max()};
};

} // namespace
