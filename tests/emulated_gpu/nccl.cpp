// NCCL, as torch calls it.
//
// Each ordered pair of ranks of a communicator has a Unix socket, a rank with itself too. What NCCL
// launches as one kernel is one function on a stream here: it announces its transfers, waits for
// other side's announcements, compares them, and moves the bytes of all transfers together. So a
// kernel holds its stream until its peers' kernels run, and ends without them only by an abort.
// A communicator's object stays in memory after its abort, so that late calls find it closed.
#include <nccl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>

#include "emulator.h"

#define CALL extern "C" EMULATED ncclResult_t

struct ncclComm {
  std::string id;
  int rank, size, device;
  std::vector<int> out{}, in{};  // sockets by peer; data of `out` goes from this rank to the peer
  int wake = eventfd(0, EFD_CLOEXEC);  // readable after an abort
  int splits = 0;
  std::atomic<bool> aborted{false}, closed{false};
  uint64_t issued = 0, finished = 0;  // kernels, under state().mutex
};

namespace emulated {
namespace {

enum Call { kSend, kReceive, kAllReduce, kBroadcast, kReduce, kReduceScatter, kAllGather };
const char* const kCalls[] = {"sends",   "receives",        "all-reduces", "broadcasts",
                              "reduces", "reduce-scatters", "all-gathers"};
const char* const kTypes[] = {"int8",    "uint8",    "int32",      "uint32",
                              "int64",   "uint64",   "float16",    "float32",
                              "float64", "bfloat16", "float8e4m3", "float8e5m2"};
const size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// Of all communicators of the process; never destroyed, since streams use it until the end.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, int> held;  // communicators with a running kernel, by GPU
  char error[512] = "";
};
State& state() {
  static State* const all = new State;
  return *all;
}
using Lock = std::unique_lock<std::mutex>;

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
  Lock lock(state().mutex);
  snprintf(state().error, sizeof state().error, "%s", why.c_str());
  return result;
}

// ---- transfers -----------------------------------------------------------------------------------

// What one side is going to do; each writes its own before any data.
struct Offer {
  int call, type, op, root;
  uint64_t count;

  bool fits(const Offer& other) const {
    const bool pair = call == kSend ? other.call == kReceive : other.call == kSend;
    return (call <= kReceive ? pair : call == other.call) && type == other.type &&
           op == other.op && root == other.root && count == other.count;
  }
  std::string text(int rank) const {
    return "rank " + std::to_string(rank) + " " + kCalls[call] + " " + std::to_string(count) +
           " of " + kTypes[type];
  }
};
constexpr size_t kData = 2 * sizeof(Offer);  // where the data begins in what a transfer moves

struct Transfer {
  int peer;
  bool out;
  char* data;
  size_t bytes;
  Offer mine, theirs{};
  size_t moved = 0;  // the own offer, then the other's, then the data
  bool dead = false;

  bool writes() const { return moved < sizeof mine || (moved >= kData && out); }
  std::pair<char*, size_t> rest() {
    if (moved < sizeof mine) return {(char*)&mine + moved, sizeof mine - moved};
    if (moved < kData) return {(char*)&theirs + moved - sizeof mine, kData - moved};
    return {data + moved - kData, kData + bytes - moved};
  }
};

// Go on with a transfer until it is done (true), or would wait, or never goes on.
bool advance(const ncclComm& comm, Transfer& t, int fd) {
  while (t.moved < kData + t.bytes && !failure()) {
    auto [at, size] = t.rest();
    const ssize_t n = t.writes() ? send(fd, at, size, MSG_DONTWAIT | MSG_NOSIGNAL)
                                 : recv(fd, at, size, MSG_DONTWAIT);
    if (n > 0) t.moved += n;
    else if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    else if (n < 0 && errno == EFAULT)
      fail(cudaErrorIllegalAddress, "NCCL: " + t.mine.text(comm.rank) + ", at freed memory");
    else return t.dead = true, false;
    if (t.moved == kData && !t.mine.fits(t.theirs))
      fail(cudaErrorLaunchFailure, "NCCL: " + t.mine.text(comm.rank) + ", but " +
                                       t.theirs.text(t.peer) + ", in communicator " + comm.id);
  }
  return !failure();
}

