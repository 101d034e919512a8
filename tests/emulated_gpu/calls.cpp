// The other calls of the CUDA runtime and driver: devices, contexts, kernels, memory that streams
// write and wait for. What is not here resolves to the real libraries, which find no GPU.
#include "emulator.h"

#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

namespace emulated {
namespace {

using Guard = std::lock_guard<std::mutex>;

constexpr int kMajor = 9, kMinor = 0, kMultiprocessors = 16, kVersion = CUDA_VERSION;
constexpr int kFirstBus = 0xe0;  // of the PCI addresses

std::atomic<bool> active[kMostGpus];  // whether a device has its primary context in this process
// Of this thread, the last is current; never destroyed, since a process uses CUDA until its end.
thread_local std::vector<int>& contexts = *new std::vector<int>;

bool valid(int device) { return device >= 0 && device < settings().gpus; }

std::string pci_address(int device) {
  char text[32];
  snprintf(text, sizeof text, "0000:%02x:00.0", kFirstBus + settings().visible[device]);
  return text;
}

void make_current(int device) {
  if (contexts.empty()) contexts.push_back(device);
  contexts.back() = device;
  active[device] = true;
}

// ---- kernels ------------------------------------------------------------------------------------

std::mutex kernels_mutex;
std::map<const void*, const char*>& kernels() {  // names by the functions that launch them
  static auto* const names = new std::map<const void*, const char*>;
  return *names;
}

// An emulated operator never comes here: what does would be computed by nobody.
cudaError_t refuse_kernel(const void* function) {
  if (cudaError_t failed = begin()) return end(failed);
  std::string name;
  {
    Guard lock(kernels_mutex);
    auto found = kernels().find(function);
    if (found != kernels().end()) name = found->second;
  }
  Dl_info known;
  if (name.empty() && dladdr(function, &known) && known.dli_sname) name = known.dli_sname;
  if (name.empty()) name = "without a name";
  return end(error(cudaErrorInvalidDeviceFunction, "kernel " + name + " is not emulated"));
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

// ---- memory that streams write and wait for -----------------------------------------------------

using Number = std::atomic<uint64_t>;

CUresult check_number(CUstream stream_handle, CUdeviceptr address) {
  if (cudaError_t error = begin()) return CUresult(error);
  if (!has_context()) return CUDA_ERROR_INVALID_CONTEXT;
  Stream* const stream = stream_of(stream_handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int device = device_of_memory((const void*)address);
  if (address % 8 || device == -2) return CUDA_ERROR_INVALID_VALUE;
  if (device >= 0 && device != device_of(stream) && !settings().remote_writes)
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
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
  if (contexts.empty()) make_current(0);
  active[contexts.back()] = true;
  return contexts.back();
}

bool has_context() { return !contexts.empty(); }

}  // namespace emulated

using namespace emulated;


// ---- devices ------------------------------------------------------------------------------------

RUNTIME cudaGetDeviceCount(int* count) {
  *count = 0;
  BEGIN;
  *count = settings().gpus;
  return cudaSuccess;
}
RUNTIME cudaGetDevice(int* device) {  // works after failures, and makes no context
  *device = contexts.empty() ? 0 : contexts.back();
  return cudaSuccess;
}
RUNTIME cudaSetDevice(int device) {
  BEGIN;
  if (!valid(device)) return end(cudaErrorInvalidDevice);
  make_current(device);
  return cudaSuccess;
}
RUNTIME cudaDriverGetVersion(int* version) { return *version = kVersion, cudaSuccess; }
RUNTIME cudaRuntimeGetVersion(int* version) { return *version = kVersion, cudaSuccess; }

RUNTIME cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  BEGIN;
  if (!valid(device)) return end(cudaErrorInvalidDevice);
  const int physical = settings().visible[device];
  memset((void*)p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Emulated GPU");
  const std::string uuid = uuid_text(physical).substr(4);
  for (size_t at = 0, index = 0; at < uuid.size(); at += uuid[at] == '-' ? 1 : 2)
    if (uuid[at] != '-') p->uuid.bytes[index++] = char(stoi(uuid.substr(at, 2), nullptr, 16));
  p->major = kMajor, p->minor = kMinor;
  p->totalGlobalMem = settings().memory_bytes[physical];
  p->multiProcessorCount = kMultiprocessors;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->l2CacheSize = 50 << 20;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->unifiedAddressing = 1;
  p->pciBusID = kFirstBus + physical;
  return cudaSuccess;
}
RUNTIME cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  BEGIN;
  if (!valid(device)) return end(cudaErrorInvalidDevice);
  static const std::map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, kMajor}, {cudaDevAttrComputeCapabilityMinor, kMinor},
      {cudaDevAttrMultiProcessorCount, kMultiprocessors}, {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
      {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrPciBusId, kFirstBus + settings().visible[device]}};
  const auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}
RUNTIME cudaDeviceGetPCIBusId(char* text, int size, int device) {
  BEGIN;
  if (!valid(device)) return end(cudaErrorInvalidDevice);
  snprintf(text, size, "%s", pci_address(device).c_str());
  return cudaSuccess;
}
RUNTIME cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
RUNTIME cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  BEGIN;
  if (!valid(device) || !valid(peer)) return end(cudaErrorInvalidDevice);
  *can = device != peer && settings().peer_access;
  return cudaSuccess;
}
RUNTIME cudaDeviceEnablePeerAccess(int peer, unsigned) {
  BEGIN;
  static std::atomic<bool> enabled[kMostGpus][kMostGpus];
  const int device = current_device();
  if (!valid(peer) || peer == device) return end(cudaErrorInvalidDevice);
  if (!settings().peer_access) return end(cudaErrorPeerAccessUnsupported);
  const bool before = enabled[device][peer].exchange(true);
  return end(before ? cudaErrorPeerAccessAlreadyEnabled : cudaSuccess);
}
RUNTIME cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  return *pool = nullptr, cudaSuccess;
}
RUNTIME cudaProfilerStart() { return cudaSuccess; }
RUNTIME cudaProfilerStop() { return cudaSuccess; }

