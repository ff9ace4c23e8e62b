// Tensors in the form that the library needs: which are refused, which are copied into one vector, and which are copied back.
// _operands.py does this for the shim in Python. test_shims_alike.py compares the error texts and the numbers of copies of
// both.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include "streams.h"
#include "types.h"

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

void check_tensor(const Tensor &tensor)
{
    TORCH_CHECK_VALUE(tensor.defined(), "shoal: a tensor is not defined");
    if (!tensor.is_cpu())
        check_served(tensor);
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "shoal: a tensor is sparse; only dense tensors can be sent: use to_dense() first");
}

void check_types(const Tensors &tensors, at::ScalarType type)
{
    for (const Tensor &tensor : tensors) {
        check_tensor(tensor);
        TORCH_CHECK_TYPE(tensor.scalar_type() == type, "shoal: the tensors of one call have different types, ", name_of(type),
                         " and ", name_of(tensor.scalar_type()));
    }
}

const Tensor &only(const Tensors &tensors)
{
    TORCH_CHECK_VALUE(tensors.size() == 1, "shoal: one tensor is wanted here, not ", tensors.size());
    check_tensor(tensors[0]);
    return tensors[0];
}

// Returns true if memory holds the elements unchanged and in their order.
bool is_plain(const Tensor &tensor)
{
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

Tensor plain(const Tensor &tensor)
{
    at::NoGradGuard no_grad;
    return is_plain(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options()).copy_(tensor);
}

// Returns true if the tensors are adjacent in memory, in this order. The position of empty tensors does not matter.
bool is_row(const Tensors &tensors)
{
    const char *at = nullptr;
    for (const Tensor &tensor : tensors) {
        if (!tensor.numel())
            continue;
        if (!is_plain(tensor) || (at && tensor.data_ptr() != at))
            return false;
        at = static_cast<const char *>(tensor.data_ptr()) + tensor.nbytes();
    }
    return true;
}

int64_t sum_of_lengths(const Tensors &tensors)
{
    int64_t sum = 0;
    for (const Tensor &tensor : tensors)
        sum += tensor.numel();
    return sum;
}

bool are_equal_lengths(const Tensors &tensors)
{
    return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor &t) { return t.numel() == tensors[0].numel(); });
}

// The operands of one call, as memory in the order that the library needs. Tensors in another order are copied; bring_back
// copies the results into them.
//
// On a device the copies are put on the current stream, like the caller's own kernels. bring_back uses the stream of the guard
// under which it is called.
class Operands {
  public:
    void *input(const Tensor &tensor)
    {
        check_place(tensor);
        return is_plain(tensor) ? keep(tensor) : keep_copy(plain(tensor));
    }
    void *input(const Tensors &tensors)
    {
        check_place(tensors);
        return is_row(tensors) ? keep(tensors) : keep_copy(flat(tensors, true));
    }
    void *output(const Tensor &tensor, bool has_contents = false)
    {
        check_place(tensor);
        outputs.push_back(tensor);
        if (is_plain(tensor))
            return keep(tensor);
        const Tensor copy = has_contents ? plain(tensor) : at::empty(tensor.sizes(), tensor.options());
        copies_.emplace_back(Tensors{tensor}, copy);
        return keep_copy(copy);
    }
    void *output(const Tensors &tensors)
    {
        check_place(tensors);
        outputs.insert(outputs.end(), tensors.begin(), tensors.end());
        if (is_row(tensors))
            return keep(tensors);
        const Tensor copy = flat(tensors, false);
        copies_.emplace_back(tensors, copy);
        return keep_copy(copy);
    }

    // Returns the device of all operands, or nothing if they are in host memory.
    std::optional<c10::Device> device() const
    {
        return place_ && !place_->is_cpu() ? place_ : std::nullopt;
    }

