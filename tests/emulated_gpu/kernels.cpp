// ATen's CUDA operators, computed by the CPU's operators with the same name, in stream order.
//
//     caller's thread                                  stream's thread
//     1  check devices, draw a random seed
//     2  run the CPU's operator on zeros: shapes
//     3  allocate outputs by torch's own allocator
//     4  enqueue addresses and shapes            ->    5  CPU tensors over the same memory
//                                                      6  the CPU's operator
//                                                      7  copy its results into the outputs
//
// Shapes are kept for the next call. Between 4 and 7 there are no references to the tensors:
// memory that is freed or overwritten too early gives wrong values, as on a GPU. If shapes depend
// on values (nonzero, a boolean index), the caller waits for the stream, as CUDA's operators do.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/CompositeImplicitAutogradFunctions.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "emulator.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// Operators run here are below autograd, autocast and Python's overrides, and repeat no warnings.
struct Below : c10::WarningHandler {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  using Functions = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState before = Functions::get_disabled_state();
  c10::WarningUtils::WarningHandlerGuard quiet{this};

  Below() { Functions::set_disabled_state(at::impl::ALL_DISABLED); }
  ~Below() override { Functions::set_disabled_state(before); }
  void process(const c10::Warning&) override {}
};

// ---- tensors as addresses -----------------------------------------------------------------------

// A tensor's address and layout, without a reference to it.
struct Place {
  explicit Place(const Tensor& t)
      : data(t.is_cuda() ? t.data_ptr() : nullptr), dtype(t.scalar_type()), sizes(t.sizes()),
        strides(t.strides()), conj(t.is_conj()), neg(t.is_neg()),
        wrapped(t.unsafeGetTensorImpl()->is_wrapped_number()) {
    if (!t.is_cuda()) host = t.clone();  // the caller may write to it before the stream reads it
  }

  // A tensor of the CPU over the same memory.
  Tensor hosted() const {
    return marked(host.defined() ? host : at::from_blob(data, sizes, strides, dtype));
  }

  Tensor marked(const Tensor& t) const {
    if (conj) t._set_conj(true);
    if (neg) t._set_neg(true);
    if (wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }

  void* data;
  at::ScalarType dtype;
  c10::SmallVector<int64_t, 5> sizes, strides;
  bool conj, neg, wrapped;
  Tensor host;
};

Tensor empty_as(const Tensor& t, c10::Device device) {
  if (device.is_cuda()) {  // below the factory functions that Python can override
    auto type = t.scalar_type();
    return Tensor(at::detail::empty_strided_cuda(t.sizes(), t.strides(), type, device));
  }
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
}

// Replace each defined tensor of a stack, also in lists; lists are replaced, never changed.
template <class F>
void replace_tensors(Stack& stack, const F& f) {
  auto of = [&](size_t i, const Tensor& t) { return t.defined() ? f(i, t) : t; };
  for (size_t i = 0; i < stack.size(); ++i) {
    IValue& value = stack[i];
    if (value.isTensor()) {
      value = of(i, value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(of(i, t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(of(i, *t)) : std::nullopt);
      value = list;
    }
  }
}

template <class F>
void for_tensors(const Stack& stack, const F& f) {
  Stack copy = stack;
  replace_tensors(copy, [&](size_t i, const Tensor& t) { return f(i, t), t; });
}

// ---- one operator -------------------------------------------------------------------------------

// The properties of an operator from its schema.
struct Traits {
  explicit Traits(const OperatorHandle& op) : name(c10::toString(op.operator_name())) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias && alias->isWrite()) written.insert(i);
      const auto type = arguments[i].type()->str();
      if (type.find("Generator") != type.npos) generator = i;
      if (type.find("Tensor?[]") != type.npos) indexed = true;
      if (arguments[i].real_type()->kind() == c10::TypeKind::NumberType) numbers.insert(i);
    }
    dynamic = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
    for (const auto& returned : op.schema().returns()) {
      int from = -1;
      const auto* alias = returned.alias_info();
      for (size_t i : written)
        if (alias && alias->beforeSets() == arguments[i].alias_info()->beforeSets()) from = i;
      returns.push_back(from);
      dynamic = dynamic || returned.type()->str().find("Tensor") == std::string::npos;
    }
    const bool random = op.hasTag(at::Tag::nondeterministic_seeded) && generator < 0;
    computable = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) && !random;
  }

  std::string name;
  std::set<size_t> written;  // arguments that it writes to
  std::set<size_t> numbers;  // arguments that are numbers of any type
  std::vector<int> returns;  // the argument that is returned, or -1 for a new value
  int generator = -1;        // the argument that is a generator of random numbers
  bool indexed = false;      // takes a list of indices
  bool dynamic;              // its results' shapes depend on values, or are not tensors
  bool computable;
};

