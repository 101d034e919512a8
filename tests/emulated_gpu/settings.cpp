// Settings from the environment, seeds, and errors that stay.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "emulator.h"

namespace emulated {
namespace {

std::string text_of(const char* name, const std::string& otherwise) {
  const char* text = getenv(name);
  return text ? text : otherwise;
}

// The numbers of a list up to the first invalid entry, as the driver reads CUDA_VISIBLE_DEVICES.
std::vector<long> numbers_of(const std::string& text) {
  std::vector<long> numbers;
  const char* at = text.c_str();
  for (char* end; *at; at = end + (*end == ',')) {
    const long number = strtol(at, &end, 10);
    if (end == at || number < 0) break;
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<long> list_of(const char* name, const std::string& otherwise) {
  const auto numbers = numbers_of(text_of(name, otherwise));
  if (!numbers.empty()) return numbers;
  fprintf(stderr, "emulated GPU: %s=%s is not a number\n", name, getenv(name));
  abort();
}

long number_of(const char* name, long otherwise) {
  return list_of(name, std::to_string(otherwise))[0];
}

// As the driver does: an entry without a GPU ends the list; a repeated one makes it empty.
std::vector<int> visible_devices(int count) {
  std::string all;
  for (int device = 0; device < count; ++device) all += std::to_string(device) + ",";
  std::vector<int> visible;
  for (long device : numbers_of(text_of("CUDA_VISIBLE_DEVICES", all))) {
    if (device >= count) break;
    if (std::count(visible.begin(), visible.end(), device)) return {};
    visible.push_back(device);
  }
  return visible;
}

Settings read() {
  Settings s{};
  const int count = std::min<long>(number_of("EMULATED_GPU_COUNT", 2), kMostGpus);
  s.visible = visible_devices(count);
  s.seed = uint64_t(number_of("EMULATED_GPU_SEED", 0)) * 1000003 + number_of("RANK", 0);
  s.delay_us = number_of("EMULATED_GPU_DELAY_US", 0);
  s.starve_ms = number_of("EMULATED_GPU_STARVE_MS", 0);
  s.kernel_slots = number_of("EMULATED_GPU_KERNEL_SLOTS", 16);
  const auto sizes = list_of("EMULATED_GPU_MEMORY_MIB", "8192");
  for (size_t device = 0; device < kMostGpus; ++device)
    s.memory_bytes.push_back(size_t(sizes[std::min(device, sizes.size() - 1)]) << 20);
  s.poison = number_of("EMULATED_GPU_POISON", 1);
  s.guard = number_of("EMULATED_GPU_GUARD", 1);
  s.remote_writes = number_of("EMULATED_GPU_REMOTE_WRITES", 0);
  s.lazy_loading = text_of("CUDA_MODULE_LOADING", "LAZY") != "EAGER";
  if (number_of("EMULATED_GPU_CONNECTIONS", 0))
    s.connections = number_of("CUDA_DEVICE_MAX_CONNECTIONS", 8);
  s.folder = text_of("EMULATED_GPU_FOLDER", "/tmp/emulated_gpu-" + std::to_string(getuid()));
  mkdir(s.folder.c_str(), 0700);
  return s;
}

std::atomic<bool> forked{false}, ending{false};
std::atomic<int> failed{cudaSuccess};
std::string* const failure_text = new std::string;
thread_local cudaError_t last_error = cudaSuccess;
thread_local Error explained{cudaSuccess};

// libkernels.so is beside this library, and needs torch's: it is opened once they are loaded.
void load_kernels() {
  static auto* const mutex = new std::recursive_mutex;  // its start makes CUDA calls
  static std::atomic<bool> done{false};
  if (done || !dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) return;
  std::lock_guard<std::recursive_mutex> lock(*mutex);
  static bool begun = false;
  if (std::exchange(begun, true)) return;
  Dl_info self;
  dladdr((void*)load_kernels, &self);
  std::string path = self.dli_fname;
  path.replace(path.rfind('/') + 1, std::string::npos, "libkernels.so");
  if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL))
    fail(cudaErrorSharedObjectInitFailed, dlerror());
  done = true;
}

bool watch_process() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  atexit([] {
    ending = true;
    if (!forked) stop_streams();
  });
  return true;
}

}  // namespace

const Settings& settings() {
  static const Settings* const all = new Settings(read());
  return *all;
}

uint64_t seeded(uint64_t what, uint64_t number) {
  uint64_t mixed = settings().seed;
  for (uint64_t part : {what, number}) {  // splitmix64
    mixed += part * 0x9e3779b97f4a7c15 + 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    mixed ^= mixed >> 31;
  }
  return mixed;
}

// As the process ends, calls still work, except waits in streams.
void begin() {
  if (forked) throw Error{cudaErrorInitializationError};
  static const bool watched = watch_process();
  if (!watched || settings().visible.empty()) throw Error{cudaErrorNoDevice};
  load_kernels();
  if (failed) throw Error{failed};
}

int end(const Error& error) {
  if (!error.text.empty()) explained = error;
  return error.number;
}

cudaError_t noted(int number) {
  if (number) last_error = cudaError_t(number);
  return cudaError_t(number);
}

void fail(cudaError_t error, const std::string& what) {
  static std::atomic<bool> first{true};
  if (!first.exchange(false)) return;
  *failure_text = what;
  failed = error;
  fprintf(stderr, "emulated GPU: %s\n", what.c_str());
  wake_all();
}

cudaError_t failure() { return ending ? cudaErrorCudartUnloading : cudaError_t(failed.load()); }

}  // namespace emulated

using namespace emulated;

RUNTIME cudaGetLastError() {
  return std::exchange(last_error, cudaError_t(failed.load()));  // a failure stays
}
RUNTIME cudaPeekAtLastError() { return last_error; }

// The runtime's own texts, which need no GPU, and the explanation of the error.
extern "C" EMULATED const char* cudaGetErrorString(cudaError_t error) {
  static const auto real = (const char* (*)(cudaError_t))dlsym(RTLD_NEXT, "cudaGetErrorString");
  thread_local std::string text;
  text = real ? real(error) : "CUDA error " + std::to_string(int(error));
  const bool has_failed = error && error == failed;
  if (has_failed || (error && error == explained.number))
    text += " (emulated GPU: " + (has_failed ? *failure_text : explained.text) + ")";
  return text.c_str();
}
