// ATen's CUDA operators, computed by the CPU's operators of the same name, in stream order.
//
//     caller's thread                                  stream's thread
//     1  check devices, draw a random seed
//     2  run the operator on meta tensors: shapes
//     3  allocate outputs by torch's own allocator
//     4  enqueue addresses and shapes            ->    5  CPU tensors over the same memory
//                                                      6  the CPU's operator
//                                                      7  copy its results into the outputs
//
// Between 4 and 7 nothing refers to the tensors themselves: memory that is freed or overwritten too
// early gives wrong values, as it does on a GPU. Where shapes depend on values (nonzero, a boolean
// index), the caller waits for the stream, as the real operators do.
#include "emulator.h"

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
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// Operators run here are below autograd, autocast and Python's overrides.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  using Functions = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState before = Functions::get_disabled_state();
  Below() { Functions::set_disabled_state(at::impl::ALL_DISABLED); }
  ~Below() { Functions::set_disabled_state(before); }
};

// ---- tensors as addresses ----------------------------------------------------------------------

// Where a tensor is and how it is laid out, without a reference to it.
struct Place {
  explicit Place(const Tensor& t)
      : dtype(t.dtype()), sizes(t.sizes()), strides(t.strides()), offset(t.storage_offset()),
        conj(t.is_conj()), neg(t.is_neg()), wrapped(t.unsafeGetTensorImpl()->is_wrapped_number()) {
    if (t.is_cuda()) {
      base = t.storage().mutable_data();
      bytes = t.storage().nbytes();
    } else {
      host = t.clone();  // the caller may write to it before the stream reads it
    }
  }

  // A tensor of this layout over some memory.
  Tensor over(c10::Storage storage, c10::DispatchKey key) const {
    auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, dtype);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return marked(t);
  }

  Tensor marked(const Tensor& t) const {
    if (conj) t._set_conj(true);
    if (neg) t._set_neg(true);
    if (wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }

  caffe2::TypeMeta dtype;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset;
  bool conj, neg, wrapped;
  void* base = nullptr;
  size_t bytes = 0;
  Tensor host;
};

c10::Storage storage_at(void* base, size_t bytes, c10::DeviceType device) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               c10::DataPtr(base, c10::Device(device)),
                                               c10::GetAllocator(device), device == at::kMeta);
}

// CPU tensors over device memory; those that shared a storage share one again, so that the CPU's
// operators see overlapping memory.
class Hosted {
 public:
  Tensor operator()(const Place& place) {
    if (place.host.defined()) return place.marked(place.host);
    for (auto& [base, storage] : storages_)
      if (base == place.base) return place.over(storage, c10::DispatchKey::CPU);
    storages_.emplace_back(place.base, storage_at(place.base, place.bytes, at::kCPU));
    return place.over(storages_.back().second, c10::DispatchKey::CPU);
  }

 private:
  c10::SmallVector<std::pair<void*, c10::Storage>, 4> storages_;
};

Tensor meta_of(const Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;  // a number of Python's
  Place place(t.is_cuda() ? t : t.detach());
  place.host = Tensor();
  return place.over(storage_at(nullptr, t.storage().nbytes(), at::kMeta), c10::DispatchKey::Meta);
}

Tensor zeros_of(const Tensor& t) {
  auto options = t.options().device(at::kCPU);
  return Place(t).marked(at::empty_strided(t.sizes(), t.strides(), options).zero_());
}

// Replace each defined tensor of a stack, also in lists; lists are made anew, never changed.
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

// ---- one operator ------------------------------------------------------------------------------

// What the schema says of an operator.
struct Traits {
  explicit Traits(const c10::OperatorHandle& op) : name(c10::toString(op.operator_name())) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias && alias->isWrite()) written.insert(i);
      auto type = arguments[i].type()->str();
      if (type.find("Generator") != type.npos) generator = i;
      if (type.find("Tensor?[]") != type.npos) indexed = true;
      if (arguments[i].real_type()->kind() == c10::TypeKind::NumberType) numbers.insert(i);
    }
    for (const auto& returned : op.schema().returns()) {
      int from = -1;
      const auto* alias = returned.alias_info();
      for (size_t i : written)
        if (alias && alias->beforeSets() == arguments[i].alias_info()->beforeSets()) from = i;
      returns.push_back(from);
      auto type = returned.type()->str();
      values = values || type.find("Tensor") == type.npos;
    }
    dynamic = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
    random = op.hasTag(at::Tag::nondeterministic_seeded) && generator < 0;
    computable = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) && !random;
  }

  std::string name;
  std::set<size_t> written;  // arguments that it writes to
  std::set<size_t> numbers;  // arguments that are numbers of any type
  std::vector<int> returns;  // the argument that is returned, or -1: something new
  int generator = -1;        // the argument that gives random numbers
  bool indexed = false;      // takes a list of indices
  bool values = false;       // returns what is no tensor
  bool dynamic, random, computable;
};

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void seed(const Traits& traits, Stack& stack, uint64_t seed) {
  if (traits.generator >= 0) stack[traits.generator] = at::detail::createCPUGenerator(seed);
}

