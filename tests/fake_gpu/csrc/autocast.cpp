// torch.autocast: which operations compute in the lower precision, in fp32, or in the widest dtype of their
// inputs.
//
// Each of these rules is one boxed function. Torch's own templates instantiate one per operation, which takes
// a minute to compile.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "tensors.h"

namespace fake_gpu {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

IValue cast(const IValue &value, at::ScalarType dtype) {
    if (value.isTensor()) return at::autocast::cached_cast(dtype, value.toTensor(), kFakeGpu);
    if (value.isTensorList()) return at::autocast::cached_cast(dtype, value.toTensorList().vec(), kFakeGpu);
    return value;
}

at::ScalarType widest(const c10::ArrayRef<IValue> &values) {
    at::ScalarType dtype = at::autocast::get_lower_precision_fp_from_device_type(kFakeGpu);
    for (const IValue &value : values) {
        if (value.isTensor()) dtype = at::autocast::prioritize(dtype, value.toTensor(), kFakeGpu);
        if (value.isTensorList())
            dtype = at::autocast::prioritize(dtype, value.toTensorList().vec(), kFakeGpu);
    }
    return dtype;
}

void call_cast(const c10::OperatorHandle &op, Stack *stack, at::ScalarType dtype) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
    size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i = first; i < stack->size(); i++) (*stack)[i] = cast((*stack)[i], dtype);
    op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    call_cast(op, stack, at::autocast::get_lower_precision_fp_from_device_type(kFakeGpu));
}

void in_fp32(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    call_cast(op, stack, at::kFloat);
}

void in_widest(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    call_cast(op, stack, widest(torch::jit::last(*stack, op.schema().arguments().size())));
}

// An argument of these operations says their result's dtype, so that no cast of the input is kept.
void to_fp32(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
    const auto &arguments = op.schema().arguments();
    size_t first = stack->size() - arguments.size();
    bool is_eligible = at::autocast::is_autocast_eligible((*stack)[first].toTensor(), kFakeGpu);
    for (size_t i = 0; i < arguments.size(); i++)
        if (is_eligible && arguments[i].name() == "dtype" && (*stack)[first + i].isNone())
            (*stack)[first + i] = at::kFloat;
    op.callBoxed(stack);
}

}  // namespace

// Names as in torch's lists: an operation, or an operation and its overload.
#define OP(function, ...) \
    m.impl(#function __VA_OPT__("." #__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&POLICY>());

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){
#define POLICY in_lower_precision
    AT_FORALL_LOWER_PRECISION_FP(OP)
#undef POLICY
#define POLICY in_fp32
        AT_FORALL_FP32(OP) OP(norm, Scalar) OP(norm, ScalarOpt_dim)
#undef POLICY
#define POLICY to_fp32
            AT_FORALL_FP32_SET_OPT_DTYPE(OP)
#undef POLICY
#define POLICY in_widest
                AT_FORALL_PROMOTE(OP)
#undef POLICY
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace fake_gpu