// ---- graphs: nothing is ever captured -----------------------------------------------------------

RUNTIME cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
RUNTIME cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*,
                                 cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                 size_t*) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
RUNTIME cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
RUNTIME cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return end(error(cudaErrorNotSupported, "CUDA graphs are not emulated"));
}

// ---- kernels ------------------------------------------------------------------------------------

extern "C" EMULATED void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
extern "C" EMULATED void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" EMULATED void __cudaUnregisterFatBinary(void**) {}
extern "C" EMULATED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int,
                                           int) {}
extern "C" EMULATED void __cudaRegisterFunction(void**, const char* function, char*,
                                                const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                                int*) {
  Guard lock(kernels_mutex);
  kernels()[function] = name;
}
extern "C" EMULATED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                         void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
RUNTIME __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return end(cudaErrorMissingConfiguration);
  const Configuration& last = configurations.back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *(void**)stream = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
RUNTIME __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
RUNTIME __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_kernel(kernel);
}
RUNTIME cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_kernel(function);
}
RUNTIME cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return refuse_kernel(function);
}
RUNTIME cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  BEGIN;
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = kMajor * 10 + kMinor;
  return cudaSuccess;
}
RUNTIME cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
RUNTIME cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                               size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
RUNTIME cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, cudaSuccess;
}

// ---- the driver ---------------------------------------------------------------------------------

DRIVER cuInit(unsigned) { return CUresult(begin()); }
DRIVER cuDriverGetVersion(int* version) { return *version = kVersion, CUDA_SUCCESS; }
DRIVER cuGetErrorString(CUresult error, const char** text) {
  return *text = cudaGetErrorString(cudaError_t(error)), CUDA_SUCCESS;
}
DRIVER cuGetErrorName(CUresult error, const char** name) { return cuGetErrorString(error, name); }
DRIVER cuDeviceGetCount(int* count) {
  BEGIN_DRIVER;
  return *count = settings().gpus, CUDA_SUCCESS;
}
DRIVER cuDeviceGet(CUdevice* device, int index) {
  BEGIN_DRIVER;
  if (!valid(index)) return CUDA_ERROR_INVALID_DEVICE;
  return *device = index, CUDA_SUCCESS;
}

// A primary context is its device's number and 1.
DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  BEGIN_DRIVER;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  active[device] = true;
  return *context = (CUcontext)(uintptr_t)(device + 1), CUDA_SUCCESS;
}
DRIVER cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
DRIVER cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0, *is_active = active[device];
  return CUDA_SUCCESS;
}
DRIVER cuCtxPushCurrent_v2(CUcontext context) {
  BEGIN_DRIVER;
  if (!valid(int((uintptr_t)context) - 1)) return CUDA_ERROR_INVALID_CONTEXT;
  contexts.push_back(int((uintptr_t)context) - 1);
  return CUDA_SUCCESS;
}
DRIVER cuCtxPopCurrent_v2(CUcontext* context) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = (CUcontext)(uintptr_t)(contexts.back() + 1);
  contexts.pop_back();
  return CUDA_SUCCESS;
}
DRIVER cuCtxGetCurrent(CUcontext* context) {
  *context = contexts.empty() ? nullptr : (CUcontext)(uintptr_t)(contexts.back() + 1);
  return CUDA_SUCCESS;
}
DRIVER cuCtxSetCurrent(CUcontext context) {
  if (!contexts.empty()) contexts.pop_back();
  return context ? cuCtxPushCurrent_v2(context) : CUDA_SUCCESS;
}
DRIVER cuCtxGetDevice(CUdevice* device) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  return *device = contexts.back(), CUDA_SUCCESS;
}

DRIVER cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned) {
  if (CUresult error = check_number(stream, address)) return error;
  enqueue(stream_of(stream), [=] { ((Number*)address)->store(value); });
  return CUDA_SUCCESS;
}
DRIVER cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value,
                              unsigned flags) {
  if (CUresult error = check_number(stream, address)) return error;
  enqueue(stream_of(stream), [=] {
    while (!satisfied(((Number*)address)->load(), value, flags) && !failure()) usleep(20);
  });
  return CUDA_SUCCESS;
}

// How torch and others find the driver's calls.
RUNTIME cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                         unsigned long long,
                                         cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)not_emulated;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