// What waits in a stream.
struct Launch {
  c10::OperatorHandle op;
  const Traits& traits;
  Stack stack;                // without its tensors
  std::vector<Place> inputs;  // its tensors, in order
  std::vector<std::optional<Place>> outputs;
  uint64_t seed = 0;

  void run() {
    static thread_local const bool one_thread = (at::set_num_threads(1), true);
    (void)one_thread;
    Below below;
    Silent silent;  // the caller has been warned
    c10::WarningUtils::WarningHandlerGuard quiet(&silent);
    Hosted hosted;
    size_t next = 0;
    replace_tensors(stack, [&](size_t, const Tensor&) { return hosted(inputs[next++]); });
    emulated::seed(traits, stack, seed);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    deliver(hosted);
  }

  void deliver(Hosted& hosted) {
    std::vector<Tensor> results;
    for (size_t i = 0; i < traits.returns.size(); ++i) {
      if (traits.returns[i] >= 0) continue;
      if (stack[i].isTensor()) results.push_back(stack[i].toTensor());
      else for (const Tensor& t : stack[i].toTensorVector()) results.push_back(t);
    }
    TORCH_CHECK(results.size() == outputs.size(), "returns ", results.size(),
                " tensors instead of ", outputs.size());
    for (size_t i = 0; i < results.size(); ++i) {
      if (!outputs[i]) continue;
      const Tensor &result = results[i], output = hosted(*outputs[i]);
      TORCH_CHECK(result.defined() && result.sizes() == output.sizes() &&
                      result.dtype() == output.dtype(),
                  "output ", i, " differs from ", output.toString(), output.sizes(),
                  ", which its meta kernel states");
      output.copy_(result);
    }
  }
};

Stream* current_stream(c10::Device device) {
  return stream_of(c10::cuda::getCurrentCUDAStream(device.index()).stream());
}

void check_strided(const Traits& traits, const Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided && !t.is_quantized() && t.has_storage(),
                              "The emulated GPU does not compute ", traits.name, " of ",
                              t.toString());
}

// The tensors' device; one for all of them, apart from numbers and indices, which may be the CPU's.
c10::Device device_of(const Traits& traits, const Stack& stack) {
  std::optional<c10::Device> device;
  auto same = [&](c10::Device other) {
    if (!device) device = other;
    TORCH_CHECK(*device == other, "Expected all tensors to be on the same device, but found at ",
                "least two devices, ", *device, " and ", other, "! (", traits.name, ")");
  };
  for_tensors(stack, [&](size_t, const Tensor& t) {
    check_strided(traits, t);
    if (t.is_cuda()) same(t.device());
  });
  for_tensors(stack, [&](size_t i, const Tensor& t) {
    bool written = traits.written.count(i);
    if (!t.is_cuda() && (written || (t.dim() > 0 && !traits.indexed))) same(t.device());
  });
  if (device) return *device;
  for (const IValue& value : stack)
    if (value.isDevice() && value.toDevice().has_index()) return value.toDevice();
  return c10::Device(at::kCUDA, c10::cuda::current_device());
}

// The operator's arguments for another kind of tensor: devices and generators replaced too.
Stack arguments_for(const Traits& traits, const Stack& stack, c10::Device device) {
  Stack copy = stack;
  for (IValue& value : copy)
    if (value.isDevice()) value = device;
  if (traits.generator >= 0) copy[traits.generator] = IValue();
  return copy;
}

// A number that depends on the state of the device's generator, which moves on.
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

Tensor on_device(const Tensor& like, c10::Device device) {
  auto type = like.scalar_type();
  return Tensor(at::detail::empty_strided_cuda(like.sizes(), like.strides(), type, device));
}

bool needs_values(const Traits& traits, const Stack& stack) {
  if (!traits.indexed) return traits.dynamic || traits.values;
  bool mask = false;
  for_tensors(stack, [&](size_t i, const Tensor& t) {
    bool masks = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    mask = mask || (stack[i].isOptionalTensorList() && masks);
  });
  // x[mask] = number is masked_fill, which needs no number of elements
  return mask && !(traits.written.count(0) && stack[2].toTensor().numel() == 1);
}

