// What the parts of the emulated GPU share. README.md beside this file says what is emulated.
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
  std::vector<size_t> memory_bytes;  // of each GPU of the machine
  bool poison, guard, peer_access, remote_writes;
  std::string folder;
};
EMULATED const Settings& settings();

// A number that depends on the seed, the rank and what it is for, and on nothing else.
EMULATED uint64_t seeded(uint64_t what, uint64_t number);

// Thrown where a call of CUDA or NCCL fails: `call` returns the number and keeps the text.
struct Error {
  int number;
  std::string text = "";
};

// Thrown on, unless this process can use CUDA. Opens libkernels.so.
void begin();
// What a failed call returns; noted for cudaGetLastError and cudaGetErrorString of this thread.
int end(const Error&);

// Both APIs number their errors alike.
struct Result {
  int number;
  operator cudaError_t() const { return cudaError_t(number); }
  operator CUresult() const { return CUresult(number); }
};

// What most emulated calls consist of: cudaFree(void* address) { return call([&] { … }); }
template <class Body>
Result call(Body body) {
  try {
    begin();
    body();
    begin();  // again: what it waited for may have failed
    return {cudaSuccess};
  } catch (const Error& error) {
    return {end(error)};
  }
}

// A fault that a real GPU reports with a later call: printed, once; every later call fails.
EMULATED void fail(cudaError_t, const std::string& what);

// Of this process, cudaSuccess if none; cudaErrorCudartUnloading as it ends. Whatever waits in a
// stream's thread stops then.
EMULATED cudaError_t failure();

// ---- streams.cpp --------------------------------------------------------------------------------

struct Stream;

// The end of a stream's operation of this number, counted from 1. No stream: reached already.
struct Point {
  Stream* stream = nullptr;
  uint64_t number = 0;
};

// The stream behind a handle; 0, 1 and 2 are default streams of the thread's current device.
EMULATED Stream* stream_of(void* handle);
int device_of(Stream*);

// Do something on a stream after all that was queued there before, and after points of others. It
// may wait, in the stream's thread, without a lock that others need. Dropped after a failure.
EMULATED Point enqueue(Stream*, std::function<void()>, std::vector<Point> after = {});
Point last_point(Stream*);

// Wait in the calling thread until all points are reached, or a failure.
void wait_for(const std::vector<Point>&);

// Wait for all that is queued; a synchronization of the host, which is counted.
EMULATED void synchronize(Stream*);
void synchronize_device(int device, bool counted = true);
void count_synchronization();

void wake_all();      // so that all that waits looks at failure()
void stop_streams();  // as the process ends

// ---- memory.cpp ---------------------------------------------------------------------------------

constexpr int kHost = -1, kUnknown = -2;  // devices of pinned memory, and of other memory

// Device memory as other processes find it: this file of that process, from this offset.
struct Piece {
  int pid, file;
  size_t offset;
};

int device_of_memory(const void*);
bool find_piece(const void* address, size_t bytes, Piece*);  // false: it was freed
bool read_piece(const Piece&, void* to, size_t bytes);       // false: its process has ended

// ---- calls.cpp ----------------------------------------------------------------------------------

// GPUs are known by their number on the machine everywhere but in arguments of calls.
int current_device();
int device_at(int index);  // throws, if this process has no such GPU
int index_of(int device);  // -1, if this process does not see it
std::string pci_address(int device);

// The driver's calls need a context of the thread, which the runtime's make.
void need_context();

template <class Body>
Result call_in_context(Body body) {
  return call([&] { need_context(), body(); });
}

}  // namespace emulated
