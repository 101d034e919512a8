// NCCL, as torch calls it.
//
// The ranks of a communicator share a board in memory, with a slot for each ordered pair of ranks.
// A kernel of NCCL is one function on a stream here, which does all its transfers:
//
//     sender                                       receiver
//     1  writes type, count and address of its
//        data; the slot is full               ->   2  compares type and count with its own
//                                                  3  copies from the sender's memory
//     5  compares too, and ends               <-   4  writes its own; the slot is empty
//
// So a kernel holds its stream until its peers' kernels run; without them only an abort ends it.
// A communicator's object is kept after its abort, so that late calls find it closed.
#include <fcntl.h>
#include <linux/futex.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "emulator.h"

#define CALL extern "C" EMULATED ncclResult_t

namespace emulated {
namespace {

constexpr int kMostRanks = 64;

const char* const kTypes[] = {"int8",    "uint8",    "int32",      "uint32",
                              "int64",   "uint64",   "float16",    "float32",
                              "float64", "bfloat16", "float8e4m3", "float8e5m2"};
const size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
const char* const kOperators[] = {"sum", "product", "maximum", "minimum", "average"};

// Collective operations that have no operator.
constexpr int kBroadcast = ncclNumOps, kAllGather = ncclNumOps + 1;

// One side of a transfer.
struct Offer {
  bool sends;
  int type;
  uint64_t count;
  int op = -1;  // of a collective operation