// Memory that the allocator may hand out again is overwritten, in the order of the stream that it
// belongs to: what still reads or writes it elsewhere lacks a record_stream or a wait.
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
  explicit Kernel(const c10::OperatorHandle& op) : traits_(op) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    TORCH_CHECK_NOT_IMPLEMENTED(traits_.computable, "The emulated GPU does not compute ",
                                traits_.name);
    if (failure() != cudaSuccess) C10_CUDA_CHECK(failure());
    poison_freed_memory();
    Below below;
    Stack args(stack->end() - op.schema().arguments().size(), stack->end());
    stack->resize(stack->size() - args.size());
    c10::Device device = device_of(traits_, args);
    c10::cuda::CUDAGuard guard(device);
    auto half = without_half(args);
    bool now = needs_values(traits_, args);
    Stack results = now ? run_now(op, args, device) : run_later(op, args, device);
    if (half) results[0] = results[0].toTensor().to(*half);
    stack->insert(stack->end(), results.begin(), results.end());
  }

 private:
  // Softmax from half to float and its gradient back, which the CPU's operators do not have.
  std::optional<at::ScalarType> without_half(Stack& args) const {
    const std::string& name = traits_.name;
    if (name == "aten::_softmax" || name == "aten::_log_softmax") {
      if (args[2].toBool()) args[0] = args[0].toTensor().to(at::kFloat), args[2] = false;
    } else if (name == "aten::_softmax_backward_data" ||
               name == "aten::_log_softmax_backward_data") {
      auto gradient = args[0].toTensor().scalar_type(), wanted = args[3].toScalarType();
      args[3] = gradient;
      if (wanted != gradient) return wanted;
    }
    return std::nullopt;
  }

  Stack run_later(const c10::OperatorHandle& op, const Stack& args, c10::Device device) {
    Stack results = shapes(op, args);
    auto launch = std::make_shared<Launch>(Launch{op, traits_, {}, {}, {}, 0});
    auto allocate = [&](const Tensor& like) {
      Tensor t = like.defined() ? on_device(like, device) : Tensor();
      launch->outputs.push_back(t.defined() ? std::optional<Place>(t) : std::nullopt);
      return t;
    };
    for (size_t i = 0; i < results.size(); ++i) {
      if (traits_.returns[i] >= 0) {
        results[i] = args[traits_.returns[i]];
      } else if (results[i].isTensor()) {
        results[i] = allocate(results[i].toTensor());
      } else {
        c10::List<Tensor> list;
        for (const Tensor& t : results[i].toTensorVector()) list.push_back(allocate(t));
        results[i] = list;
      }
    }
    launch->stack = arguments_for(traits_, args, at::kCPU);
    static const Tensor nothing = at::empty({0}, at::kCPU);  // marks the place of a tensor
    replace_tensors(launch->stack, [&](size_t, const Tensor& t) {
      launch->inputs.emplace_back(t);
      return nothing;
    });
    launch->seed = draw(traits_, args, device);
    enqueue(current_stream(device), [launch] {
      try {
        launch->run();
      } catch (const c10::Error& error) {
        fail(cudaErrorAssert, launch->traits.name + ": " + error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(cudaErrorAssert, launch->traits.name + ": " + error.what());
      }
    });
    return results;
  }

  // The results' shapes, by the CPU's operator on zeros, kept for later calls; resizes arguments that
  // the operator resizes. Meta kernels are the last resort: their results differ from the CPU's in
  // places, and the first of Python's takes a second of CPU time, since it imports torch._dynamo.
  Stack shapes(const c10::OperatorHandle& op, const Stack& args) {
    std::string key = key_of(args);
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = known_.find(key);
    if (found == known_.end()) {
      lock.unlock();  // a meta kernel may take Python's lock
      Shapes made = new_shapes(op, args);
      lock.lock();
      if (known_.size() >= 1000) known_.clear();
      found = known_.emplace(key, std::move(made)).first;
    }
    Shapes shapes = found->second;
    lock.unlock();
    size_t next = 0;
    for_tensors(args, [&](size_t i, const Tensor& t) {
      if (!traits_.written.count(i)) return;
      const Tensor& like = shapes.written[next++];
      if (t.sizes() != like.sizes()) resize(t, like);
    });
    return shapes.results;
  }

  // All that shapes depend on.
  std::string key_of(const Stack& args) const {
    std::string key;
    auto add = [&](std::initializer_list<int64_t> numbers, at::IntArrayRef list = {}) {
      for (at::IntArrayRef part : {at::IntArrayRef(numbers), list})
        key.append(reinterpret_cast<const char*>(part.data()), part.size() * sizeof(int64_t));
    };
    bool reads = traits_.written.count(0);  // else shapes come from numbers: arange, linspace
    add({static_cast<int64_t>(c10::get_default_dtype_as_scalartype())});
    for_tensors(args, [&](size_t i, const Tensor& t) {
      reads = reads || !traits_.written.count(i);
      bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
      auto argument = static_cast<int64_t>(i), type = static_cast<int64_t>(t.scalar_type());
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

  struct Shapes {
    Stack results;                // of meta tensors
    std::vector<Tensor> written;  // the arguments that are written to, afterwards
  };

  Shapes new_shapes(const c10::OperatorHandle& op, const Stack& args) const {
    Shapes made;
    auto run = [&](c10::DispatchKey key, c10::DeviceType device, const auto& like) {
      made = {arguments_for(traits_, args, device), {}};
      replace_tensors(made.results, [&](size_t i, const Tensor& t) {
        Tensor t2 = like(t);
        if (traits_.written.count(i)) made.written.push_back(t2);
        return t2;
      });
      seed(traits_, made.results, 0);
      op.redispatchBoxed(c10::DispatchKeySet(key), &made.results);
      replace_tensors(made.results, [&](size_t, const Tensor& t) {
        check_strided(traits_, t);
        return meta_of(t);
      });
    };
    try {
      run(c10::DispatchKey::CPU, at::kCPU, zeros_of);
      return made;
    } catch (const std::exception& error) {  // also because of zeros: a meta kernel reads none
      if (strstr(error.what(), "same dtype")) throw;  // which meta kernels do not check
    }
    try {
      run(c10::DispatchKey::Meta, at::kMeta, meta_of);
    } catch (const c10::NotImplementedError&) {
      run(c10::DispatchKey::CPU, at::kCPU, zeros_of);
    }
    return made;
  }

  static void resize(const Tensor& t, const Tensor& like) {
    auto bytes = at::detail::computeStorageNbytes(like.sizes(), like.strides(), t.itemsize());
    t.resize_({static_cast<int64_t>(bytes / t.itemsize())});
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  }

  // Wait for the stream, compute on copies, then write in stream order.
  Stack run_now(const c10::OperatorHandle& op, const Stack& args, c10::Device device) {
    Stream* stream = current_stream(device);
    synchronize(stream, true);
    std::vector<std::pair<Tensor, Tensor>> written;
    Stack stack = arguments_for(traits_, args, at::kCPU);
    seed(traits_, stack, draw(traits_, args, device));
    replace_tensors(stack, [&](size_t i, const Tensor& t) {
      Place place(t);
      Tensor copy = place.marked(Hosted()(place).clone());
      if (traits_.written.count(i)) written.emplace_back(t, copy);
      return copy;
    });
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (auto& [t, value] : written) {
      if (t.sizes() != value.sizes()) resize(t, value);
      write(stream, t, value);
    }
    for (size_t i = 0; i < stack.size(); ++i)
      if (traits_.returns[i] >= 0) stack[i] = args[traits_.returns[i]];
    replace_tensors(stack, [&](size_t, const Tensor& value) {
      if (value.is_cuda()) return value;
      Tensor t = on_device(value, device);
      write(stream, t, value);
      return t;
    });
    return stack;
  }

  static void write(Stream* stream, const Tensor& t, const Tensor& value) {
    enqueue(stream, [place = Place(t), value] {
      Below below;
      Hosted()(place).copy_(value);
    });
  }

  Traits traits_;
  std::mutex mutex_;
  std::unordered_map<std::string, Shapes> known_;
};

// ---- operators that need more than the CPU's of the same name ----------------------------------

bool same_bytes(const Tensor& to, const Tensor& from) {
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() &&
         to.strides() == from.strides() &&
         to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg() &&
         to.is_non_overlapping_and_dense();
}

// torch's own where it is a memcpy, and between the CPU and a GPU, where it makes such copies.
class Copy final : public c10::OperatorKernel {
 public:
  explicit Copy(const c10::OperatorHandle& op) : deferred_(op) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    Tensor to = (stack->end() - 3)->toTensor(), from = (stack->end() - 2)->toTensor();
    bool non_blocking = stack->back().toBool();
    if (to.device() == from.device() && !same_bytes(to, from)) return deferred_(op, keys, stack);
    Below below;
    if (to.is_cuda() && from.is_cuda() && !same_bytes(to, from)) {
      Tensor packed = from.to(to.scalar_type()).expand_as(to).contiguous();
      Tensor moved = at::empty(to.sizes(), to.options()).copy_(packed.resolve_conj().resolve_neg());
      to.copy_(moved);
    } else {
      at::native::copy_(to, from, non_blocking);
    }
    stack->resize(stack->size() - 2);
  }

 private:
  Kernel deferred_;
};

void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (input.numel() == 0 || p == 0 || !train.value_or(true))
    return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

bool use_library_ctc_loss(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef,
                          int64_t) {
  return false;
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

using Bias = const std::optional<Tensor>&;
Tensor plus(const Tensor& gates, Bias bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& cell, Bias input_bias,
                                             Bias hidden_bias) {
  auto gate = (plus(hidden, hidden_bias) + plus(input, input_bias)).unsafe_chunk(4, 1);
  Tensor next = gate[1].sigmoid() * cell + gate[0].sigmoid() * gate[2].tanh();
  return {gate[3].sigmoid() * next.tanh(), next, at::empty({0}, input.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                    Bias input_bias, Bias hidden_bias) {
  auto in = plus(input, input_bias).unsafe_chunk(3, 1);
  auto past = plus(hidden, hidden_bias).unsafe_chunk(3, 1);
  Tensor reset = (past[0] + in[0]).sigmoid(), update = (past[1] + in[1]).sigmoid();
  Tensor fresh = (in[2] + past[2] * reset).tanh();
  return {(state - fresh) * update + fresh, at::empty({0}, input.options())};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape, Bias weight,
                                    std::optional<double> eps) {
  return at::compositeimplicitautograd::_fused_rms_norm(input, shape, weight, eps);
}

// ---- registration ------------------------------------------------------------------------------

// torch's own: they make views and memory, or read a value by a memcpy.
const std::set<std::string> kept = {
    "empty", "empty_strided", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory",
    "_local_scalar_dense", "is_set_to"};
// ATen has these for all devices, and would choose a kernel of CUDA's or cuDNN's below them.
const std::vector<std::string> added = {"convolution", "convolution_backward", "copy_",
                                        "conj_physical_"};

template <class K>
c10::KernelFunction kernel_of(const c10::OperatorHandle& op) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<K>(op));
}

void override_operators() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);  // that kernels are registered again
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<c10::RegistrationHandleRAII> registrations;
  constexpr auto kCuda = c10::DispatchKey::CUDA, kAutograd = c10::DispatchKey::AutogradCUDA;
  static torch::Library cuda(torch::Library::IMPL, "aten", kCuda, __FILE__, __LINE__);
  static torch::Library autograd(torch::Library::IMPL, "aten", kAutograd, __FILE__, __LINE__);
  auto names = dispatcher.getRegistrationsForDispatchKey(kCuda);
  for (const auto& name : added) names.emplace_back("aten::" + name, "");
  for (const auto& name : names) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || kept.count(name.name.substr(6))) continue;
    const auto& returns = op->schema().returns();
    if (std::any_of(returns.begin(), returns.end(),
                    [](const auto& r) { return r.alias_info() && !r.alias_info()->isWrite(); }))
      continue;
    auto kernel = name.name == "aten::copy_" ? kernel_of<Copy>(*op) : kernel_of<Kernel>(*op);
    registrations.push_back(dispatcher.registerImpl(name, kCuda, std::move(kernel), std::nullopt,
                                                    nullptr, "emulated GPU"));
  }
  cuda.impl("_foreach_copy_", foreach_copy_);
  cuda.impl("native_dropout", native_dropout);
  cuda.impl("_use_cudnn_ctc_loss", use_library_ctc_loss);
  cuda.impl("_use_miopen_ctc_loss", use_library_ctc_loss);
  cuda.impl("_fused_sdp_choice", fused_sdp_choice);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&fused_sdp_choice);
  for (auto* library : {&cuda, &autograd}) {
    library->impl("_thnn_fused_lstm_cell", lstm_cell);
    library->impl("_thnn_fused_gru_cell", gru_cell);
  }
  autograd.impl("_fused_rms_norm", rms_norm);
}

const bool started = [] {
  override_operators();
  at::Context& context = at::globalContext();
  context.setUserEnabledCuDNN(false);
  // F.scaled_dot_product_attention chooses by a function, and not by the operator above.
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  return true;
}();

}  // namespace
}  // namespace emulated
