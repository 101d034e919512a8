// Device memory: each block is a file without a name, which other processes can open, mapped
// between unusable pages. Addresses are never used again: a use after cudaFree ends the process.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulator.h"

namespace emulated {
namespace {

using Guard = std::lock_guard<std::mutex>;

constexpr size_t kPage = 4096, kAlignment = 512;
constexpr size_t kArena = size_t(1) << 42;  // addresses for device memory of one process
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

struct Block {
  size_t size;     // as requested
  int device;      // kHost for pinned memory
  int file;
  char* mapping;   // whole pages; the block ends where they end, except for its alignment
  size_t mapped;   // bytes of these pages
  bool opened;     // memory of another process
};

struct State {
  std::mutex mutex;
  std::map<const char*, Block> blocks;  // by address
  char *next = nullptr, *end = nullptr;  // the arena's free part
};
State& state() {
  static State* const all = new State;
  return *all;
}

// ---- the limit, over all processes --------------------------------------------------------------

// A process's use of each GPU's memory; counts as long as the process lives.
struct Row {
  std::atomic<int> pid;
  std::atomic<size_t> bytes[kMostGpus];

  bool lives() const { return pid && (!kill(pid, 0) || errno == EPERM); }
};
constexpr int kRows = 1024;

// All rows, in a file that the processes of a machine share.
struct Table {
  int file;
  Row* rows;
};
Table& table() {
  static Table* const shared = [] {
    const std::string path = settings().folder + "/memory";
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Row) * kRows))
      throw Error{cudaErrorUnknown, "cannot write to " + path};
    const int access = PROT_READ | PROT_WRITE;
    void* rows = mmap(nullptr, sizeof(Row) * kRows, access, MAP_SHARED, file, 0);
    return new Table{file, (Row*)rows};
  }();
  return *shared;
}

Row& own_row() {
  static Row* const own = [] {
    for (Row* row = table().rows; row < table().rows + kRows; ++row) {
      if (row->lives()) continue;
      for (auto& bytes : row->bytes) bytes = 0;
      row->pid = getpid();
      return row;
    }
    throw Error{cudaErrorUnknown, "more than 1024 processes use " + settings().folder};
  }();
  return *own;
}

size_t used_of(int device) {
  size_t sum = 0;
  for (Row* row = table().rows; row < table().rows + kRows; ++row)
    if (row->bytes[device] && row->lives()) sum += row->bytes[device];
  return sum;
}

struct OneProcessAtATime {
  OneProcessAtATime() { flock(table().file, LOCK_EX); }
  ~OneProcessAtATime() { flock(table().file, LOCK_UN); }
};

// Take bytes of a GPU's memory, if it has enough.
void take(int device, size_t bytes) {
  static std::mutex threads;
  Guard lock(threads);
  OneProcessAtATime processes;
  if (used_of(device) + bytes > settings().memory_bytes[device])
    throw Error{cudaErrorMemoryAllocation};
  own_row().bytes[device] += bytes;
}

// ---- blocks -------------------------------------------------------------------------------------

// Map pages after the last ones, with an unusable page before and after them.
char* map_pages(size_t bytes, int file) {
  Guard lock(state().mutex);
  State& all = state();
  if (!all.next) {
    void* arena = mmap(nullptr, kArena, PROT_NONE, kReserved, -1, 0);
    if (arena == MAP_FAILED) throw Error{cudaErrorMemoryAllocation, "no addresses (ulimit -v?)"};
    all.next = (char*)arena, all.end = all.next + kArena;
  }
  if (size_t(all.end - all.next) < bytes + 2 * kPage) throw Error{cudaErrorMemoryAllocation};
  const int access = PROT_READ | PROT_WRITE;
  void* pages = mmap(all.next + kPage, bytes, access, MAP_FIXED | MAP_SHARED, file, 0);
  if (pages == MAP_FAILED) throw Error{cudaErrorMemoryAllocation, "mmap failed"};
  all.next += kPage + bytes;
  return (char*)pages;
}

using Found = std::map<const char*, Block>::iterator;