void run_on_cpu(const OperatorHandle& op, const Traits& traits, Stack& stack, uint64_t seed) {
  if (traits.generator >= 0) stack[traits.generator] = at::detail::createCPUGenerator(seed);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// An operator that is queued in a stream.
struct Launch {
  OperatorHandle op;
  const Traits& traits;
  Stack stack;                   // without its tensors
  std::vector<Place> inputs{};   // its tensors, in order
  std::vector<Place> outputs{};   // of all results that are new tensors
  uint64_t seed = 0;

  void run() {
    static thread_local const bool one_thread = (at::set_num_threads(1), true);
    (void)one_thread;
    try {
      Below below;
      size_t next = 0;
      replace_tensors(stack, [&](size_t, const Tensor&) { return inputs[next++].hosted(); });
      run_on_cpu(op, traits, stack, seed);
      deliver();
    } catch (const c10::Error& error) {
      fail(cudaErrorAssert, traits.name + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(cudaErrorAssert, traits.name + ": " + error.what());
    }
  }

  void deliver() {
    for (size_t i = 0; i < traits.returns.size(); ++i)
      if (traits.returns[i] >= 0) stack[i] = IValue();
    size_t next = 0;
    for_tensors(stack, [&](size_t, const Tensor& result) {
      const Tensor output = outputs.at(next++).hosted();
      TORCH_CHECK(result.sizes() == output.sizes() && result.dtype() == output.dtype(),
                  "a result is not ", output.toString(), output.sizes(), " as with zeros");
      output.copy_(result);
    });
  }
};

Stream* current_stream(c10::Device device) {
  return stream_of(c10::cuda::getCurrentCUDAStream(device.index()).stream());
}

// The device of all tensors, except for numbers and indices, which may be on the CPU.
c10::Device device_of(const Traits& traits, const Stack& stack) {
  std::optional<c10::Device> device;
  auto same = [&](c10::Device other) {
    if (!device) device = other;
    TORCH_CHECK(*device == other, "Expected all tensors to be on the same device, but found at ",
                "least two devices, ", *device, " and ", other, "! (", traits.name, ")");
  };
  for_tensors(stack, [&](size_t, const Tensor& t) {
    if (t.is_cuda()) same(t.device());
  });
  for_tensors(stack, [&](size_t i, const Tensor& t) {
    const bool written = traits.written.count(i);
    if (!t.is_cuda() && (written || (t.dim() > 0 && !traits.indexed))) same(t.device());
  });
  if (device) return *device;
  for (const IValue& value : stack)
    if (value.isDevice() && value.toDevice().has_index()) return value.toDevice();
  return c10::Device(at::kCUDA, c10::cuda::current_device());
}

// The operator's arguments for another kind of tensor, without a generator.
Stack arguments_for(const Traits& traits, const Stack& stack, c10::DeviceType device) {
  Stack copy = stack;
  for (IValue& value : copy)
    if (value.isDevice()) value = c10::Device(device);
  if (traits.generator >= 0) copy[traits.generator] = IValue();
  return copy;
}

// A number from the state of the device's generator, which is advanced.
uint64_t draw(const Traits& traits, const Stack& stack, c10::Device device) {
  if (traits.generator < 0) return 0;
  const IValue& value = stack[traits.generator];
  auto given = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given, at::cuda::detail::getDefaultCUDAGenerator(device.index()));
  std::lock_guard<std::mutex> lock(generator->mutex_);
  auto [seed, offset] = generator->philox_engine_inputs(4);
  uint64_t mixed = seed * 0x9e3779b97f4a7c15 + offset * 0xbf58476d1ce4e5b9 + 0x94d049bb133111eb;
  return (mixed ^ (mixed >> 31)) * 0x9e3779b97f4a7c15;
}

bool needs_values(const Traits& traits, const Stack& stack) {
  if (!traits.indexed) return traits.dynamic;
  bool mask = false;
  for_tensors(stack, [&](size_t i, const Tensor& t) {
    const bool masks = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    mask = mask || (stack[i].isOptionalTensorList() && masks);
  });
  // x[mask] = number is masked_fill, which needs no number of elements
  return mask && !(traits.written.count(0) && stack[2].toTensor().numel() == 1);
}

// Overwrite memory that the allocator may reuse, in the order of the stream that it belongs to:
// other streams that still read or write it lack a record_stream or a wait.
void poison_freed_memory() {
  static std::once_flag once;
  if (!settings().poison || !c10::cuda::CUDACachingAllocator::get()->initialized()) return;
  std::call_once(once, [] {
    using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry& entry) {
      if (entry.action_ != Entry::FREE_COMPLETED) return;
      c10::cuda::CUDAGuard guard(entry.device_);
      enqueue(stream_of(entry.stream_), [=] {
        std::memset(reinterpret_cast<void*>(entry.addr_), kPoison, entry.size_);
      });
    });
  });
}