// Move all transfers, those of one socket one after the other; false after an abort or a failure.
bool move_all(const ncclComm& comm, std::vector<Transfer>& transfers) {
  std::map<int, std::deque<Transfer*>> queues;  // by socket
  for (auto& t : transfers) queues[(t.out ? comm.out : comm.in)[t.peer]].push_back(&t);
  while (!comm.aborted && !failure()) {
    std::vector<pollfd> fds{{comm.wake, POLLIN, 0}};
    for (auto& [fd, queue] : queues)
      while (!queue.empty() && advance(comm, *queue.front(), fd)) queue.pop_front();
    size_t left = 0;
    for (auto& [fd, queue] : queues) {
      left += queue.size();
      if (!queue.empty() && !queue.front()->dead)
        fds.push_back({fd, short(queue.front()->writes() ? POLLOUT : POLLIN), 0});
    }
    if (!left) return true;
    poll(fds.data(), fds.size(), 100);  // a failure wakes nobody here
  }
  return false;
}

// ---- kernels -------------------------------------------------------------------------------------

// All operations of a communicator in one group.
struct Kernel {
  ncclComm* comm;
  std::vector<Stream*> streams{};
  std::vector<Transfer> transfers{};
  std::vector<std::function<void()>> finishes{};
  uint64_t number = 0;
  size_t joined = 0;  // streams that got here
  bool done = false;

  template <class Condition>
  void wait(Lock& lock, Condition condition) {
    while (!condition() && !comm->aborted && !failure())
      state().changed.wait_for(lock, std::chrono::milliseconds(100));
  }

  // Run in the first stream, after the communicator's earlier kernels; the others wait for it.
  void run(bool first) {
    State& s = state();
    Lock lock(s.mutex);
    ++joined;
    s.changed.notify_all();
    if (!first) return wait(lock, [&] { return done; });
    int& held = s.held[comm->device];
    wait(lock, [&] {
      return comm->finished == number && joined == streams.size() && held < settings().kernel_slots;
    });
    ++held;
    lock.unlock();
    if (move_all(*comm, transfers))
      for (auto& finish : finishes) finish();
    lock.lock();
    --held;
    ++comm->finished;
    done = true;
    s.changed.notify_all();
  }

  void send(int peer, const void* data, size_t bytes, const Offer& offer) {
    transfers.push_back({peer, true, (char*)data, bytes, offer});
  }
  void receive(int peer, void* data, size_t bytes, const Offer& offer) {
    transfers.push_back({peer, false, (char*)data, bytes, offer});
  }
};

// Wait until the GPU has nothing to do, as freeing device memory does.
void reclaim(ncclComm* comm) {
  synchronize_device(comm->device, false);
  if (comm->closed.exchange(true)) return;
  for (auto* sockets : {&comm->out, &comm->in})
    for (int fd : *sockets) close(fd);
}

struct Group {
  int depth = 0;
  std::vector<std::shared_ptr<Kernel>> kernels{};
  std::vector<ncclComm*> aborts{};

  Kernel& kernel(ncclComm* comm) {
    for (auto& kernel : kernels)
      if (kernel->comm == comm) return *kernel;
    kernels.push_back(std::make_shared<Kernel>(Kernel{comm}));
    return *kernels.back();
  }

  void end() {
    for (auto& kernel : std::exchange(kernels, {})) {
      {
        Lock lock(state().mutex);
        kernel->number = kernel->comm->issued++;
      }
      for (Stream* stream : kernel->streams)
        enqueue(stream, [=] { kernel->run(stream == kernel->streams[0]); });
    }
    for (ncclComm* comm : std::exchange(aborts, {})) reclaim(comm);
  }
};
thread_local Group group;