// The block that contains the start of a range, with the lock held; `end()` if there is none.
// Throws if the range does not end in the block.
Found find(const void* address, size_t bytes) {
  auto& blocks = state().blocks;
  auto found = blocks.upper_bound((const char*)address);
  if (found == blocks.begin()) return blocks.end();
  --found;
  const char* const end = found->first + found->second.size;
  if ((const char*)address >= end) return blocks.end();
  if (bytes > size_t(end - (const char*)address)) throw Error{cudaErrorInvalidValue};
  return found;
}

int locate(const void* address, size_t bytes) {
  Guard lock(state().mutex);
  const auto found = find(address, bytes);
  return found == state().blocks.end() ? kUnknown : found->second.device;
}

// Bytes after a block where a write is not detected.
size_t slack() { return settings().guard ? 0 : kPage; }

void* keep(const Block& block) {
  const size_t before = (block.mapped - slack() - block.size) / kAlignment * kAlignment;
  Guard lock(state().mutex);
  state().blocks[block.mapping + before] = block;
  return block.mapping + before;
}

void* map_new(Block block) {
  block.file = memfd_create("emulated_gpu", MFD_CLOEXEC);
  if (block.file < 0 || ftruncate(block.file, block.mapped))
    throw Error{cudaErrorMemoryAllocation, strerror(errno)};
  block.mapping = map_pages(block.mapped, block.file);
  if (settings().poison) memset(block.mapping, kPoison, block.mapped);
  return keep(block);
}

void* allocate(size_t size, int device) {
  if (!size) return nullptr;
  if (size > kArena) throw Error{cudaErrorMemoryAllocation};
  const size_t mapped = (size + slack() + kPage - 1) / kPage * kPage;
  const Block block{size, device, -1, nullptr, mapped, false};
  if (device == kHost) return map_new(block);
  take(device, mapped);
  try {
    return map_new(block);
  } catch (const Error&) {
    own_row().bytes[device] -= mapped;
    throw;
  }
}

// Free a block, or close memory of another process, when the GPU has done all queued work.
void release(void* address, bool host, bool opened) {
  if (!address) return;
  State& all = state();
  Block block{};
  {
    Guard lock(all.mutex);
    const auto found = all.blocks.find((const char*)address);
    if (found != all.blocks.end()) block = found->second;
  }
  if (!block.mapping || (block.device == kHost) != host || block.opened != opened)
    throw Error{cudaErrorInvalidValue};
  count_synchronization();
  for (int device : settings().visible)
    if (block.device == device || index_of(block.device) < 0) synchronize_device(device, false);
  Guard lock(all.mutex);
  if (!all.blocks.erase((const char*)address)) throw Error{cudaErrorInvalidValue};
  mmap(block.mapping, block.mapped, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
  close(block.file);
  if (!host && !opened) own_row().bytes[block.device] -= block.mapped;
}

// ---- copies -------------------------------------------------------------------------------------

// With memory that is not pinned, the host waits: for copies to a device until the data is in a
// buffer of the driver; for copies from a device until the data has arrived.
void copy(void* to, const void* from, size_t size, cudaMemcpyKind kind, Stream* stream) {
  const int target = locate(to, size), source = locate(from, size);
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if ((to_device && target < 0) || (from_device && source < 0)) throw Error{cudaErrorInvalidValue};
  if (!size) return;
  if (target != kUnknown && source != kUnknown) {
    enqueue(stream, [=] { memmove(to, from, size); });
    return;
  }
  synchronize(stream);
  if (failure()) return;
  if (target < 0) {
    memmove(to, from, size);
    return;
  }
  auto buffer = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
  enqueue(stream, [=] { memcpy(to, buffer->data(), size); });
}

// ---- memory of other processes ------------------------------------------------------------------

// Identifies memory for other processes; 64 bytes.
struct Handle {
  int pid, file, device;
  size_t size, mapped;
  ino_t inode;
};
static_assert(sizeof(Handle) <= CUDA_IPC_HANDLE_SIZE, "a handle has room for no more");

int open_file(int pid, int file, int access) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
  return open(path, access | O_CLOEXEC);
}

ino_t inode_of(int file) {
  struct stat is{};
  return fstat(file, &is) ? 0 : is.st_ino;
}