  bool fits(const Offer& other) const {
    return type == other.type && count == other.count && op == other.op;
  }
  std::string text(int rank) const {
    const std::string verb = op == kBroadcast   ? " broadcasts "
                             : op == kAllGather ? " gathers "
                             : op >= 0          ? " reduces "
                             : sends            ? " sends "
                                                : " receives ";
    const std::string what = std::to_string(count) + " of " + kTypes[type];
    const bool reduces = op >= 0 && op < ncclNumOps;
    const std::string how = reduces ? std::string(" by ") + kOperators[op] : "";
    return "rank " + std::to_string(rank) + verb + what + how;
  }
};

struct Slot {
  std::atomic<bool> full;
  Offer sent, received;
  Piece piece;
};

struct Board {
  std::atomic<uint32_t> changes;  // a counter, for threads that wait for a change
  std::atomic<int> connected;     // ranks that have seen all others
  std::atomic<bool> here[kMostRanks];
  int devices[kMostRanks];
  Slot slots[kMostRanks][kMostRanks];  // of the sender, for the receiver
};

void tell_change(Board* board) {
  ++board->changes;
  syscall(SYS_futex, &board->changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace
}  // namespace emulated

struct ncclComm {
  std::string id;
  int rank, size, device;
  emulated::Board* board;
  std::atomic<bool> aborted{false}, closed{false};
  emulated::Point last{};  // the end of the last operation that was issued

  bool stopped() const { return aborted || emulated::failure(); }

  // Wait for a condition that becomes true with a change of the board; false if stopped before.
  template <class Condition>
  bool wait(Condition condition) {
    for (;;) {
      const uint32_t seen = board->changes;
      if (stopped()) return false;
      if (condition()) return true;
      const timespec timeout{0, 100'000'000};  // a failure does not wake this thread
      syscall(SYS_futex, &board->changes, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    }
  }
};

namespace emulated {
namespace {

struct NcclError {
  ncclResult_t result;
  std::string text;
};

std::mutex error_mutex;
char last_error[512];

ncclResult_t refuse(const NcclError& error) {
  std::lock_guard<std::mutex> lock(error_mutex);
  snprintf(last_error, sizeof last_error, "%s", error.text.c_str());
  return error.result;
}

template <class Body>
ncclResult_t nccl(Body body) {
  try {
    begin();
    body();
    return ncclSuccess;
  } catch (const NcclError& error) {
    return refuse(error);
  } catch (const Error&) {
    return refuse({ncclUnhandledCudaError, "CUDA cannot be used, or failed before"});
  }
}

// ---- kernels ------------------------------------------------------------------------------------

struct Transfer {
  int peer;
  char* data;
  size_t bytes;
  Offer offer;
  bool begun = false, done = false;
};

// The number of communicators with a running kernel, for each GPU.
std::atomic<int> running[kMostGpus];

bool take_room(std::atomic<int>& number) {
  int before = number;
  return before < settings().kernel_slots && number.compare_exchange_strong(before, before + 1);
}

// All operations of a communicator in one group.
struct Kernel {
  ncclComm* comm;
  std::vector<Stream*> streams{};
  std::vector<Transfer> transfers{};
  std::function<void()> finish = [] {};

  // Run in the first stream, after all work queued in the others, which then wait for its end.
  void launch() {
    std::vector<Point> after{comm->last};
    for (Stream* stream : streams) after.push_back(last_point(stream));
    auto kernel = std::make_shared<Kernel>(std::move(*this));
    kernel->comm->last = enqueue(kernel->streams[0], [kernel] { kernel->run(); }, after);
    for (Stream* stream : kernel->streams)
      if (stream != kernel->streams[0]) enqueue(stream, [] {}, {kernel->comm->last});
  }

  void run() {
    std::atomic<int>& others = running[comm->device];
    while (!take_room(others)) {
      if (comm->stopped()) return;
      usleep(200);
    }
    if (comm->wait([&] { return advance_all(); })) finish();
    --others;
  }

  // Advance the transfers, those of one slot one after the other; true once all are done.
  bool advance_all() {
    std::set<std::pair<int, bool>> busy;
    for (Transfer& t : transfers) {
      const std::pair<int, bool> slot{t.peer, t.offer.sends};
      if (t.done || busy.count(slot)) continue;
      t.done = t.offer.sends ? advance_send(t) : advance_receive(t);
      if (!t.done) busy.insert(slot);
    }
    return busy.empty() && !failure();
  }

  bool advance_send(Transfer& t) {
    Slot& slot = comm->board->slots[comm->rank][t.peer];
    if (t.begun && !slot.full) return check(t, slot.received), true;
    if (t.begun) return false;
    t.begun = true;
    slot.sent = t.offer;
    if (t.bytes && !find_piece(t.data, t.bytes, &slot.piece))
      return fail(cudaErrorIllegalAddress, place(t) + ", at freed memory"), false;
    slot.full = true;
    tell_change(comm->board);
    return false;
  }

  bool advance_receive(Transfer& t) {
    Slot& slot = comm->board->slots[t.peer][comm->rank];
    if (!slot.full) return false;
    const Offer theirs = slot.sent;
    if (t.offer.fits(theirs) && !read_piece(slot.piece, t.data, t.bytes)) {
      if (errno == EFAULT) fail(cudaErrorIllegalAddress, place(t) + ", at freed memory");
      return false;  // a dead peer
    }
    slot.received = t.offer;
    slot.full = false;
    tell_change(comm->board);
    check(t, theirs);
    return true;
  }

  void check(const Transfer& t, const Offer& theirs) {
    if (!t.offer.fits(theirs))
      fail(cudaErrorLaunchFailure, place(t) + ", but " + theirs.text(t.peer));
  }
  std::string place(const Transfer& t) {
    return "NCCL: in communicator " + comm->id + ", " + t.offer.text(comm->rank);
  }
};

// Wait until the GPU has no work, as freeing device memory does.
void reclaim(ncclComm* comm) {
  synchronize_device(comm->device, false);
  comm->closed = true;
}

struct Group {
  int depth = 0;
  std::vector<Kernel> kernels{};
  std::vector<ncclComm*> aborts{};

  Kernel& kernel(ncclComm* comm) {
    for (Kernel& kernel : kernels)
      if (kernel.comm == comm) return kernel;
    return kernels.push_back({comm}), kernels.back();
  }

  void end_if_outermost() {
    if (depth) return;
    for (Kernel& kernel : std::exchange(kernels, {})) kernel.launch();
    for (ncclComm* comm : std::exchange(aborts, {})) reclaim(comm);
  }
};
thread_local Group group;

// Check an operation, and call `add` with the group's kernel and the operation's bytes.
template <class Add>
ncclResult_t issue(ncclComm* comm, void* handle, const void* data, const Offer& offer, Add add) {
  return nccl([&] {
    if (comm->closed) throw NcclError{ncclInvalidArgument, "the communicator was closed"};
    if (offer.type < 0 || offer.type >= ncclNumTypes)
      throw NcclError{ncclInvalidArgument, "no such type"};
    const std::string what = offer.text(comm->rank) + " on GPU " + std::to_string(comm->device);
    Stream* const stream = stream_of(handle);
    if (device_of(stream) != comm->device)
      throw NcclError{ncclInvalidUsage, what + ", in a stream of another GPU"};
    if (offer.count && device_of_memory(data) != comm->device)
      throw NcclError{ncclInvalidArgument, what + ", with memory of another device"};
    Kernel& kernel = group.kernel(comm);
    auto& streams = kernel.streams;
    if (!std::count(streams.begin(), streams.end(), stream)) streams.push_back(stream);
    add(kernel, offer.count * kSizes[offer.type]);
    group.end_if_outermost();
  });
}

ncclResult_t issue_to(int peer, ncclComm* comm, void* stream, const void* data,
                      const Offer& offer) {
  if (peer < 0 || peer >= comm->size) return refuse({ncclInvalidArgument, "no such rank"});
  return issue(comm, stream, data, offer, [&](Kernel& kernel, size_t bytes) {
    kernel.transfers.push_back({peer, (char*)data, bytes, offer});
  });
}

// In the order of ranks, so that all ranks get the same result.
template <class T, class Sum = T>
void reduce(void* out, const char* parts, size_t count, int ranks, int op) {
  const T* values = (const T*)parts;
  for (size_t i = 0; i < count; ++i) {
    Sum total = Sum(values[i]);
    for (int r = 1; r < ranks; ++r) {
      const Sum value = Sum(values[r * count + i]);
      total = op == ncclProd  ? total * value
              : op == ncclMax ? std::max(total, value)
              : op == ncclMin ? std::min(total, value)
                              : total + value;
    }
    ((T*)out)[i] = T(op == ncclAvg ? Sum(total / Sum(ranks)) : total);
  }
}
void (*const kReductions[])(void*, const char*, size_t, int, int) = {
    reduce<int8_t>,   reduce<uint8_t>,       reduce<int32_t>, reduce<uint32_t>, reduce<int64_t>,
    reduce<uint64_t>, reduce<__half, float>, reduce<float>,   reduce<double>,
    reduce<__nv_bfloat16, float>};

// ---- communicators ------------------------------------------------------------------------------

Board* open_board(const std::string& path) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Board)))
    throw NcclError{ncclSystemError, "cannot write to " + path};
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return (Board*)memory;
}

void refuse_shared_gpus(const ncclComm& comm) {
  const char* allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (allowed && atoi(allowed)) return;
  const int* devices = comm.board->devices;
  for (int a = 0; a < comm.size; ++a)
    for (int b = a + 1; b < comm.size; ++b)
      if (devices[a] == devices[b])
        throw NcclError{ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a) +
                                              " and rank " + std::to_string(b) +
                                              " both on CUDA device " + pci_address(devices[a])};
}

// Wait for all ranks, without a time limit.
ncclResult_t create(ncclComm_t* out, int size, const std::string& id, int rank) {
  return nccl([&] {
    if (rank < 0 || rank >= size || size > kMostRanks)
      throw NcclError{ncclInvalidArgument, "no such rank"};
    const std::string path = settings().folder + "/nccl-" + id;
    Board* const board = open_board(path);
    auto* comm = new ncclComm{id, rank, size, current_device(), board};
    board->devices[rank] = comm->device;
    if (board->here[rank].exchange(true))
      throw NcclError{ncclInvalidUsage, "rank " + std::to_string(rank) + " is there twice"};
    tell_change(board);
    auto* const here = board->here;
    if (!comm->wait([&] { return std::all_of(here, here + size, [](bool is) { return is; }); }))
      throw NcclError{ncclInternalError, "CUDA failed before all ranks were there"};
    if (++board->connected == size) unlink(path.c_str());
    refuse_shared_gpus(*comm);
    *out = comm;
  });
}

}  // namespace
}  // namespace emulated

