// What the parts of the emulated GPU share. README.md beside this file says what is emulated.
//
//     settings.cpp   the environment's settings; seeds
//     memory.cpp     device memory, its limit, guard pages; CUDA IPC
//     streams.cpp    streams and events: a thread each, with delays
//     calls.cpp      the other calls of the CUDA runtime and driver
//     nccl.cpp       NCCL: communicators, sends and receives, groups, aborts
//     kernels.cpp    ATen's CUDA operators by the CPU's, in stream order; a library of its own
//
// The first five make libcuda.so.1, which is loaded before torch (LD_PRELOAD). kernels.cpp makes
// libkernels.so, which needs torch's headers and is opened by the first CUDA call of a process
// that has torch's CUDA library loaded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#define EMULATED __attribute__((visibility("default")))

namespace emulated {

// ---- settings.cpp --------------------------------------------------------------------------------

// From EMULATED_GPU_* variables, read once a process.
struct Settings {
  int gpus;                 // EMULATED_GPU_COUNT (2)
  uint64_t seed;            // EMULATED_GPU_SEED (0); mixed with the rank (RANK, else 0)
  int delay_us;             // EMULATED_GPU_DELAY_US (0): longest delay before an operation
  int starve_ms;            // EMULATED_GPU_STARVE_MS (0): how long some streams do nothing unless waited for
  size_t memory_bytes;      // EMULATED_GPU_MEMORY_MIB (8192) of each GPU, of all processes together
  bool poison;              // EMULATED_GPU_POISON (1): new and freed memory is overwritten
  bool peer_access;         // EMULATED_GPU_PEER_ACCESS (1): GPUs can open one another's memory
  bool remote_writes;       // EMULATED_GPU_REMOTE_WRITES (0): stream memory operations on another GPU's memory
  int kernel_slots;         // EMULATED_GPU_KERNEL_SLOTS (16): communicators a GPU has room for at once
  std::string folder;       // EMULATED_GPU_FOLDER: where processes of one machine find one another
};
EMULATED const Settings& settings();

// A number that depends on the seed, the rank and what it is for, and on nothing else.
EMULATED uint64_t seeded(uint64_t what, uint64_t number);

// ---- streams.cpp ---------------------------------------------------------------------------------

class Stream;

// The stream behind a handle; 0, 1 and 2 are default streams of the thread's current device.
EMULATED Stream* stream_of(void* handle);
EMULATED int device_of(Stream*);

// Do something on a stream after all that was queued there before; may wait, in the stream's thread.
EMULATED void enqueue(Stream*, std::function<void()>);

// Wait in the calling thread, without Python's lock, until a stream or a device has done all that is
// queued now. Counted as synchronisations of the host, unless `counted` is false.
EMULATED void synchronize(Stream*, bool counted = true);
EMULATED void synchronize_device(int device, bool counted = true);

// ---- memory.cpp ----------------------------------------------------------------------------------

// Where memory is: a device's number, -1 for pinned host memory, -2 for memory that CUDA does not know.
EMULATED int device_of_memory(const void*);

// ---- errors --------------------------------------------------------------------------------------

// A fault that a real GPU reports with some later call: says what, once, and every later call fails.
EMULATED void fail(cudaError_t, const std::string& what);
EMULATED cudaError_t failure();  // of this process; cudaSuccess if there was none

// Run something that waits for others, with Python's lock released if this thread holds it.
EMULATED void without_python(const std::function<void()>&);

}  // namespace emulated