Handle export_memory(const void* address) {
  Guard lock(state().mutex);
  const auto found = find(address, 1);
  if (found == state().blocks.end() || found->second.opened || found->second.device == kHost)
    throw Error{cudaErrorInvalidValue};
  const Block& block = found->second;
  return {getpid(), block.file, block.device, block.size, block.mapped, inode_of(block.file)};
}

void* open_memory(const Handle& handle, unsigned flags) {
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) throw Error{cudaErrorInvalidValue};
  if (handle.pid == getpid()) throw Error{cudaErrorDeviceUninitialized};  // as the driver
  const int file = open_file(handle.pid, handle.file, O_RDWR);
  if (file < 0 || inode_of(file) != handle.inode) {  // freed; the file's number may be used again
    close(file);
    throw Error{cudaErrorInvalidValue};
  }
  char* const mapping = map_pages(handle.mapped, file);
  return keep({handle.size, handle.device, file, mapping, handle.mapped, true});
}

}  // namespace

int device_of_memory(const void* address) { return locate(address, 0); }

bool find_piece(const void* address, size_t bytes, Piece* piece) try {
  Guard lock(state().mutex);
  const auto found = find(address, bytes);
  if (found == state().blocks.end()) return false;
  *piece = {getpid(), found->second.file, size_t((char*)address - found->second.mapping)};
  return true;
} catch (const Error&) {
  return false;
}

bool read_piece(const Piece& piece, void* to, size_t bytes) {
  if (!bytes) return true;
  const int file = open_file(piece.pid, piece.file, O_RDONLY);
  size_t done = 0;
  for (ssize_t n = 1; file >= 0 && n > 0 && done < bytes; done += std::max<ssize_t>(n, 0))
    n = pread(file, (char*)to + done, bytes - done, piece.offset + done);
  close(file);
  return file >= 0 && done == bytes;
}

}  // namespace emulated

using namespace emulated;

RUNTIME cudaMalloc(void** address, size_t size) {
  return call([&] { *address = allocate(size, current_device()); });
}
RUNTIME cudaHostAlloc(void** address, size_t size, unsigned) {
  return call([&] { *address = allocate(size, kHost); });
}
RUNTIME cudaFree(void* address) {
  return call([&] { current_device(), release(address, false, false); });
}
RUNTIME cudaFreeHost(void* address) {
  return call([&] { release(address, true, false); });
}
RUNTIME cudaMemGetInfo(size_t* free, size_t* total) {
  return call([&] {
    const int device = current_device();
    *total = settings().memory_bytes[device];
    *free = *total - std::min(*total, used_of(device));
  });
}
RUNTIME cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  return call([&] {
    const int device = device_of_memory(address);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = device == kUnknown ? cudaMemoryTypeUnregistered
                       : device == kHost  ? cudaMemoryTypeHost
                                          : cudaMemoryTypeDevice;
    attributes->device = index_of(device) < 0 ? index_of(current_device()) : index_of(device);
    if (device != kUnknown) attributes->devicePointer = (void*)address;
    if (device < 0) attributes->hostPointer = (void*)address;
  });
}
RUNTIME cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                        cudaStream_t stream) {
  return call([&] { copy(to, from, size, kind, stream_of(stream)); });
}
RUNTIME cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                            cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
RUNTIME cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  return call([&] {
    if (locate(to, size) == kUnknown) throw Error{cudaErrorInvalidValue};
    enqueue(stream_of(stream), [=] { memset(to, value, size); });
  });
}

DRIVER cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
  return call_in_context([&] {
    if (!size) throw Error{CUDA_ERROR_INVALID_VALUE};
    *address = (CUdeviceptr)allocate(size, current_device());
  });
}
DRIVER cuMemFree_v2(CUdeviceptr address) {
  return call_in_context([&] { release((void*)address, false, false); });
}
DRIVER cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return call_in_context([&] {
    copy((void*)to, (const void*)from, size, cudaMemcpyDeviceToDevice, stream_of(stream));
  });
}
DRIVER cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  return call_in_context([&] { *(Handle*)handle = export_memory((const void*)address); });
}
DRIVER cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  return call_in_context([&] { *address = (CUdeviceptr)open_memory(*(Handle*)&handle, flags); });
}
DRIVER cuIpcCloseMemHandle(CUdeviceptr address) {
  return call_in_context([&] { release((void*)address, false, true); });
}
