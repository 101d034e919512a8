// Device memory: pages of this machine that other processes can map, between pages that nobody can
// use. Addresses are never used again, so that a use after cudaFree ends the process.
#include "emulator.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace emulated {
namespace {

using Guard = std::lock_guard<std::mutex>;

constexpr size_t kPage = 4096, kAlignment = 512;
constexpr size_t kArena = size_t(1) << 42;  // addresses for device memory of one process
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr int kHost = -1, kUnknown = -2;

struct Block {
  size_t size;        // as asked for
  char* mapping;      // whole pages, of which the block is the end
  size_t mapped;      // bytes of these pages
  int device;         // kHost for pinned memory
  int file = -1;      // of device memory
  int opened = 0;     // how often, if it is memory of another process
  bool registered = false;  // pageable memory that was pinned
  std::string origin; // what names memory of another process
};

// What names memory to other processes; 64 bytes.
struct Handle {
  uint32_t magic;
  int pid, file, device;
  size_t size, mapped;
  ino_t inode;
};
static_assert(sizeof(Handle) <= CUDA_IPC_HANDLE_SIZE, "a handle has room for no more");
constexpr uint32_t kMagic = 0x47505521;

struct State {
  std::mutex mutex;
  std::map<const char*, Block> blocks;  // by address
  char* next = nullptr;                 // the arena's free part
  char* arena_end = nullptr;
};
State& state() {
  static State* const all = new State;
  return *all;
}

// ---- the limit, over all processes --------------------------------------------------------------

// A file has a row for each process: bytes used on each GPU. A process holds a file lock on its row
// as long as it lives; a row without a lock does not count.
constexpr int kRows = 1024;
struct Row {
  size_t bytes[kMostGpus];
};

struct Table {
  int file;
  Row* rows;
  int mine = -1;

  Table() {
    file = open((settings().folder + "/memory").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Row) * kRows)) perror("emulated GPU: no table");
    rows = (Row*)mmap(nullptr, sizeof(Row) * kRows, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    for (int row = 0; row < kRows && mine < 0; ++row)
      if (lock(F_SETLK, row)) mine = row;
    if (mine < 0) fail(cudaErrorUnknown, "more than 1024 processes use one folder");
    else memset(&rows[mine], 0, sizeof(Row));
  }
  bool lock(int command, int row, short type = F_WRLCK) {
    struct flock range = {};
    range.l_type = type, range.l_whence = SEEK_SET;
    range.l_start = row * sizeof(Row), range.l_len = sizeof(Row);
    int error;
    while ((error = fcntl(file, command, &range)) && errno == EINTR) {}
    return !error && (command != F_GETLK || range.l_type != F_UNLCK);
  }
  size_t used(int gpu) {
    size_t sum = 0;
    for (int row = 0; row < kRows; ++row)
      if (rows[row].bytes[gpu] && (row == mine || lock(F_GETLK, row))) sum += rows[row].bytes[gpu];
    return sum;
  }
  // Take bytes of a GPU unless that is more than it has.
  bool take(int gpu, size_t bytes) {
    if (mine < 0) return false;
    lock(F_SETLKW, kRows);  // one process at a time; the row after the last
    const bool fits = used(gpu) + bytes <= settings().memory_bytes[gpu];
    if (fits) rows[mine].bytes[gpu] += bytes;
    lock(F_SETLK, kRows, F_UNLCK);
    return fits;
  }
};
Table& table() {  // used with the state's lock held
  static Table* const one = new Table;
  return *one;
}

// ---- pages --------------------------------------------------------------------------------------

