// The other calls of the CUDA runtime and driver: devices, contexts, kernels, memory that streams
// write and wait for. Other calls resolve to the real libraries, which find no GPU.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "emulator.h"

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

namespace emulated {
namespace {

constexpr int kFirstBus = 0xe0;  // of the PCI addresses

// Devices of this thread's contexts; the last is current. Never destroyed, since CUDA is used until
// the process ends.
thread_local std::vector<int>& contexts = *new std::vector<int>;

void make_current(int device) {
  if (contexts.empty()) contexts.push_back(device);
  contexts.back() = device;
}

// A primary context is its device's number plus 1.
CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(device + 1); }

int device_of_context(CUcontext context) {
  const int device = int((uintptr_t)context) - 1;
  if (index_of(device) < 0) throw Error{cudaErrorDeviceUninitialized};
  return device;
}

// ---- memory that streams write and wait for -----------------------------------------------------

using Number = std::atomic<uint64_t>;

Number* number_at(CUdeviceptr address, Stream* stream) {
  const int device = device_of_memory((const void*)address);
  const bool remote = device >= 0 && device != device_of(stream);
  if (address % 8 || device == kUnknown || (remote && !settings().remote_writes))
    throw Error{cudaErrorInvalidValue};
  return (Number*)address;
}

bool satisfied(uint64_t number, uint64_t value, unsigned flags) {
  switch (flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ: return int64_t(number - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return number == value;
    case CU_STREAM_WAIT_VALUE_AND: return number & value;
    default: return ~(number | value);
  }
}

CUresult not_emulated() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

int current_device() {
  if (contexts.empty()) make_current(device_at(0));
  return contexts.back();
}

int device_at(int index) {
  const auto& visible = settings().visible;
  if (index < 0 || index >= int(visible.size())) throw Error{cudaErrorInvalidDevice};
  return visible[index];
}

int index_of(int device) {
  const auto& visible = settings().visible;
  const auto found = std::find(visible.begin(), visible.end(), device);
  return found == visible.end() ? -1 : int(found - visible.begin());
}

std::string pci_address(int device) {
  char text[32];
  snprintf(text, sizeof text, "0000:%02x:00.0", kFirstBus + device);
  return text;
}

void need_context() {
  if (contexts.empty()) throw Error{cudaErrorDeviceUninitialized};
}

}  // namespace emulated

using namespace emulated;

// Calls that only succeed, with any arguments.
#define SUCCEEDS(name)                                                  \
  extern "C" EMULATED long succeed_##name() __asm__(#name);             \
  extern "C" long succeed_##name() { return 0; }
SUCCEEDS(cudaProfilerStart)
SUCCEEDS(cudaProfilerStop)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
SUCCEEDS(__cudaRegisterFatBinary)
SUCCEEDS(__cudaRegisterFatBinaryEnd)
SUCCEEDS(__cudaUnregisterFatBinary)
SUCCEEDS(__cudaRegisterFunction)
SUCCEEDS(__cudaRegisterVar)
SUCCEEDS(__cudaPushCallConfiguration)
SUCCEEDS(__cudaPopCallConfiguration)
SUCCEEDS(__cudaGetKernel)

// An emulated operator launches no kernel, so a launch would compute nothing.
#define REFUSES(name)                                                                          \
  extern "C" EMULATED cudaError_t refuse_##name() __asm__(#name);                              \
  extern "C" cudaError_t refuse_##name() {                                                     \
    return call([] {                                                                           \
      throw Error{cudaErrorInvalidDeviceFunction, "this operator's kernels are not emulated"}; \
    });                                                                                        \
  }
REFUSES(cudaLaunchKernel)
REFUSES(cudaLaunchKernelExC)
REFUSES(__cudaLaunchKernel)

// ---- devices ------------------------------------------------------------------------------------

RUNTIME cudaGetDeviceCount(int* count) {
  *count = 0;
  return call([&] { *count = int(settings().visible.size()); });
}
RUNTIME cudaGetDevice(int* device) {  // works after failures, and makes no context
  *device = contexts.empty() ? 0 : index_of(contexts.back());
  return cudaSuccess;
}
RUNTIME cudaSetDevice(int device) {
  return call([&] { make_current(device_at(device)); });
}
RUNTIME cudaDriverGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }
RUNTIME cudaRuntimeGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }

RUNTIME cudaGetDeviceProperties(cudaDeviceProp* p, int index) {
  return call([&] {
    const int device = device_at(index);
    memset((void*)p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Emulated GPU");
    snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "emulated GPU %d", device);
    p->major = 9, p->minor = 0;
    p->totalGlobalMem = settings().memory_bytes[device];
    p->multiProcessorCount = 16;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->unifiedAddressing = 1;
    p->pciBusID = kFirstBus + device;
  });
}
RUNTIME cudaDeviceGetPCIBusId(char* text, int size, int device) {
  return call([&] { snprintf(text, size, "%s", pci_address(device_at(device)).c_str()); });
}
RUNTIME cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
RUNTIME cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call([&] { *can = device_at(device) != device_at(peer); });
}
RUNTIME cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return call([&] {
    if (current_device() == device_at(peer)) throw Error{cudaErrorInvalidDevice};
  });
}

// ---- the driver ---------------------------------------------------------------------------------

DRIVER cuInit(unsigned) {
  return call([] {});
}
DRIVER cuGetErrorString(CUresult error, const char** text) {
  return *text = cudaGetErrorString(cudaError_t(error)), CUDA_SUCCESS;
}
DRIVER cuDeviceGet(CUdevice* device, int index) {
  return call([&] { device_at(index), *device = index; });
}
DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice index) {
  return call([&] { *context = context_of(device_at(index)); });
}
DRIVER cuDevicePrimaryCtxGetState(CUdevice index, unsigned* flags, int* is_active) {
  return call([&] { device_at(index), *flags = 0, *is_active = 1; });
}
DRIVER cuCtxPushCurrent_v2(CUcontext context) {
  return call([&] { contexts.push_back(device_of_context(context)); });
}
DRIVER cuCtxPopCurrent_v2(CUcontext* context) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_of(contexts.back());
  contexts.pop_back();
  return CUDA_SUCCESS;
}
DRIVER cuStreamWriteValue64_v2(CUstream handle, CUdeviceptr address, cuuint64_t value, unsigned) {
  return call_in_context([&] {
    Stream* const stream = stream_of(handle);
    Number* const number = number_at(address, stream);
    enqueue(stream, [=] { number->store(value); });
  });
}
DRIVER cuStreamWaitValue64_v2(CUstream handle, CUdeviceptr address, cuuint64_t value,
                              unsigned flags) {
  return call_in_context([&] {
    Stream* const stream = stream_of(handle);
    Number* const number = number_at(address, stream);
    enqueue(stream, [=] {
      while (!satisfied(number->load(), value, flags) && !failure()) usleep(20);
    }, {}, true);
  });
}

// Torch and others look up the driver's calls here.
RUNTIME cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                         unsigned long long,
                                         cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)not_emulated;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
