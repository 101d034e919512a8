// Common declarations of the emulated GPU. README.md beside this file says what is emulated.
//
// settings.cpp, streams.cpp, memory.cpp, calls.cpp and nccl.cpp make libcuda.so.1, which is loaded
// before torch (LD_PRELOAD). kernels.cpp makes libkernels.so, which needs torch's libraries: the
// first CUDA call of a process that has torch loaded opens it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define EMULATED __attribute__((visibility("default")))
#define RUNTIME extern "C" EMULATED cudaError_t
#define DRIVER extern "C" EMULATED CUresult

namespace emulated {

// ---- settings.cpp: settings, seeds, errors ------------------------------------------------------

constexpr int kMostGpus = 32;
constexpr int kPoison = 0x7f;  // fills new and freed memory: large numbers, and no valid indices

// From the variables EMULATED_GPU_…, which README.md describes; read once a process.
struct Settings {
  std::vector<int> visible;  // the machine's number of each GPU that this process may use
  uint64_t seed;             // mixed with the rank
  int delay_us, starve_ms, kernel_slots;
  int connections;                   // hardware queues of a GPU; 0: one for each stream
  std::vector<size_t> memory_bytes;  // of each GPU of the machine
  bool poison, guard, remote_writes, lazy_loading;
  std::string folder;
};
EMULATED const Settings& settings();

// A number that depends only on the seed, the rank and the arguments.
EMULATED uint64_t seeded(uint64_t what, uint64_t number);

// Thrown when a call of CUDA or NCCL fails: `call` returns the number and keeps the text.
struct Error {
  int number;
  std::string text = "";
};

// Throws unless this process can use CUDA. Opens libkernels.so.
void begin();
// The result of a failed call, whose text is kept for this thread's cudaGetErrorString.
int end(const Error&);
// The result of a call of the runtime; a failure is kept for this thread's cudaGetLastError.
cudaError_t noted(int number);

// The runtime and the driver use the same error numbers.
struct Result {
  int number;
  operator cudaError_t() const { return noted(number); }
  operator CUresult() const { return CUresult(number); }
};

// Runs the body of an emulated call: cudaFree(void* address) { return call([&] { … }); }
template <class Body>
Result call(Body body) {
  try {
    begin();
    body();
    begin();  // again: work that the body waited for may have failed
    return {cudaSuccess};
  } catch (const Error& error) {
    return {end(error)};
  }
}

// A fault that a real GPU reports with a later call: printed once; every later call fails.
EMULATED void fail(cudaError_t, const std::string& what);

// The failure of this process, cudaSuccess if none; cudaErrorCudartUnloading as it ends. Waits in
// streams' threads then stop.
EMULATED cudaError_t failure();

// ---- streams.cpp --------------------------------------------------------------------------------

struct Stream;

// The end of a stream's operation with this number, counted from 1. No stream: reached already.
struct Point {
  Stream* stream = nullptr;
  uint64_t number = 0;
};

// The stream behind a handle; 0, 1 and 2 are default streams of the thread's current device.
EMULATED Stream* stream_of(void* handle);
EMULATED int device_of(Stream*);

// Queue a function on a stream, also after points of other streams. It runs in the stream's thread
// without a lock, and may wait. Dropped after a failure. A wait keeps a hardware queue until its end.
EMULATED Point enqueue(Stream*, std::function<void()>, std::vector<Point> after = {},
                       bool is_wait = false);
Point last_point(Stream*);

// Wait in the calling thread until all points are reached, or a failure.
void wait_for(const std::vector<Point>&);

// Wait for all queued work; a synchronization of the host, which is counted.
EMULATED void synchronize(Stream*);
EMULATED void synchronize_device(int device, bool counted = true);
void count_synchronization();

void wake_all();      // so that all waiting threads check failure()
void stop_streams();  // as the process ends

// ---- memory.cpp ---------------------------------------------------------------------------------

constexpr int kHost = -1, kUnknown = -2;  // devices of pinned memory, and of other memory

// Device memory as other processes open it: a file of a process, from this offset.
struct Piece {
  int pid, file;
  size_t offset;
};

int device_of_memory(const void*);
bool find_piece(const void* address, size_t bytes, Piece*);  // false: it was freed
bool read_piece(const Piece&, void* to, size_t bytes);       // false: its process has ended

// ---- calls.cpp ----------------------------------------------------------------------------------

// GPUs are numbered as on the machine everywhere except in arguments of calls.
int current_device();
int device_at(int index);  // throws, if this process has no such GPU
int index_of(int device);  // -1, if this process does not see it
std::string pci_address(int device);

// The driver's calls need a context of the thread, which the runtime's calls create.
void need_context();

template <class Body>
Result call_in_context(Body body) {
  return call([&] { need_context(), body(); });
}

}  // namespace emulated