// Map pages so that there is an unusable one before and after them; MAP_FAILED if there is no room.
char* map_pages(size_t bytes, int file) {
  State& all = state();
  if (!all.next) {
    void* arena = mmap(nullptr, kArena, PROT_NONE, kReserved, -1, 0);
    if (arena == MAP_FAILED) {
      perror("emulated GPU: cannot reserve addresses (is there a limit, ulimit -v?)");
      return (char*)MAP_FAILED;
    }
    all.next = (char*)arena, all.arena_end = all.next + kArena;
  }
  if (size_t(all.arena_end - all.next) < bytes + 2 * kPage) return (char*)MAP_FAILED;
  const int flags = MAP_FIXED | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  void* pages = mmap(all.next + kPage, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (pages != MAP_FAILED) all.next += kPage + bytes;
  return (char*)pages;
}

void unmap_pages(char* pages, size_t bytes) {
  mmap(pages, bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
}

// ---- blocks -------------------------------------------------------------------------------------

using Found = std::map<const char*, Block>::iterator;

// The block that has an address, else the end; the lock is held.
Found find(const void* address) {
  auto& blocks = state().blocks;
  auto after = blocks.upper_bound((const char*)address);
  if (after == blocks.begin()) return blocks.end();
  --after;
  const char* const end = after->first + std::max<size_t>(after->second.size, 1);
  return (const char*)address < end ? after : blocks.end();
}

// Note a block and return its address. It ends where its pages end, but for the alignment: what is
// written behind it hits the guard page.
char* keep(const Block& block) {
  const size_t slack = settings().guard ? 0 : kPage;
  char* const start =
      block.mapping + (block.mapped - slack - block.size) / kAlignment * kAlignment;
  state().blocks[start] = block;
  return start;
}

cudaError_t allocate(void** address, size_t size, int device) {
  *address = nullptr;
  if (!size) return cudaSuccess;
  if (size > kArena / 2) return cudaErrorMemoryAllocation;
  State& all = state();
  Guard lock(all.mutex);
  const size_t slack = settings().guard ? 0 : kPage;  // behind the block
  Block block{size, nullptr, (size + slack + kPage - 1) / kPage * kPage, device};
  const int physical = device == kHost ? -1 : settings().visible[device];
  if (device != kHost) {
    if (!table().take(physical, block.mapped)) return cudaErrorMemoryAllocation;
    block.file = memfd_create("emulated_gpu", MFD_CLOEXEC);
    if (block.file < 0 || ftruncate(block.file, block.mapped)) block.mapping = (char*)MAP_FAILED;
  }
  if (!block.mapping) block.mapping = map_pages(block.mapped, block.file);
  if (block.mapping == MAP_FAILED) {
    perror("emulated GPU: cannot allocate memory of this machine");
    if (block.file >= 0) close(block.file);
    if (physical >= 0) table().rows[table().mine].bytes[physical] -= block.mapped;
    return cudaErrorMemoryAllocation;
  }
  if (settings().poison) memset(block.mapping, kPoison, block.mapped);
  *address = keep(block);
  return cudaSuccess;
}

// Whether the bytes of the pages beside the block are as they were.
bool intact(const char* start, const Block& block) {
  if (!settings().poison || !settings().guard) return true;
  auto poisoned = [](char byte) { return byte == kPoison; };
  return std::all_of((const char*)block.mapping, start, poisoned) &&
         std::all_of(start + block.size, (const char*)block.mapping + block.mapped, poisoned);
}

void synchronize_for_free(int device) {
  count_synchronization("free");
  for (int other = 0; other < settings().gpus; ++other)
    if (device < 0 || device >= settings().gpus || device == other)
      synchronize_device(other, false);
}

// Free a block, or close memory of another process, when the GPU has done all that is queued.
cudaError_t release(void* address, bool host, bool opened) {
  if (!address) return cudaSuccess;
  State& all = state();
  int device;
  {
    Guard lock(all.mutex);
    auto found = find(address);
    if (found == all.blocks.end() || found->first != address || found->second.registered ||
        (found->second.device == kHost) != host || (found->second.opened > 0) != opened)
      return cudaErrorInvalidValue;
    if (opened && --found->second.opened > 0) return cudaSuccess;
    device = found->second.device;
  }
  synchronize_for_free(device);
  Block block;
  bool whole;
  {
    Guard lock(all.mutex);
    auto found = all.blocks.find((const char*)address);
    if (found == all.blocks.end()) return cudaErrorInvalidValue;
    block = found->second;
    whole = opened || intact(found->first, block);
    all.blocks.erase(found);
    unmap_pages(block.mapping, block.mapped);
    if (block.file >= 0) close(block.file);
    if (block.file >= 0 && !opened)
      table().rows[table().mine].bytes[settings().visible[device]] -= block.mapped;
  }
  if (!whole)
    fail(cudaErrorIllegalAddress,
         "something wrote beside a block of " + std::to_string(block.size) + " bytes");
  return failure();
}

// ---- copies -------------------------------------------------------------------------------------

// The device that a range is on, or kHost or kUnknown; false if it is longer than its block.
bool locate(const void* address, size_t size, int* device) {
  Guard lock(state().mutex);
  auto found = find(address);
  *device = found == state().blocks.end() ? kUnknown : found->second.device;
  return *device == kUnknown || (const char*)address + size <= found->first + found->second.size;
}

// As cudaMemcpyAsync with memory that is not pinned: to a device, the host continues when the data
// is in a buffer of the driver; from a device, when it has arrived.
cudaError_t copy(void* to, const void* from, size_t size, cudaMemcpyKind kind, Stream* stream) {
  int target, source;
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (!locate(to, size, &target) || !locate(from, size, &source)) return cudaErrorInvalidValue;
  if ((kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) && target < 0)
    return cudaErrorInvalidValue;
  if ((kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) && source < 0)
    return cudaErrorInvalidValue;
  if (!size) return cudaSuccess;
  if (target != kUnknown && source != kUnknown && (target >= 0 || source >= 0)) {
    enqueue(stream, [=] { memmove(to, from, size); });
    return cudaSuccess;
  }
  count_synchronization("pageable copy");
  synchronize(stream, false);
  if (target < 0) {
    if (!failure()) memmove(to, from, size);
    return failure();
  }
  auto buffer = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
  enqueue(stream, [=] { memcpy(to, buffer->data(), size); });
  return failure();
}

// ---- memory of other processes ------------------------------------------------------------------

CUresult export_memory(Handle* handle, const void* address) {
  Guard lock(state().mutex);
  auto found = find(address);
  struct stat file;
  if (found == state().blocks.end() || found->second.file < 0 || found->second.opened ||
      fstat(found->second.file, &file))
    return CUDA_ERROR_INVALID_VALUE;
  const Block& block = found->second;
  memset((void*)handle, 0, CUDA_IPC_HANDLE_SIZE);
  *handle = {kMagic,     getpid(),     block.file, settings().visible[block.device],
             block.size, block.mapped, file.st_ino};
  return CUDA_SUCCESS;
}

// The index of a physical GPU here; one of its own, beyond all others, if this process does not
// see it, but has opened memory there.
int index_of(int physical) {
  const auto& visible = settings().visible;
  const auto found = std::find(visible.begin(), visible.end(), physical);
  return found == visible.end() ? settings().gpus + physical : int(found - visible.begin());
}

CUresult open_memory(void** address, const Handle& handle, unsigned flags) {
  const int device = current_device();
  if (handle.magic != kMagic || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return CUDA_ERROR_INVALID_VALUE;
  if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  if (handle.device != settings().visible[device] && !settings().peer_access)
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const std::string origin((const char*)&handle, sizeof handle);
  State& all = state();
  Guard lock(all.mutex);
  for (auto& entry : all.blocks)
    if (entry.second.opened && entry.second.origin == origin) {
      ++entry.second.opened;
      *address = (void*)entry.first;
      return CUDA_SUCCESS;
    }
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.file);
  Block block{handle.size, nullptr, handle.mapped, index_of(handle.device)};
  block.file = open(path, O_RDWR | O_CLOEXEC);
  struct stat file;
  if (block.file < 0) return CUDA_ERROR_INVALID_VALUE;
  if (!fstat(block.file, &file) && file.st_ino == handle.inode)  // not freed, and its number reused
    block.mapping = map_pages(block.mapped, block.file);
  if (!block.mapping || block.mapping == MAP_FAILED) {
    close(block.file);
    return CUDA_ERROR_INVALID_VALUE;
  }
  block.opened = 1, block.origin = origin;
  *address = keep(block);
  return CUDA_SUCCESS;
}

}  // namespace

int device_of_memory(const void* address) {
  int device;
  locate(address, 0, &device);
  return device;
}

}  // namespace emulated

