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
#include <vector>

#define EMULATED __attribute__((visibility("default")))

// How calls of the CUDA runtime and driver begin: RUNTIME cudaFree(void* address) { BEGIN; … }
#define RUNTIME extern "C" EMULATED cudaError_t
#define DRIVER extern "C" EMULATED CUresult
#define BEGIN if (cudaError_t error = begin()) return end(error)
#define BEGIN_DRIVER if (cudaError_t error = begin()) return CUresult(error)

namespace emulated {

// ---- settings.cpp -------------------------------------------------------------------------------

constexpr int kMostGpus = 32;

// From EMULATED_GPU_* variables, read once a process.
struct Settings {
  int gpus;                  // that this process can use: EMULATED_GPU_COUNT (2), or fewer with
                             // CUDA_VISIBLE_DEVICES
  std::vector<int> visible;  // the number of each on the machine: "physical"
  uint64_t seed;             // EMULATED_GPU_SEED (0); mixed with the rank (RANK, else 0)
  int delay_us;              // EMULATED_GPU_DELAY_US (0): longest delay before an operation
  int starve_ms;             // EMULATED_GPU_STARVE_MS (0): how long some streams do nothing unless
                             // something waits for them
  std::vector<size_t> memory_bytes;  // EMULATED_GPU_MEMORY_MIB (8192, or "8192,4096"): of each
                             // physical GPU, of all processes together
  bool poison;               // EMULATED_GPU_POISON (1): new and freed memory is overwritten
  bool guard;                // EMULATED_GPU_GUARD (1): writes beside a block of memory are found
  bool peer_access;          // EMULATED_GPU_PEER_ACCESS (1): GPUs can open one another's memory
  bool remote_writes;        // EMULATED_GPU_REMOTE_WRITES (0): stream memory operations on memory
                             // of another GPU
  int kernel_slots;          // EMULATED_GPU_KERNEL_SLOTS (16): communicators that a GPU has room
                             // for at once
  std::string folder;        // EMULATED_GPU_FOLDER: where a machine's processes find one another
};
EMULATED const Settings& settings();

// A number that depends on the seed, the rank and what it is for, and on nothing else.
EMULATED uint64_t seeded(uint64_t what, uint64_t number);

// How torch and CUDA_VISIBLE_DEVICES write the identity of a physical GPU: "GPU-656d756c-…".
EMULATED std::string uuid_text(int physical);

// Byte that new and freed memory is filled with: large numbers, and no valid indices.
constexpr int kPoison = 0x7f;

// ---- errors (settings.cpp) ----------------------------------------------------------------------

// What each emulated CUDA call does first: an error if this process cannot use CUDA (a forked child
// of one that did, a process that ends, no GPU, an earlier failure). Loads kernels.cpp's library.
EMULATED cudaError_t begin();

// What each emulated call of the runtime returns through: keeps errors for cudaGetLastError.
EMULATED cudaError_t end(cudaError_t);

// An error with a text of its own, which cudaGetErrorString shows after it in this thread.
EMULATED cudaError_t error(cudaError_t, const std::string& what);

// A fault that a real GPU reports with a later call: prints it, once; every later call fails.
EMULATED void fail(cudaError_t, const std::string& what);

// Of this process; cudaSuccess if there was none. cudaErrorCudartUnloading once the process ends.
// Whatever waits in a stream's thread ends when this is not cudaSuccess.
EMULATED cudaError_t failure();

// Run something that waits for others, with Python's lock released if this thread holds it.
EMULATED void without_python(const std::function<void()>&);

// ---- streams.cpp --------------------------------------------------------------------------------

struct Stream;

// The stream behind a handle; 0, 1 and 2 are default streams of the thread's current device.
// nullptr if there is no such stream (cudaErrorInvalidResourceHandle).
EMULATED Stream* stream_of(void* handle);
EMULATED int device_of(Stream*);

// Do something on a stream after all that was queued there before. It may wait, in the stream's
// thread, without holding a lock that others need. Dropped after a failure.
EMULATED void enqueue(Stream*, std::function<void()>);

// Wait in the calling thread, without Python's lock, until a stream or a device has done all that
// is queued now, or something failed. Counted as synchronisations of the host if `counted`.
EMULATED void synchronize(Stream*, bool counted = true);
EMULATED void synchronize_device(int device, bool counted = true);

// Count a synchronisation of the host: "stream", "event", "device", "pageable copy", "free".
EMULATED void count_synchronization(const char* kind);

// Wake all that waits in streams.cpp, to look at failure().
void wake_all();

// Stop all streams as the process ends.
void stop_streams();

// ---- memory.cpp ---------------------------------------------------------------------------------

// Where memory is: a device's number, -1 for pinned host memory, -2 for memory unknown to CUDA.
EMULATED int device_of_memory(const void*);

// ---- calls.cpp ----------------------------------------------------------------------------------

// The thread's current device; makes the primary context of the device active.
EMULATED int current_device();

// Whether the thread has a context, without which the driver's calls fail.
bool has_context();

}  // namespace emulated