// Check an operation, and add to the group's kernel what `add` says, with the bytes of `count`.
ncclResult_t issue(ncclComm* comm, void* handle, const Offer& offer,
                   std::initializer_list<const void*> buffers,
                   const std::function<void(Kernel&, size_t)>& add) {
  if (begin()) return refuse(ncclUnhandledCudaError, "CUDA cannot be used, or failed before");
  if (!comm || comm->closed) return refuse(ncclInvalidArgument, "the communicator was closed");
  if (offer.type < 0 || offer.type >= ncclNumTypes || offer.op >= ncclNumOps ||
      (offer.op >= 0 && offer.type > ncclBfloat16))
    return refuse(ncclInvalidArgument, "a type or an operator that is not emulated");
  const std::string what = offer.text(comm->rank) + " on GPU " + std::to_string(comm->device);
  Stream* stream = stream_of(handle);
  if (!stream || device_of(stream) != comm->device)
    return refuse(ncclInvalidUsage, what + ", in a stream of another GPU");
  for (const void* buffer : buffers) {
    const int place = device_of_memory(buffer);
    if (offer.count && place != comm->device && place != -1)
      return refuse(ncclInvalidArgument, what + ", with memory of " +
                                             (place < 0 ? "no GPU" : "GPU " + std::to_string(place)));
  }
  Kernel& kernel = group.kernel(comm);
  auto& streams = kernel.streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  add(kernel, offer.count * kSizes[offer.type]);
  if (!group.depth) group.end();
  return ncclSuccess;
}

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
    reduce<int8_t>,  reduce<uint8_t>,  reduce<int32_t>,       reduce<uint32_t>, reduce<int64_t>,
    reduce<uint64_t>, reduce<__half, float>, reduce<float>, reduce<double>,
    reduce<__nv_bfloat16, float>};

// Each rank sends its values (or each rank's part) and reduces what comes in the order of ranks, so
// that all get the same result. Root -1: all ranks get one.
ncclResult_t issue_reduction(const Offer& offer, const void* in, void* out, ncclComm* comm,
                             void* stream) {
  const bool here = offer.root < 0 || comm->rank == offer.root;
  return issue(comm, stream, offer, {in, here ? out : in}, [=](Kernel& kernel, size_t bytes) {
    for (int r = 0; r < comm->size; ++r)
      if (offer.root < 0 || r == offer.root)
        kernel.send(r, (char*)in + (offer.call == kReduceScatter ? r * bytes : 0), bytes, offer);
    if (!here) return;
    auto parts = std::make_shared<std::vector<char>>(bytes * comm->size);
    for (int r = 0; r < comm->size; ++r)
      kernel.receive(r, parts->data() + r * bytes, bytes, offer);
    kernel.finishes.push_back([=, ranks = comm->size] {
      kReductions[offer.type](out, parts->data(), offer.count, ranks, offer.op);
    });
  });
}

// ---- communicators -------------------------------------------------------------------------------

struct Member {
  int rank, way;  // way 1: the data of the side that connects goes through this socket
  int color, key;
  uint64_t machine;
  char gpu[32];
};

// A name that vanishes with its socket, not a file: its first byte is 0.
std::pair<sockaddr_un, socklen_t> address(const std::string& id, int rank) {
  sockaddr_un it{AF_UNIX, ""};
  const int n = snprintf(it.sun_path + 1, sizeof it.sun_path - 1, "emulated-nccl-%s-%d",
                         id.c_str(), rank);
  return {it, socklen_t(offsetof(sockaddr_un, sun_path) + 1 + n)};
}

bool swap(int fd, const Member& mine, Member* theirs) {
  return send(fd, &mine, sizeof mine, MSG_NOSIGNAL) == sizeof mine &&
         recv(fd, theirs, sizeof *theirs, MSG_WAITALL) == sizeof *theirs;
}