using namespace emulated;


// The driver's calls need a context of the thread.
#define BEGIN_IN_CONTEXT \
  BEGIN_DRIVER;          \
  if (!has_context()) return CUDA_ERROR_INVALID_CONTEXT

RUNTIME cudaMalloc(void** address, size_t size) {
  BEGIN;
  return end(allocate(address, size, current_device()));
}
RUNTIME cudaHostAlloc(void** address, size_t size, unsigned) {
  BEGIN;
  return end(allocate(address, size, kHost));
}
RUNTIME cudaMallocHost(void** address, size_t size) { return cudaHostAlloc(address, size, 0); }
RUNTIME cudaFree(void* address) {
  BEGIN;
  current_device();
  return end(release(address, false, false));
}
RUNTIME cudaFreeHost(void* address) {
  BEGIN;
  return end(release(address, true, false));
}

RUNTIME cudaMemGetInfo(size_t* free, size_t* total) {
  BEGIN;
  const int physical = settings().visible[current_device()];
  Guard lock(state().mutex);
  *total = settings().memory_bytes[physical];
  *free = *total - std::min(*total, table().used(physical));
  return cudaSuccess;
}

RUNTIME cudaHostRegister(void* address, size_t size, unsigned) {
  BEGIN;
  Guard lock(state().mutex);
  if (find(address) != state().blocks.end()) return end(cudaErrorHostMemoryAlreadyRegistered);
  Block block{size, (char*)address, size, kHost};
  block.registered = true;
  state().blocks[(const char*)address] = block;
  return cudaSuccess;
}
RUNTIME cudaHostUnregister(void* address) {
  BEGIN;
  {
    Guard lock(state().mutex);
    auto found = find(address);
    if (found == state().blocks.end() || !found->second.registered || found->first != address)
      return end(cudaErrorHostMemoryNotRegistered);
  }
  synchronize_for_free(kHost);
  Guard lock(state().mutex);
  state().blocks.erase((const char*)address);
  return cudaSuccess;
}