// The kernel that is registered for an operator.
class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const OperatorHandle& op) : traits_(op) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    TORCH_CHECK_NOT_IMPLEMENTED(traits_.computable, "The emulated GPU does not compute ",
                                traits_.name);
    if (failure() != cudaSuccess) C10_CUDA_CHECK(failure());
    poison_freed_memory();
    Below below;
    Stack args(stack->end() - op.schema().arguments().size(), stack->end());
    stack->resize(stack->size() - args.size());
    const c10::Device device = device_of(traits_, args);
    c10::cuda::CUDAGuard guard(device);
    // Loading a kernel may wait for the device.
    if (settings().lazy_loading && !loaded_.exchange(true))
      synchronize_device(emulated::device_of(current_stream(device)), false);
    const bool now = needs_values(traits_, args);
    for (IValue& result : now ? run_now(op, args, device) : run_later(op, args, device))
      stack->push_back(std::move(result));
  }

 private:
  Stack run_later(const OperatorHandle& op, const Stack& args, c10::Device device) {
    Stack results = shapes(op, args);
    auto launch = std::make_shared<Launch>(
        Launch{op, traits_, arguments_for(traits_, args, at::kCPU)});
    return_written(results, args);
    replace_tensors(results, [&](size_t i, const Tensor& like) {
      if (traits_.returns[i] >= 0) return like;
      Tensor t = empty_as(like, device);
      launch->outputs.emplace_back(t);
      return t;
    });
    static const Tensor nothing = at::empty({0}, at::kCPU);  // marks the place of a tensor
    replace_tensors(launch->stack, [&](size_t, const Tensor& t) {
      launch->inputs.emplace_back(t);
      return nothing;
    });
    launch->seed = draw(traits_, args, device);
    enqueue(current_stream(device), [launch] { launch->run(); });
    return results;
  }

  // Wait for the stream, and compute here.
  Stack run_now(const OperatorHandle& op, const Stack& args, c10::Device device) {
    Stream* const stream = current_stream(device);
    synchronize(stream);
    if (failure() != cudaSuccess) C10_CUDA_CHECK(failure());
    Stack results = arguments_for(traits_, args, at::kCPU);
    replace_tensors(results, [](size_t, const Tensor& t) { return Place(t).hosted(); });
    run_on_cpu(op, traits_, results, draw(traits_, args, device));
    return_written(results, args);
    replace_tensors(results, [&](size_t i, const Tensor& value) {
      if (traits_.returns[i] >= 0) return value;
      Tensor t = empty_as(value, device);
      enqueue(stream, [place = Place(t), value] {
        Below below;
        place.hosted().copy_(value);
      });
      return t;
    });
    return results;
  }

  void return_written(Stack& results, const Stack& args) const {
    for (size_t i = 0; i < results.size(); ++i)
      if (traits_.returns[i] >= 0) results[i] = args[traits_.returns[i]];
  }

  struct Shapes {
    Stack results;                // of meta tensors
    std::vector<Tensor> written;  // the arguments that are written to, afterwards
  };

  // The results on meta tensors; resizes arguments that the operator resizes.
  Stack shapes(const OperatorHandle& op, const Stack& args) {
    const std::string key = key_of(args);
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = known_.find(key);
    if (found == known_.end()) {
      lock.unlock();
      Shapes made = new_shapes(op, args);
      lock.lock();
      if (known_.size() >= 1000) known_.clear();
      found = known_.emplace(key, std::move(made)).first;
    }
    const Shapes shapes = found->second;
    lock.unlock();
    size_t next = 0;
    for_tensors(args, [&](size_t i, const Tensor& t) {
      if (!traits_.written.count(i)) return;
      const Tensor& like = shapes.written[next++];
      if (t.sizes() != like.sizes()) resize(t, like);
    });
    return shapes.results;
  }

  // All that shapes depend on; numbers only if there are no tensors to read (arange).
  std::string key_of(const Stack& args) const {
    std::string key;
    auto add = [&](std::initializer_list<int64_t> numbers, at::IntArrayRef list = {}) {
      for (at::IntArrayRef part : {at::IntArrayRef(numbers), list})
        key.append(reinterpret_cast<const char*>(part.data()), part.size() * sizeof(int64_t));
    };
    bool reads = traits_.written.count(0);
    add({static_cast<int64_t>(c10::get_default_dtype_as_scalartype())});
    for_tensors(args, [&](size_t i, const Tensor& t) {
      reads = reads || !traits_.written.count(i);
      const bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
      const auto argument = static_cast<int64_t>(i), type = static_cast<int64_t>(t.scalar_type());
      add({argument, type, wrapped, t.is_conj(), t.is_neg(), t.dim()}, t.sizes());
      add({}, t.strides());
    });
    for (size_t i = 0; i < args.size(); ++i) {
      const IValue& value = args[i];
      add({value.isInt(), value.isDouble(), value.isBool(), value.isNone()});
      if (reads && (traits_.numbers.count(i) || value.isDouble())) continue;
      if (value.isInt()) add({value.toInt()});
      else if (value.isBool()) add({value.toBool()});
      else if (value.isList()) add({static_cast<int64_t>(value.toListRef().size())});
      if (value.isIntList()) add({}, value.toIntVector());
      if (value.isDoubleList() || value.isBoolList() || value.isString()) key += c10::str(value);
    }
    return key;
  }

  // By the CPU's operator, as in the stream, but on zeros. If zeros are not valid, by the meta
  // kernel; most are Python's, and their first call imports torch._dynamo: a second of CPU time.
  Shapes new_shapes(const OperatorHandle& op, const Stack& args) const {
    try {
      return new_shapes(op, args, at::kCPU, c10::DispatchKey::CPU);
    } catch (const std::exception& error) {
      if (strstr(error.what(), "same dtype")) throw;  // which meta kernels do not check
      return new_shapes(op, args, at::kMeta, c10::DispatchKey::Meta);
    }
  }

  Shapes new_shapes(const OperatorHandle& op, const Stack& args, c10::DeviceType device,
                    c10::DispatchKey key) const {
    Shapes made{arguments_for(traits_, args, device), {}};
    replace_tensors(made.results, [&](size_t i, const Tensor& t) {
      const Place place(t);
      if (place.wrapped) return t;  // a number of Python's: not to be divided by zero
      Tensor zeros = place.marked(empty_as(t, device).zero_());
      if (traits_.written.count(i)) made.written.push_back(zeros);
      return zeros;
    });
    if (traits_.generator >= 0) made.results[traits_.generator] = at::detail::createCPUGenerator(0);
    op.redispatchBoxed(c10::DispatchKeySet(key), &made.results);
    auto forget = [](size_t, const Tensor& t) { return empty_as(t, at::kMeta); };
    replace_tensors(made.results, forget);
    for (Tensor& t : made.written) t = forget(0, t);
    return made;
  }

  static void resize(const Tensor& t, const Tensor& like) {
    const auto bytes = at::detail::computeStorageNbytes(like.sizes(), like.strides(), t.itemsize());
    t.resize_({static_cast<int64_t>(bytes / t.itemsize())});
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  }

  Traits traits_;
  std::atomic<bool> loaded_{false};
  std::mutex mutex_;
  std::unordered_map<std::string, Shapes> known_;
};