using namespace emulated;

CALL ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

extern "C" EMULATED const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {"no error",       "unhandled cuda error",
                                      "unhandled system error", "internal error",
                                      "invalid argument", "invalid usage"};
  return result <= ncclInvalidUsage ? texts[result] : "unknown result code";
}

extern "C" EMULATED const char* ncclGetLastError(ncclComm_t) { return last_error; }

CALL ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  std::random_device random;
  snprintf(id->internal, sizeof id->internal, "%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}

// Initialisation always blocks, also with a configuration for non-blocking calls.
CALL ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return create(comm, size, id.internal, rank);
}
CALL ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return create(comm, size, id.internal, rank);
}
CALL ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids,
                              ncclConfig_t*) {
  return create(comm, size, ids[0].internal, rank);
}

CALL ncclCommCount(const ncclComm_t comm, int* count) { return *count = comm->size, ncclSuccess; }
CALL ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }

// A dead peer is no error: operations that wait for it do not end.
CALL ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  return *error = ncclSuccess, ncclSuccess;
}

CALL ncclCommFinalize(ncclComm_t comm) { return wait_for({comm->last}), ncclSuccess; }
CALL ncclCommDestroy(ncclComm_t comm) { return reclaim(comm), ncclSuccess; }

// The communicator's own kernels end at once, also inside a group. The end of the group waits for
// the whole GPU, including other communicators' kernels.
CALL ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  tell_change(comm->board);
  group.aborts.push_back(comm);
  group.end_if_outermost();
  return ncclSuccess;
}

