// torch's types and operators as the library's. _operands.py does the same for the shim in Python.
#pragma once

#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>

#include <shoal/shoal.h>

namespace {

// As users write it: torch.int16.
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
    case at::kByte:
    case at::kBool: return SHOAL_UINT8;
    default: return std::nullopt;
    }
}

// What is moved only: the types of old, and for all others bytes in as many parts as an element has.
struct Moved {
    shoal_type type;
    size_t factor; // of the library's elements in one of torch's

    explicit Moved(at::ScalarType scalar)
    {
        const std::optional<shoal_type> same = arithmetic_type(scalar);
        type = same.value_or(SHOAL_UINT8);
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
    default: C10_THROW_ERROR(ValueError, "shoal: this is no operator of a reduction");
    }
}

// A truth value is a byte of 0 or 1: a sum of such is "or", a product "and".
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
    const std::optional<shoal_type> type = arithmetic_type(scalar);
    TORCH_CHECK_TYPE(type, "shoal: cannot reduce tensors of ", name_of(scalar),
                     "; float32, float64, bfloat16, float16, int64, int32, int8, uint8 and bool can be reduced: convert the tensor "
                     "first");
    Reduced reduced{*type, operator_of(op)};
    if (scalar == at::kBool)
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