// ---- operators for which the CPU's of the same name is not enough -------------------------------

// Between devices torch's own copy, which is a memcpy.
class Copy final : public c10::OperatorKernel {
 public:
  explicit Copy(const OperatorHandle& op) : on_one_device_(op) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    Tensor to = (stack->end() - 3)->toTensor(), from = (stack->end() - 2)->toTensor();
    if (to.device() == from.device()) return on_one_device_(op, keys, stack);
    Below below;
    const bool non_blocking = stack->back().toBool();
    if (to.is_cuda() && from.is_cuda()) {
      from = from.to(to.scalar_type()).expand_as(to).contiguous().resolve_conj().resolve_neg();
      Tensor moved = at::empty(to.sizes(), to.options());
      to.copy_(at::native::copy_(moved, from, non_blocking));
    } else {
      at::native::copy_(to, from, non_blocking);
    }
    stack->resize(stack->size() - 2);
  }

 private:
  Kernel on_one_device_;
};

// The CPU's native_dropout has no argument for a generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (input.numel() == 0 || p == 0 || !train.value_or(true))
    return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

// CUDA's has its own backward, which the CPU lacks.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape,
                                    const std::optional<Tensor>& weight,
                                    std::optional<double> eps) {
  return at::compositeimplicitautograd::_fused_rms_norm(input, shape, weight, eps);
}