RUNTIME cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  BEGIN;
  const int device = device_of_memory(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = device == kUnknown ? cudaMemoryTypeUnregistered
                     : device == kHost  ? cudaMemoryTypeHost
                                        : cudaMemoryTypeDevice;
  attributes->device = device == kHost || device >= settings().gpus ? current_device() : device;
  if (device != kUnknown) attributes->devicePointer = (void*)address;
  if (device < 0) attributes->hostPointer = (void*)address;
  return cudaSuccess;
}

RUNTIME cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                        cudaStream_t stream) {
  BEGIN;
  return end(copy(to, from, size, kind, stream_of(stream)));
}
RUNTIME cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                            cudaStream_t stream) {
  BEGIN;
  return end(copy(to, from, size, cudaMemcpyDeviceToDevice, stream_of(stream)));
}
RUNTIME cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  BEGIN;
  if (cudaError_t error = copy(to, from, size, kind, stream_of(nullptr))) return end(error);
  const bool host = device_of_memory(to) < 0 || device_of_memory(from) < 0;
  if (host) synchronize(stream_of(nullptr));
  return end(failure());
}
RUNTIME cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t handle) {
  BEGIN;
  int device;
  Stream* const stream = stream_of(handle);
  if (!stream) return end(cudaErrorInvalidResourceHandle);
  if (!locate(to, size, &device) || device == kUnknown) return end(cudaErrorInvalidValue);
  enqueue(stream, [=] { memset(to, value, size); });
  return cudaSuccess;
}
RUNTIME cudaMemset(void* to, int value, size_t size) {
  return cudaMemsetAsync(to, value, size, nullptr);
}

RUNTIME cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  BEGIN;
  return end(cudaError_t(export_memory((Handle*)handle, address)));
}
RUNTIME cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned flags) {
  BEGIN;
  return end(cudaError_t(open_memory(address, *(Handle*)&handle, flags)));
}
RUNTIME cudaIpcCloseMemHandle(void* address) {
  BEGIN;
  return end(release(address, false, true));
}

DRIVER cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
  BEGIN_IN_CONTEXT;
  return CUresult(size ? allocate((void**)address, size, current_device()) : cudaErrorInvalidValue);
}
DRIVER cuMemFree_v2(CUdeviceptr address) {
  BEGIN_IN_CONTEXT;
  return CUresult(release((void*)address, false, false));
}
DRIVER cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  BEGIN_IN_CONTEXT;
  return CUresult(
      copy((void*)to, (const void*)from, size, cudaMemcpyDeviceToDevice, stream_of(stream)));
}
DRIVER cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  BEGIN_IN_CONTEXT;
  return export_memory((Handle*)handle, (const void*)address);
}
DRIVER cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  BEGIN_IN_CONTEXT;
  return open_memory((void**)address, *(Handle*)&handle, flags);
}
DRIVER cuIpcCloseMemHandle(CUdeviceptr address) {
  BEGIN_IN_CONTEXT;
  return CUresult(release((void*)address, false, true));
}