// Connect to all other ranks, however long they take to come; returns the members by rank.
std::vector<Member> connect_all(ncclComm& comm, int color, int key) {
  Member me{comm.rank, 0, color, key, std::hash<std::string>()(settings().folder), ""};
  cudaDeviceGetPCIBusId(me.gpu, sizeof me.gpu, comm.device);
  std::vector<Member> members(comm.size, me);
  comm.out.assign(comm.size, -1);
  comm.in.assign(comm.size, -1);
  auto [own, size] = address(comm.id, comm.rank);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool good = !bind(listener, (sockaddr*)&own, size) && !listen(listener, 2 * comm.size);
  for (int i = 0; i < 2 * comm.rank && good; ++i) {
    auto [other, size] = address(comm.id, i / 2);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(fd, (sockaddr*)&other, size)) usleep(1000);
    me.way = i % 2;
    good = swap(fd, me, &members[i / 2]);
    (me.way ? comm.out : comm.in)[i / 2] = fd;
  }
  for (int i = 0; i < 2 * (comm.size - 1 - comm.rank) && good; ++i) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    Member other;
    if (!(good = swap(fd, me, &other))) break;
    members[other.rank] = other;
    (other.way ? comm.in : comm.out)[other.rank] = fd;
  }
  close(listener);
  int self[2];
  good = good && !socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, self);
  if (!good) return {};
  comm.out[comm.rank] = self[0];
  comm.in[comm.rank] = self[1];
  return members;
}

ncclResult_t create(ncclComm_t* out, int size, const std::string& id, int rank) {
  if (rank < 0 || rank >= size) return refuse(ncclInvalidArgument, "no such rank");
  int device;
  if (cudaGetDevice(&device)) return refuse(ncclUnhandledCudaError, "CUDA cannot be used");
  auto* comm = new ncclComm{id, rank, size, device};
  const auto members = connect_all(*comm, 0, rank);
  if (members.empty()) return refuse(ncclRemoteError, "a rank is there twice, or went away");
  const char* shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  for (auto& a : members)
    for (auto& b : members)
      if (a.rank < b.rank && a.machine == b.machine && !strcmp(a.gpu, b.gpu) &&
          !(shared && atoi(shared)))
        return refuse(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a.rank) +
                                            " and rank " + std::to_string(b.rank) +
                                            " both on CUDA device " + a.gpu);
  *out = comm;
  return ncclSuccess;
}

}  // namespace
}  // namespace emulated

using namespace emulated;

CALL ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

extern "C" EMULATED const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {
      "no error", "unhandled cuda error", "unhandled system error", "internal error",
      "invalid argument", "invalid usage", "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return result >= 0 && result <= ncclInProgress ? texts[result] : "unknown result code";
}

extern "C" EMULATED const char* ncclGetLastError(ncclComm_t) { return state().error; }

CALL ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  std::random_device random;
  snprintf(id->internal, sizeof id->internal, "%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}

// Initialisation always blocks, also with a configuration that says otherwise.
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

// Connects all ranks of the parent, and keeps the sockets between those of one color.
CALL ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  auto* comm = new ncclComm{parent->id + "." + std::to_string(parent->splits++), parent->rank,
                            parent->size, parent->device};
  auto members = connect_all(*comm, color, key);
  if (members.empty()) return refuse(ncclRemoteError, "a rank went away");
  std::stable_sort(members.begin(), members.end(), [](auto& a, auto& b) { return a.key < b.key; });
  std::vector<int> outs, ins;
  for (auto& other : members) {
    if (other.rank == parent->rank) comm->rank = outs.size();
    const int there = comm->out[other.rank], back = comm->in[other.rank];
    if (other.color == color) outs.push_back(there), ins.push_back(back);
    else close(there), close(back);
  }
  comm->size = outs.size();
  comm->out = std::move(outs);
  comm->in = std::move(ins);
  comm->id += ".color" + std::to_string(color);
  *out = color == NCCL_SPLIT_NOCOLOR ? nullptr : comm;
  return ncclSuccess;
}

CALL ncclCommCount(const ncclComm_t comm, int* count) { return *count = comm->size, ncclSuccess; }
CALL ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }

// A dead peer is no error: what waits for it just does not end.
CALL ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  return *error = ncclSuccess, ncclSuccess;
}

CALL ncclCommFinalize(ncclComm_t comm) {
  Lock lock(state().mutex);
  while (comm->finished != comm->issued && !comm->aborted && !failure())
    state().changed.wait_for(lock, std::chrono::milliseconds(100));
  return ncclSuccess;
}

CALL ncclCommDestroy(ncclComm_t comm) { return reclaim(comm), ncclSuccess; }