CALL ncclGroupStart() { return ++group.depth, ncclSuccess; }
CALL ncclGroupEnd() {
  if (!group.depth) return refuse({ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart"});
  --group.depth;
  group.end_if_outermost();
  return ncclSuccess;
}

CALL ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream) {
  return issue_to(peer, comm, stream, data, {true, type, count});
}
CALL ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream) {
  return issue_to(peer, comm, stream, data, {false, type, count});
}

// Each rank sends its values to all ranks, and reduces what it receives.
CALL ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                   ncclComm_t comm, cudaStream_t stream) {
  if (op >= ncclNumOps || type > ncclBfloat16)
    return refuse({ncclInvalidUsage, "a type or an operator that is not emulated"});
  const Offer offer{true, type, count, op}, theirs{false, type, count, op};
  return issue(comm, stream, in, offer, [&](Kernel& kernel, size_t bytes) {
    auto parts = std::make_shared<std::vector<char>>(bytes * comm->size);
    for (int r = 0; r < comm->size; ++r) {
      kernel.transfers.push_back({r, (char*)in, bytes, offer});
      kernel.transfers.push_back({r, parts->data() + r * bytes, bytes, theirs});
    }
    kernel.finish = [=, before = kernel.finish] {
      before();
      kReductions[type](out, parts->data(), count, comm->size, op);
    };
  });
}

CALL ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
               cudaStream_t stream) {
  const bool sends = comm->rank == root;
  const Offer offer{sends, type, count, kBroadcast};
  return issue(comm, stream, data, offer, [&](Kernel& kernel, size_t bytes) {
    for (int r = 0; r < comm->size; ++r)
      if (sends ? r != root : r == root)
        kernel.transfers.push_back({r, (char*)data, bytes, offer});
  });
}

CALL ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                   cudaStream_t stream) {
  const Offer offer{true, type, count, kAllGather}, theirs{false, type, count, kAllGather};
  return issue(comm, stream, in, offer, [&](Kernel& kernel, size_t bytes) {
    for (int r = 0; r < comm->size; ++r) {
      kernel.transfers.push_back({r, (char*)in, bytes, offer});
      kernel.transfers.push_back({r, (char*)out + r * bytes, bytes, theirs});
    }
  });
}

// Registered memory is sent like any other; torch's ProcessGroupNCCL2 registers its memory.
CALL ncclCommRegister(const ncclComm_t, void* memory, size_t, void** handle) {
  return *handle = memory, ncclSuccess;
}
CALL ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

// Functions that torch links against and the emulator lacks: defined under the real names, without
// arguments. Otherwise torch would use the real library's, which need a GPU.
#define UNSUPPORTED(name)                                                 \
  extern "C" EMULATED ncclResult_t no_##name() __asm__(#name);            \
  extern "C" ncclResult_t no_##name() {                                   \
    return refuse({ncclInvalidUsage, "the emulated NCCL has no " #name}); \
  }
UNSUPPORTED(ncclAlltoAll) UNSUPPORTED(ncclBroadcast) UNSUPPORTED(ncclCommGetUniqueId) UNSUPPORTED(ncclCommGrow)
UNSUPPORTED(ncclCommInitAll) UNSUPPORTED(ncclCommMemStats) UNSUPPORTED(ncclCommResume)
UNSUPPORTED(ncclCommRevoke) UNSUPPORTED(ncclCommShrink) UNSUPPORTED(ncclCommSplit)
UNSUPPORTED(ncclCommSuspend) UNSUPPORTED(ncclCommWindowDeregister)
UNSUPPORTED(ncclCommWindowRegister) UNSUPPORTED(ncclDevCommCreate) UNSUPPORTED(ncclDevCommDestroy)
UNSUPPORTED(ncclGather) UNSUPPORTED(ncclGetLsaMultimemDevicePointer)
UNSUPPORTED(ncclGetPeerDevicePointer) UNSUPPORTED(ncclGroupSimulateEnd) UNSUPPORTED(ncclMemAlloc)
UNSUPPORTED(ncclMemFree) UNSUPPORTED(ncclPutSignal) UNSUPPORTED(ncclRedOpCreatePreMulSum)
UNSUPPORTED(ncclRedOpDestroy) UNSUPPORTED(ncclReduce) UNSUPPORTED(ncclReduceScatter)
UNSUPPORTED(ncclSignal) UNSUPPORTED(ncclWaitSignal) UNSUPPORTED(ncclWinGetUserPtr)