// ---- registration -------------------------------------------------------------------------------

// torch's own: they make views and memory, read a value by a memcpy, or read settings.
const std::set<std::string> kept = {
    "empty", "empty_strided", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory",
    "_local_scalar_dense", "is_set_to", "_fused_sdp_choice"};
// ATen's versions for all devices would choose kernels of CUDA or cuDNN.
const std::vector<std::string> added = {"convolution", "convolution_backward", "copy_",
                                        "conj_physical_"};

bool is_view(const OperatorHandle& op) {
  for (const auto& returned : op.schema().returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  return false;
}

template <class K>
c10::KernelFunction kernel_of(const OperatorHandle& op) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<K>(op));
}

void override_operators() {
  Below quiet;  // no warning that kernels are registered again
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<c10::RegistrationHandleRAII> registrations;
  constexpr auto kCuda = c10::DispatchKey::CUDA;
  auto names = dispatcher.getRegistrationsForDispatchKey(kCuda);
  for (const auto& name : added) names.emplace_back("aten::" + name, "");
  for (const auto& name : names) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) || kept.count(name.name.substr(6)) || is_view(*op))
      continue;
    auto kernel = name.name == "aten::copy_" ? kernel_of<Copy>(*op) : kernel_of<Kernel>(*op);
    registrations.push_back(dispatcher.registerImpl(name, kCuda, std::move(kernel), std::nullopt,
                                                    nullptr, "emulated GPU"));
  }
  using torch::Library;
  static Library cuda(Library::IMPL, "aten", kCuda, __FILE__, __LINE__);
  cuda.impl("native_dropout", native_dropout);
  constexpr auto kAutograd = c10::DispatchKey::AutogradCUDA;
  static Library autograd(Library::IMPL, "aten", kAutograd, __FILE__, __LINE__);
  autograd.impl("_fused_rms_norm", rms_norm);
}

const bool started = [] {
  override_operators();
  at::Context& context = at::globalContext();
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  return true;
}();

}  // namespace
}  // namespace emulated
