// Converts torch's types and operators to the library's. _operands.py does this for the shim in Python.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>

#include <shoal/shoal.h>

namespace {

// The name as users write it: torch.int16.
std::string name_of(at::ScalarType type)
{
    pybind11::gil_scoped_acquire gil;
    return pybind11::str(pybind11::cast(type));
}

std::optional<shoal_type> arithmetic_type(at::ScalarType type)
{
    switch (type) {
    case at::kFloat: return SHOAL_FLOAT32;
    case at::kDouble: return SHOAL_FLOAT64;
    case at::kBFloat16: return SHOAL_BFLOAT16;
    case at::kHalf: return SHOAL_FLOAT16;
    case at::kLong: return SHOAL_INT64;
    case at::kInt: return SHOAL_INT32;
    case at::kChar: return SHOAL_INT8;
    case at::kByte: return SHOAL_UINT8;
    default: return std::nullopt;
    }
}

// The type of the bytes of such elements. It carries torch's type as a tag, so that ranks with different types are detected.
shoal_type as_bytes(at::ScalarType scalar)
{
    return SHOAL_TYPE_TAGGED(SHOAL_UINT8, static_cast<int>(scalar) + 1);
}

constexpr int kSeveral = 128, kSeveralEnd = 256; // range of tags for tensors of several types

// Returns the type in which the bytes of several tensors travel.
shoal_type moved_together(at::TensorList tensors)
{
    const at::ScalarType first = tensors[0].scalar_type();
    bool is_one = true;
    int digest = 0;
    for (const at::Tensor &tensor : tensors) {
        is_one &= tensor.scalar_type() == first;
        digest = (31 * digest + static_cast<int>(tensor.scalar_type()) + 1) % (kSeveralEnd - kSeveral);
    }
    return is_one ? as_bytes(first) : SHOAL_TYPE_TAGGED(SHOAL_UINT8, kSeveral + digest);
}

// Replaces the numbers of tags in the library's text by torch's names of types.
std::string in_words_of_torch(std::string text)
{
    static constexpr char kTagged[] = "uint8 tagged ";
    for (size_t from; (from = text.find(kTagged)) != std::string::npos;) {
        const size_t digits = from + sizeof kTagged - 1, end = std::min(text.find_first_not_of("0123456789", digits), text.size());
        const int tag = std::atoi(text.c_str() + digits);
        const bool is_one = tag > 0 && tag <= static_cast<int>(at::ScalarType::NumOptions);
        text.replace(from, end - from, "bytes of " + (is_one ? name_of(static_cast<at::ScalarType>(tag - 1)) : "several types"));
    }
    return text;
}

// The type of elements that are only moved: the library's type if it has one, else bytes, several for each element.
struct Moved {
    shoal_type type;
    size_t factor; // the library's elements in one of torch's

    explicit Moved(at::ScalarType scalar)
    {
        const std::optional<shoal_type> same = arithmetic_type(scalar);
        type = same.value_or(as_bytes(scalar));
        factor = same ? 1 : c10::elementSize(scalar);
    }
    size_t count(int64_t numel) const
    {
        return static_cast<size_t>(numel) * factor;
    }
};

struct Reduced {
    shoal_type type;
    shoal_op op;
    double scale = 1;
};

shoal_op operator_of(c10d::ReduceOp::RedOpType op)
{
    switch (op) {
    case c10d::ReduceOp::SUM: return SHOAL_SUM;
    case c10d::ReduceOp::AVG: return SHOAL_AVG;
    case c10d::ReduceOp::PRODUCT: return SHOAL_PROD;
    case c10d::ReduceOp::MIN: return SHOAL_MIN;
    case c10d::ReduceOp::MAX: return SHOAL_MAX;
    case c10d::ReduceOp::BAND: return SHOAL_BITAND;
    case c10d::ReduceOp::BOR: return SHOAL_BITOR;
    case c10d::ReduceOp::BXOR: return SHOAL_BITXOR;
    case c10d::ReduceOp::PREMUL_SUM: return SHOAL_SCALED_SUM;
    default: C10_THROW_ERROR(ValueError, "shoal: this is not an operator of a reduction");
    }
}

// A truth value is a byte of 0 or 1: their sum is "or", their product "and".
shoal_op truth_operator(shoal_op op)
{
    switch (op) {
    case SHOAL_SUM: return SHOAL_MAX;
    case SHOAL_PROD: return SHOAL_MIN;
    case SHOAL_AVG:
    case SHOAL_SCALED_SUM: C10_THROW_ERROR(TypeError, "shoal: bool tensors have no average and no scaled sum");
    default: return op;
    }
}

Reduced reduction(at::ScalarType scalar, const c10d::ReduceOp &op)
{
    const bool is_truth = scalar == at::kBool;
    const std::optional<shoal_type> type = is_truth ? as_bytes(scalar) : arithmetic_type(scalar);
    TORCH_CHECK_TYPE(type, "shoal: cannot reduce tensors of ", name_of(scalar),
                     "; float32, float64, bfloat16, float16, int64, int32, int8, uint8 and bool can be reduced: convert the tensor "
                     "first");
    Reduced reduced{*type, operator_of(op)};
    if (is_truth)
        reduced.op = truth_operator(reduced.op);
    TORCH_CHECK_TYPE(!at::isFloatingType(scalar) || reduced.op < SHOAL_BITAND || reduced.op == SHOAL_SCALED_SUM,
                     "shoal: the bitwise operators are for integers and bool, not for ", name_of(scalar));
    if (reduced.op == SHOAL_SCALED_SUM) {
        const auto *factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement *>(op.supplement_.get());
        TORCH_CHECK_VALUE(factor, "shoal: PREMUL_SUM comes without its factor");
        reduced.scale = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
    }
    return reduced;
}

} // namespace
