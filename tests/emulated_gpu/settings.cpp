// Settings from the environment, seeds, and errors that stay.
#include "emulator.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace emulated {
namespace {

std::string text_of(const char* name, const std::string& otherwise) {
  const char* text = getenv(name);
  return text ? text : otherwise;
}

long number_of(const char* name, long otherwise) {
  const std::string text = text_of(name, "");
  char* end = nullptr;
  const long number = strtol(text.c_str(), &end, 10);
  if (text.empty()) return otherwise;
  if (*end || number < 0) {
    fprintf(stderr, "emulated GPU: %s=%s is not a number\n", name, text.c_str());
    abort();
  }
  return number;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char letter : text) {
    if (letter == ',') parts.emplace_back();
    else if (letter != ' ') parts.back() += letter;
  }
  return parts;
}

// The physical number that an entry of CUDA_VISIBLE_DEVICES names, -1 if none.
int named_device(const std::string& entry, int count) {
  if (entry.rfind("GPU-", 0) == 0) {
    for (int device = 0; device < count; ++device)
      if (uuid_text(device).rfind(entry, 0) == 0) return device;
    return -1;
  }
  char* end = nullptr;
  const long number = strtol(entry.c_str(), &end, 10);
  return end != entry.c_str() && number >= 0 && number < count ? int(number) : -1;
}

// As the driver does: the first entry that names no device ends the list; a device named twice
// makes it empty.
std::vector<int> visible_devices(int count) {
  std::vector<int> visible;
  const char* variable = getenv("CUDA_VISIBLE_DEVICES");
  if (!variable) {
    for (int device = 0; device < count; ++device) visible.push_back(device);
    return visible;
  }
  for (const std::string& entry : split(variable)) {
    const int device = named_device(entry, count);
    if (device < 0) break;
    if (std::count(visible.begin(), visible.end(), device)) return {};
    visible.push_back(device);
  }
  return visible;
}

Settings read() {
  Settings s;
  const int count = std::min(int(number_of("EMULATED_GPU_COUNT", 2)), kMostGpus);
  s.visible = visible_devices(count);
  s.gpus = int(s.visible.size());
  s.seed = uint64_t(number_of("EMULATED_GPU_SEED", 0)) * 1000003 + number_of("RANK", 0);
  s.delay_us = int(number_of("EMULATED_GPU_DELAY_US", 0));
  s.starve_ms = int(number_of("EMULATED_GPU_STARVE_MS", 0));
  const auto sizes = split(text_of("EMULATED_GPU_MEMORY_MIB", "8192"));
  for (int device = 0; device < count; ++device)
    s.memory_bytes.push_back(
        strtoull(sizes[std::min<size_t>(device, sizes.size() - 1)].c_str(), nullptr, 10) << 20);
  s.poison = number_of("EMULATED_GPU_POISON", 1);
  s.guard = number_of("EMULATED_GPU_GUARD", 1);
  s.peer_access = number_of("EMULATED_GPU_PEER_ACCESS", 1);
  s.remote_writes = number_of("EMULATED_GPU_REMOTE_WRITES", 0);
  s.kernel_slots = int(number_of("EMULATED_GPU_KERNEL_SLOTS", 16));
  s.folder = text_of("EMULATED_GPU_FOLDER", "/tmp/emulated_gpu-" + std::to_string(getuid()));
  mkdir(s.folder.c_str(), 0700);
  return s;
}

std::atomic<bool> used{false}, forked{false}, ending{false};
std::atomic<int> failed{cudaSuccess};
std::string* const failure_text = new std::string;
thread_local cudaError_t last_error = cudaSuccess, explained = cudaSuccess;
thread_local std::string explanation;

// kernels.cpp's library needs torch's: it is opened once that is there.
void load_kernels() {
  static auto* const lock = new std::recursive_mutex;
  static std::atomic<bool> done{false};
  if (done) return;
  const char* path = getenv("EMULATED_GPU_KERNELS");
  if (!path || !*path || !dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) return;
  std::lock_guard<std::recursive_mutex> guard(*lock);
  static bool begun = false;  // also in this thread: the library's start may make CUDA calls
  if (begun) return;
  begun = true;
  if (!dlopen(path, RTLD_NOW | RTLD_GLOBAL)) fail(cudaErrorSharedObjectInitFailed, dlerror());
  done = true;
}

void on_first_use() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  atexit([] {
    ending = true;
    if (!forked) stop_streams();
  });
}

}  // namespace

const Settings& settings() {
  static const Settings* const read_settings = new Settings(read());
  return *read_settings;
}

std::string uuid_text(int physical) {
  char text[48];
  snprintf(text, sizeof text, "GPU-656d756c-6174-6564-4750-55%010x", physical);
  return text;
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

cudaError_t begin() {
  if (forked) return cudaErrorInitializationError;
  if (!used.exchange(true)) on_first_use();
  if (settings().gpus == 0) return cudaErrorNoDevice;
  load_kernels();
  return cudaError_t(failed.load());  // while the process ends, calls still work; waits do not
}

cudaError_t end(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t error(cudaError_t error, const std::string& what) {
  explained = error;
  explanation = what;
  return error;
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

void without_python(const std::function<void()>& wait) {
  static const auto initialized = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  static const auto holds_lock = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  static const auto release = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  static const auto acquire = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  const bool python = initialized && holds_lock && release && acquire && initialized();
  const bool held = python && holds_lock();
  void* const state = held ? release() : nullptr;
  wait();
  if (held) acquire(state);
}

}  // namespace emulated

using namespace emulated;

RUNTIME cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaError_t(failed.load());  // a failure stays
  return error;
}

RUNTIME cudaPeekAtLastError() { return last_error; }

// The runtime's own texts, which need no GPU, and what is known of the error.
extern "C" EMULATED const char* cudaGetErrorString(cudaError_t error) {
  static void* const library = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
  static const auto real =
      (const char* (*)(cudaError_t))(library ? dlsym(library, "cudaGetErrorString") : nullptr);
  thread_local std::string text;
  text = real ? real(error) : "CUDA error " + std::to_string(int(error));
  if (error == cudaSuccess) return text.c_str();
  if (error == failed) text += " (emulated GPU: " + *failure_text + ")";
  else if (error == explained) text += " (emulated GPU: " + explanation + ")";
  return text.c_str();
}
