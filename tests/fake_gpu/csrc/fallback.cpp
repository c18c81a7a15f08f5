// Every operation that has no kernel of its own here. The meta kernel gives shapes at once; the CPU's kernel
// gives values late.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "random.h"
#include "tensors.h"

namespace fake_gpu {

namespace {

using at::Tensor;
using c10::IValue;
using Values = torch::jit::Stack;

bool is_tensor_list(const IValue &value) { return value.isTensorList() || value.isOptionalTensorList(); }

// The value with each tensor, also of lists, replaced. An undefined tensor counts as one.
template <class Replace>
IValue with_tensors(const IValue &value, Replace &&replace) {
    if (value.isTensor()) return replace(value.toTensor());
    if (!is_tensor_list(value)) return value;
    c10::List<IValue> from = value.toList();
    c10::impl::GenericList to(from.elementType());
    for (const IValue &item : from.vec())
        to.push_back(item.isTensor() ? IValue(replace(item.toTensor())) : item);
    return to;
}

template <class Visit>
void for_each_tensor(const IValue &value, Visit &&visit) {
    with_tensors(value, [&](const Tensor &tensor) {
        visit(tensor);
        return tensor;
    });
}

bool is_written(const c10::Argument &argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_generator(const c10::Argument &argument) {
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    return type->kind() == c10::TypeKind::GeneratorType;
}

bool is_tensor_type(const c10::Argument &result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

// The results of meta kernels, by all that a kernel can see of its arguments. Most meta kernels are Python,
// which takes a millisecond or two.
class KnownShapes {
  public:
    // False where a value is of a kind that has no place in the key.
    static bool add(std::string &key, const IValue &value) {
        if (value.isTensor()) return add_tensor(key, value.toTensor()), true;
        if (value.isList()) {
            auto list = value.toListRef();
            add_bytes(key, 'l', list.size());
            return std::all_of(list.begin(), list.end(), [&](const IValue &item) { return add(key, item); });
        }
        if (value.isNone()) return add_bytes(key, 'n', 0), true;
        if (value.isInt()) return add_bytes(key, 'i', value.toInt()), true;
        if (value.isBool()) return add_bytes(key, 'b', value.toBool()), true;
        if (value.isDouble()) return add_bytes(key, 'f', value.toDouble()), true;
        if (!value.isString()) return false;
        add_bytes(key, 's', value.toStringRef().size());
        key += value.toStringRef();
        return true;
    }

    template <class T>
    static void add_bytes(std::string &key, char kind, const T &value) {
        key += kind;
        key.append(reinterpret_cast<const char *>(&value), sizeof(value));
    }

    bool find(const std::string &key, Values &values) {
        std::lock_guard lock(mutex_);
        auto found = values_.find(key);
        if (found == values_.end()) return false;
        values = found->second;
        return true;
    }

    void keep(const std::string &key, const Values &values) {
        std::lock_guard lock(mutex_);
        values_.emplace(key, values);
    }

  private:
    // A host's tensor is a number, whose value a kernel may look at.
    static void add_tensor(std::string &key, const Tensor &tensor) {
        add_bytes(key, !tensor.defined() ? 'u' : is_ours(tensor) ? 'd' : 'h', 0);
        if (!tensor.defined()) return;
        add_bytes(key, 't', tensor.scalar_type());
        for (c10::IntArrayRef numbers : {tensor.sizes(), tensor.strides()}) {
            add_bytes(key, 'l', numbers.size());
            key.append(reinterpret_cast<const char *>(numbers.data()), numbers.size() * sizeof(int64_t));
        }
        if (is_ours(tensor)) return;
        add_bytes(key, 'w', tensor.unsafeGetTensorImpl()->is_wrapped_number());
        key.append(static_cast<const char *>(tensor.data_ptr()), tensor.element_size());
    }

    std::mutex mutex_;
    std::unordered_map<std::string, Values> values_;
};

KnownShapes &known_shapes() {
    static auto *const one = new KnownShapes;
    return *one;
}

// One call: its arguments, and facts about them that a late run needs.
class Call {
  public:
    Call(const c10::OperatorHandle &op, Values arguments)
        : op_(op), schema_(op.schema()), arguments_(std::move(arguments)) {
        check_operator();
        for (size_t i = 0; i < arguments_.size(); i++) {
            first_tensor_.push_back(tensors_.size());
            add_argument(schema_.arguments()[i], arguments_[i]);
        }
        if (device_ < 0) device_ = current_device();
        TORCH_CHECK_NOT_IMPLEMENTED(
            has_generator_ || !op_.hasTag(at::Tag::nondeterministic_seeded), schema_.name(),
            " draws numbers without a generator when it runs, which is late on fakegpu");
    }

    // Puts the results onto the stack.
    void run(Values &stack) {
        c10::DeviceGuard guard(c10::Device(kFakeGpu, c10::DeviceIndex(device_)));
        if (needs_values())
            run_now(stack);
        else
            run_late(stack);
    }

  private:
    const std::vector<c10::Argument> &returns() const { return schema_.returns(); }

    void check_operator() {
        // Other libraries' kernels may be Python, which may not run late.
        TORCH_CHECK_NOT_IMPLEMENTED(schema_.name().starts_with("aten::"),
                                    "fakegpu runs operations of aten only, not ", schema_.name());
        for (const c10::Argument &result : returns())
            TORCH_CHECK_NOT_IMPLEMENTED(!result.alias_info() || result.alias_info()->isWrite(),
                                        "fakegpu lacks the view ", schema_.name());
    }

    void add_argument(const c10::Argument &argument, const IValue &value) {
        if (is_generator(argument)) {
            generator_ = value;
            has_generator_ = true;
        }
        if (value.isDevice() && value.toDevice().type() == kFakeGpu && device_ < 0)
            device_ = index_of(value.toDevice());
        for_each_tensor(value, [&](const Tensor &tensor) { add_tensor(tensor, is_written(argument)); });
    }

    void add_tensor(const Tensor &tensor, bool is_written) {
        if (is_ours(tensor)) {
            int index = tensor.device().index();
            TORCH_CHECK(device_ < 0 || device_ == index,
                        "Expected all tensors to be on the same device, but found fakegpu:", device_,
                        " and fakegpu:", index, " (", schema_.name(), ")");
            device_ = index;
        } else if (tensor.defined()) {
            TORCH_CHECK(tensor.dim() == 0 && !is_written,
                        "Expected all tensors to be on the same device, but found one on cpu (",
                        schema_.name(), ")");
        }
        tensors_.emplace_back(tensor);
        spans_.push_back(tensors_.back().span(is_written));
    }

    bool has_mask() const {
        bool found = false;
        for (const IValue &value : arguments_)
            if (is_tensor_list(value))
                for_each_tensor(value, [&](const Tensor &tensor) {
                    found |= tensor.defined() &&
                             (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
                });
        return found;
    }

    bool makes_tensors() const {
        for (const c10::Argument &result : returns())
            if (!result.alias_info()) return true;
        return false;
    }

    // Whether shapes, or results other than tensors, depend on values. The host waits for these, as on a GPU.
    bool needs_values() const {
        for (const c10::Argument &result : returns())
            if (!is_tensor_type(result)) return true;
        if (!makes_tensors()) return false;
        bool by_mask = schema_.name().starts_with("aten::index") && has_mask();
        bool has_meta = op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
        return by_mask || !has_meta || op_.hasTag(at::Tag::data_dependent_output) ||
               (op_.hasTag(at::Tag::dynamic_output_shape) && !schema_.name().starts_with("aten::index"));
    }

    // A function that computes on the host, by memory alone: the call's tensors may be gone by then.
    auto kernel() {
        auto arguments = std::make_shared<Values>();
        for (size_t i = 0; i < arguments_.size(); i++) arguments->push_back(host_argument(i));
        return [op = op_, arguments, tensors = tensors_] {
            PlainKernels plain;
            c10::InferenceMode no_inference(false);
            Values stack;
            size_t next = 0;
            for (const IValue &value : *arguments)
                stack.push_back(
                    with_tensors(value, [&](const Tensor &) { return tensors[next++].on_host(); }));
            size_t num_outs = replace_outs(op.schema(), stack);
            if (op.schema().name() == "aten::native_layer_norm_backward") widen_statistics(stack);
            try {
                call(op, stack);
            } catch (const c10::Error &error) {
                throw std::runtime_error(op.schema().name() + ": " + error.what_without_backtrace());
            }
            if (num_outs) write_outs(op.schema(), stack, tensors);
            return stack;
        };
    }

    IValue host_argument(size_t i) {
        if (is_generator(schema_.arguments()[i])) return one_draw();
        const IValue &value = arguments_[i];
        if (value.isDevice()) return c10::Device(at::kCPU);
        return with_tensors(value, [](const Tensor &) { return Tensor(); });
    }

    IValue one_draw() {
        return draw_generator(generator_.isNone() ? default_generator(device_) : generator_.toGenerator());
    }

    // Some kernels resize a tensor given as `out=`, and then give it its size back. They get a tensor of
    // their own.
    static size_t replace_outs(const c10::FunctionSchema &schema, Values &stack) {
        size_t num_outs = 0;
        for (size_t i = 0; i < stack.size(); i++) {
            if (!schema.arguments()[i].is_out() || !stack[i].isTensor()) continue;
            stack[i] = at::empty({0}, stack[i].toTensor().options());
            num_outs++;
        }
        return num_outs;
    }

    // Tensors given as `out=` are the last arguments, and are in the same order among the results.
    static void write_outs(const c10::FunctionSchema &schema, const Values &results,
                           const std::vector<TensorMemory> &tensors) {
        for (size_t i = 0; i < results.size(); i++)
            tensors[tensors.size() - results.size() + i].on_host().copy_(results[i].toTensor());
    }

    // A CPU keeps mean and rstd in the input's dtype, the meta kernel in fp32, as a GPU does.
    static void widen_statistics(Values &stack) {
        auto dtype = stack[1].toTensor().scalar_type();
        for (size_t i : {3, 4})
            if (stack[i].isTensor()) stack[i] = stack[i].toTensor().to(dtype);
    }

    // Torch 2.11 reads results that are arguments once more after the stack has dropped them. So this
    // function owns them.
    static void call(const c10::OperatorHandle &op, Values &stack) {
        Values arguments = stack;
        op.callBoxed(stack);
    }

    // Results by the meta kernel, which raises for wrong arguments.
    Values shapes() {
        std::string key;
        KnownShapes::add_bytes(key, 'o', &schema_);
        KnownShapes::add_bytes(key, 't', c10::get_default_dtype_as_scalartype());
        bool has_key = true;
        for (size_t i = 0; i < arguments_.size() && has_key; i++) {
            bool is_seen = !arguments_[i].isDevice() && !is_generator(schema_.arguments()[i]);
            has_key = KnownShapes::add(key, is_seen ? arguments_[i] : IValue());
        }
        Values stack;
        if (has_key && known_shapes().find(key, stack)) return stack;
        stack = make_shapes();
        if (has_key) known_shapes().keep(key, stack);
        return stack;
    }

    Values make_shapes() {
        PlainKernels plain;
        Values stack;
        for (size_t i = 0; i < arguments_.size(); i++) {
            const IValue &value = arguments_[i];
            if (value.isDevice())
                stack.push_back(c10::Device(at::kMeta));
            else if (is_generator(schema_.arguments()[i]))
                stack.push_back(IValue());
            else
                stack.push_back(with_tensors(value, on_meta));
        }
        replace_outs(schema_, stack);
        call(op_, stack);
        return stack;
    }

    static Tensor on_meta(const Tensor &tensor) {
        if (!is_ours(tensor)) return tensor;
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    }

    static Tensor like(const Tensor &shape) {
        if (!shape.defined()) return shape;
        return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(kFakeGpu));
    }

    // The argument that a result is, as `self` of an in-place operation.
    size_t source_of(const c10::Argument &result) const {
        for (size_t i = 0; i < arguments_.size(); i++) {
            const auto *info = schema_.arguments()[i].alias_info();
            if (info && info->isWrite() && info->beforeSets() == result.alias_info()->beforeSets()) return i;
        }
        TORCH_CHECK(false, schema_.name(), " returns what is none of its arguments");
    }

    // A tensor given as `out=` gets the size of what is written to it.
    void fit(size_t argument, const IValue &shape) {
        if (!shape.isTensor() || !arguments_[argument].isTensor()) return;
        const Tensor &tensor = arguments_[argument].toTensor();
        if (tensor.numel() || tensor.sizes() == shape.toTensor().sizes()) return;
        tensor.resize_(shape.toTensor().sizes());
        size_t index = first_tensor_[argument];
        tensors_[index] = TensorMemory(tensor);
        spans_[index] = tensors_[index].span(true);
    }

    void run_late(Values &stack) {
        std::vector<TensorMemory> made;
        std::vector<bool> is_made;
        bool has_meta = op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) && !has_mask();
        Values found = has_meta ? shapes() : Values(returns().size());
        for (size_t i = 0; i < returns().size(); i++) {
            is_made.push_back(!returns()[i].alias_info());
            if (is_made.back()) {
                stack.push_back(with_tensors(found[i], [&](const Tensor &shape) {
                    Tensor tensor = like(shape);
                    made.emplace_back(tensor);
                    return tensor;
                }));
            } else {
                size_t source = source_of(returns()[i]);
                if (has_meta) fit(source, found[i]);
                stack.push_back(arguments_[source]);
            }
        }
        std::vector<Span> spans = spans_;
        for (const TensorMemory &result : made) spans.push_back(result.span(true));
        launch(current_stream(device_), schema_.name(), spans, [kernel = kernel(), made, is_made] {
            Values results = kernel();
            PlainKernels plain;
            size_t next = 0;
            for (size_t i = 0; i < is_made.size(); i++)
                if (is_made[i])
                    for_each_tensor(results[i], [&](const Tensor &result) {
                        const TensorMemory &target = made[next++];
                        if (result.defined() && target.on_host().defined()) target.on_host().copy_(result);
                    });
        });
    }

    void run_now(Values &stack) {
        launch(current_stream(device_), schema_.name(), spans_, {});
        synchronize_stream(current_stream(device_));
        raise_late_error();
        Values results = kernel()();
        for (size_t i = 0; i < returns().size(); i++) {
            if (returns()[i].alias_info())
                stack.push_back(arguments_[source_of(returns()[i])]);
            else
                stack.push_back(with_tensors(results[i], [](const Tensor &result) {
                    Tensor tensor = like(result);
                    if (result.defined()) tensor.copy_(result);
                    return tensor;
                }));
        }
    }

    c10::OperatorHandle op_;
    const c10::FunctionSchema &schema_;
    Values arguments_;
    std::vector<TensorMemory> tensors_;
    std::vector<size_t> first_tensor_;
    std::vector<Span> spans_;
    IValue generator_;
    bool has_generator_ = false;
    int device_ = -1;
};

void fall_back(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *stack) {
    size_t num_arguments = op.schema().arguments().size();
    auto arguments = torch::jit::last(*stack, num_arguments);
    Call call(op, Values(arguments.begin(), arguments.end()));
    torch::jit::drop(*stack, num_arguments);
    call.run(*stack);
}

// The CPU's kernel draws from the host's generator, when it runs.
std::tuple<Tensor, Tensor> native_dropout(const Tensor &input, double p, std::optional<bool> train) {
    if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
    Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("native_dropout", &native_dropout);
    // Torch would compose these of others, whose bits differ from those of the CPU's kernels.
    for (const char *name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm",
                             "silu_backward", "mish_backward"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

}  // namespace fake_gpu