// The communicator's own kernels end at once, also inside a group. What comes with the group's end
// waits for the whole GPU, other communicators' kernels too.
CALL ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  eventfd_write(comm->wake, 1);
  state().changed.notify_all();
  group.aborts.push_back(comm);
  if (!group.depth) group.end();
  return ncclSuccess;
}

CALL ncclGroupStart() { return ++group.depth, ncclSuccess; }
CALL ncclGroupEnd() {
  if (!group.depth) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (!--group.depth) group.end();
  return ncclSuccess;
}

CALL ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream) {
  const Offer offer{kSend, type, -1, -1, count};
  return issue(comm, stream, offer, {data},
               [=](Kernel& kernel, size_t bytes) { kernel.send(peer, data, bytes, offer); });
}

CALL ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream) {
  const Offer offer{kReceive, type, -1, -1, count};
  return issue(comm, stream, offer, {data},
               [=](Kernel& kernel, size_t bytes) { kernel.receive(peer, data, bytes, offer); });
}

CALL ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                   ncclComm_t comm, cudaStream_t stream) {
  return issue_reduction({kAllReduce, type, op, -1, count}, in, out, comm, stream);
}
CALL ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                int root, ncclComm_t comm, cudaStream_t stream) {
  return issue_reduction({kReduce, type, op, root, count}, in, out, comm, stream);
}
CALL ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                       ncclComm_t comm, cudaStream_t stream) {
  return issue_reduction({kReduceScatter, type, op, -1, count}, in, out, comm, stream);
}

CALL ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                   ncclComm_t comm, cudaStream_t stream) {
  const Offer offer{kBroadcast, type, -1, root, count};
  const bool here = comm->rank == root;
  return issue(comm, stream, offer, {here ? in : out, out}, [=](Kernel& kernel, size_t bytes) {
    for (int r = 0; here && r < comm->size; ++r) kernel.send(r, in, bytes, offer);
    kernel.receive(root, out, bytes, offer);
  });
}
CALL ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
               cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

CALL ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                   cudaStream_t stream) {
  const Offer offer{kAllGather, type, -1, -1, count};
  return issue(comm, stream, offer, {in, out}, [=](Kernel& kernel, size_t bytes) {
    for (int r = 0; r < comm->size; ++r) {
      kernel.send(r, in, bytes, offer);
      kernel.receive(r, (char*)out + r * bytes, bytes, offer);
    }
  });
}

// What torch links against and the emulator has not: defined under the real names, whatever the
// arguments are, else the real library's would be taken, which needs a GPU.
#define UNSUPPORTED(name)                                                 \
  extern "C" EMULATED ncclResult_t no_##name() __asm__(#name);            \
  extern "C" ncclResult_t no_##name() {                                   \
    return refuse(ncclInvalidUsage, "the emulated NCCL has no " #name);   \
  }
UNSUPPORTED(ncclAlltoAll) UNSUPPORTED(ncclCommDeregister) UNSUPPORTED(ncclCommGetUniqueId)
UNSUPPORTED(ncclCommGrow) UNSUPPORTED(ncclCommInitAll) UNSUPPORTED(ncclCommMemStats)
UNSUPPORTED(ncclCommRegister) UNSUPPORTED(ncclCommResume) UNSUPPORTED(ncclCommRevoke)
UNSUPPORTED(ncclCommShrink) UNSUPPORTED(ncclCommSuspend) UNSUPPORTED(ncclCommWindowDeregister)
UNSUPPORTED(ncclCommWindowRegister) UNSUPPORTED(ncclDevCommCreate) UNSUPPORTED(ncclDevCommDestroy)
UNSUPPORTED(ncclGather) UNSUPPORTED(ncclGetLsaMultimemDevicePointer)
UNSUPPORTED(ncclGetPeerDevicePointer) UNSUPPORTED(ncclGroupSimulateEnd) UNSUPPORTED(ncclMemAlloc)
UNSUPPORTED(ncclMemFree) UNSUPPORTED(ncclPutSignal) UNSUPPORTED(ncclRedOpCreatePreMulSum)
UNSUPPORTED(ncclRedOpDestroy) UNSUPPORTED(ncclSignal) UNSUPPORTED(ncclWaitSignal)
UNSUPPORTED(ncclWinGetUserPtr)