    void bring_back()
    {
        c10::InferenceMode inference; // records no gradients, and allows writes to inference tensors
        for (const auto &[tensors, copy] : copies_) {
            const Tensor row = copy.view(-1);
            int64_t at = 0;
            for (const Tensor &tensor : tensors) {
                tensor.copy_(row.narrow(0, at, tensor.numel()).view(tensor.sizes()));
                at += tensor.numel();
            }
        }
    }
    // Records the use on this stream, so that torch does not hand the memory to others before the stream has finished with it.
    void record_on(const c10::Stream &stream) const
    {
        const c10::impl::VirtualGuardImpl device(stream.device_type());
        for (const Tensor &copy : made_)
            device.recordDataPtrOnStream(copy.storage().data_ptr(), stream);
        for (const auto &[tensors, copy] : copies_)
            for (const Tensor &tensor : tensors)
                device.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    // Like record_on, but for all memory that the library's copies may touch.
    void record_all_on(const c10::Stream &stream) const
    {
        record_on(stream);
        const c10::impl::VirtualGuardImpl device(stream.device_type());
        for (const Tensor &tensor : alive_)
            device.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }

    // Releases the memory that the library may touch, except the outputs that the caller asked for.
    void let_go()
    {
        alive_.clear();
        copies_.clear();
        made_.clear();
    }

    Tensors outputs;

  private:
    void *keep(const Tensor &tensor)
    {
        alive_.push_back(tensor);
        return tensor.data_ptr();
    }
    void *keep(const Tensors &tensors)
    {
        alive_.insert(alive_.end(), tensors.begin(), tensors.end());
        const auto first = std::find_if(tensors.begin(), tensors.end(), [](const Tensor &tensor) { return tensor.numel() > 0; });
        return first == tensors.end() ? nullptr : first->data_ptr();
    }
    void *keep_copy(const Tensor &copy)
    {
        made_.push_back(copy);
        return copy.data_ptr();
    }
    void check_place(const Tensor &tensor)
    {
        if (!place_)
            place_ = tensor.device();
        TORCH_CHECK_VALUE(tensor.device() == *place_, "shoal: the tensors of one call are on different devices, ", *place_,
                          " and ", tensor.device());
    }
    void check_place(const Tensors &tensors)
    {
        for (const Tensor &tensor : tensors)
            check_place(tensor);
    }
    static Tensor flat(const Tensors &tensors, bool has_contents)
    {
        at::NoGradGuard no_grad;
        const Tensor row = at::empty({sum_of_lengths(tensors)}, tensors[0].options());
        int64_t at = 0;
        for (const Tensor &tensor : tensors) {
            if (has_contents)
                row.narrow(0, at, tensor.numel()).view(tensor.sizes()).copy_(tensor);
            at += tensor.numel();
        }
        return row;
    }

    std::optional<c10::Device> place_; // the device of the first operand, and so of all
    Tensors alive_;                                  // the caller's tensors
    Tensors made_;                                   // copies of the caller's tensors, and copies for outputs
    std::vector<std::pair<Tensors, Tensor>> copies_; // copies, each with the tensors into which it is copied back
};

// Returns the number of elements in each rank's part of a tensor cut along its first dimension. Empty splits mean equal parts.
std::vector<size_t> split_counts(const Tensor &tensor, const std::vector<int64_t> &splits, int size, size_t factor)
{
    const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
    if (splits.empty()) {
        TORCH_CHECK_VALUE(rows % size == 0, "shoal: a tensor of ", rows, " rows cannot be cut into ", size, " equal parts");
        return std::vector<size_t>(size, tensor.numel() / size * factor);
    }
    TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == size, "shoal: ", splits.size(), " splits for ", size, " ranks");
    int64_t sum = 0;
    for (const int64_t split : splits) {
        TORCH_CHECK_VALUE(split >= 0, "shoal: a split of ", split, " rows");
        TORCH_CHECK_VALUE(!__builtin_add_overflow(sum, split, &sum), "shoal: the splits add up to 2**63 rows or more, but the tensor has ", rows);
    }
    TORCH_CHECK_VALUE(sum == rows, "shoal: the splits add up to ", sum, " rows, but the tensor has ", rows);
    const size_t row = rows ? tensor.numel() / rows * factor : 0;
    std::vector<size_t> counts;
    for (const int64_t split : splits)
        counts.push_back(static_cast<size_t>(split) * row);
    return counts;
}

std::vector<size_t> lengths(const Tensors &tensors, size_t factor)
{
    std::vector<size_t> counts;
    for (const Tensor &tensor : tensors)
        counts.push_back(static_cast<size_t>(tensor.numel()) * factor);
    return counts;
}

} // namespace
