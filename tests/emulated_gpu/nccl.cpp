// NCCL, as torch calls it.
//
// Each ordered pair of ranks of a communicator has a Unix socket, a rank with itself too. What NCCL
// launches as one kernel is one function on a stream here: it announces all its transfers, waits for
// the other side's announcements, compares them, and moves the bytes of all transfers together. So a
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
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "emulator.h"

#define CALL extern "C" EMULATED ncclResult_t

struct ncclComm {
  std::string id;
  int rank, size, device;
  std::vector<int> out, in;  // sockets by peer; the data of `out` goes from this rank to the peer
  int wake = eventfd(0, 0);  // readable after an abort
  int splits = 0;
  std::atomic<bool> aborted{false}, closed{false};
  uint64_t issued = 0, finished = 0;  // kernels, under state().mutex
};

namespace emulated {
namespace {

const char* const kCalls[] = {"sends",          "receives",  "all-reduces", "broadcasts", "reduces",
                              "reduce-scatters", "all-gathers", "gathers",   "exchanges"};
enum Call : int { kSend, kReceive, kAllReduce, kBroadcast, kReduce, kReduceScatter, kAllGather, kGather, kAllToAll };
const char* const kTypes[] = {"int8",    "uint8",   "int32",    "uint32",      "int64",      "uint64",
                              "float16", "float32", "float64",  "bfloat16",    "float8e4m3", "float8e5m2"};
const size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// Shared by all communicators of the process, and left in memory: streams use it until the end.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, int> held;  // communicators with a running kernel, by GPU
  char error[512] = "";
};
State& state() {
  static State& it = *new State;
  return it;
}

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
  std::lock_guard<std::mutex> lock(state().mutex);
  snprintf(state().error, sizeof state().error, "%s", why.c_str());
  return result;
}

// ---- transfers -----------------------------------------------------------------------------------

// What one side is going to do, written to the other side before any data.
struct Offer {
  int call, type, detail;  // detail: the root or the operator
  int padding = 0;
  uint64_t count;
  bool fits(const Offer& other) const {
    bool calls = call == kSend ? other.call == kReceive : call == kReceive ? other.call == kSend : call == other.call;
    return calls && type == other.type && detail == other.detail && count == other.count;
  }
  std::string text(int rank) const {
    return "rank " + std::to_string(rank) + " " + kCalls[call] + " " + std::to_string(count) + " of " + kTypes[type];
  }
};
constexpr size_t kOffer = sizeof(Offer);

struct Transfer {
  int peer;
  bool out;
  char* data;
  size_t bytes;
  Offer mine, theirs{};
  size_t moved = 0;  // own offer, then the other's, then the data

  bool writes() const { return moved < kOffer || (moved >= 2 * kOffer && out); }
  std::pair<char*, size_t> rest() {
    if (moved < kOffer) return {reinterpret_cast<char*>(&mine) + moved, kOffer - moved};
    if (moved < 2 * kOffer) return {reinterpret_cast<char*>(&theirs) + (moved - kOffer), 2 * kOffer - moved};
    return {data + (moved - 2 * kOffer), 2 * kOffer + bytes - moved};
  }
};

enum class Progress { kWaits, kDone, kFailed, kPeerDead };

Progress advance(ncclComm& comm, Transfer& t, int fd) {
  for (;;) {
    auto [at, size] = t.rest();
    if (size == 0) return Progress::kDone;
    ssize_t n = t.writes() ? send(fd, at, size, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, at, size, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Progress::kWaits;
    if (n < 0 && errno == EFAULT) {
      fail(cudaErrorIllegalAddress, "NCCL: " + t.mine.text(comm.rank) + " at memory that is not there");
      return Progress::kFailed;
    }
    if (n <= 0) return Progress::kPeerDead;
    t.moved += n;
    if (t.moved == 2 * kOffer && !t.mine.fits(t.theirs)) {
      fail(cudaErrorLaunchFailure, "NCCL: " + t.mine.text(comm.rank) + ", but " + t.theirs.text(t.peer) +
                                       " (communicator " + comm.id + ")");
      return Progress::kFailed;
    }
  }
}

// Move all transfers, those of one socket one after the other; false after an abort or a fault.
bool exchange(ncclComm& comm, std::vector<Transfer>& transfers) {
  std::map<int, std::deque<Transfer*>> queues;  // by socket
  for (auto& t : transfers) queues[(t.out ? comm.out : comm.in)[t.peer]].push_back(&t);
  for (;;) {
    std::vector<pollfd> fds{{comm.wake, POLLIN, 0}};
    for (auto& [fd, queue] : queues)
      if (!queue.empty()) fds.push_back({fd, short(queue.front()->writes() ? POLLOUT : POLLIN), 0});
    if (fds.size() == 1) return true;
    for (size_t i = 1; i < fds.size(); ++i)  // a dead peer's transfers stay in their queue for ever
      if (queues[fds[i].fd].front()->peer < 0) fds[i].fd = -1;
    poll(fds.data(), fds.size(), 100);
    if (comm.aborted || failure() != cudaSuccess) return false;
    for (size_t i = 1; i < fds.size(); ++i) {
      if (!fds[i].revents) continue;
      auto& queue = queues[fds[i].fd];
      Progress progress = Progress::kDone;
      while (!queue.empty() && (progress = advance(comm, *queue.front(), fds[i].fd)) == Progress::kDone)
        queue.pop_front();
      if (progress == Progress::kFailed) return false;
      if (progress == Progress::kPeerDead) queue.front()->peer = -1;
    }
  }
}

// ---- kernels -------------------------------------------------------------------------------------

struct Operation {
  ncclComm* comm;
  Stream* stream;
  Offer offer;
  size_t bytes;  // of `count` elements
  std::vector<Transfer> transfers;
  std::function<void()> finish = [] {};

  void send(int peer, const void* data) {
    transfers.push_back({peer, true, static_cast<char*>(const_cast<void*>(data)), bytes, offer});
  }
  void receive(int peer, void* data) { transfers.push_back({peer, false, static_cast<char*>(data), bytes, offer}); }
};

struct Kernel {
  ncclComm* comm;
  uint64_t number;
  size_t awaited = 0;  // other streams of the same group, which it begins after and ends before
  bool done = false;
  std::vector<Transfer> transfers;
  std::vector<std::function<void()>> finishes;

  // Wait under the lock; without an end if need be, but not beyond an abort or a fault.
  template <class Condition>
  bool wait(std::unique_lock<std::mutex>& lock, Condition condition) {
    while (!condition()) {
      if (comm->aborted || failure() != cudaSuccess) return false;
      state().changed.wait_for(lock, std::chrono::milliseconds(100));
    }
    return !comm->aborted;
  }

  void run() {
    State& s = state();
    std::unique_lock<std::mutex> lock(s.mutex);
    int& held = s.held[comm->device];
    if (wait(lock, [&] {
          return comm->finished == number && awaited == 0 && held < settings().kernel_slots;
        })) {
      ++held;
      lock.unlock();
      if (exchange(*comm, transfers))
        for (auto& finish : finishes) finish();
      lock.lock();
      --held;
    }
    ++comm->finished;
    done = true;
    s.changed.notify_all();
  }

  void join() {  // in the group's other streams
    std::unique_lock<std::mutex> lock(state().mutex);
    --awaited;
    state().changed.notify_all();
    wait(lock, [&] { return done; });
  }
};

void launch(const std::vector<Operation*>& operations) {
  auto kernel = std::make_shared<Kernel>();
  kernel->comm = operations[0]->comm;
  std::vector<Stream*> streams;
  for (auto* operation : operations) {
    if (std::find(streams.begin(), streams.end(), operation->stream) == streams.end())
      streams.push_back(operation->stream);
    for (auto& t : operation->transfers) kernel->transfers.push_back(t);
    kernel->finishes.push_back(std::move(operation->finish));
  }
  kernel->awaited = streams.size() - 1;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    kernel->number = kernel->comm->issued++;
  }
  enqueue(streams[0], [kernel] { kernel->run(); });
  for (size_t i = 1; i < streams.size(); ++i) enqueue(streams[i], [kernel] { kernel->join(); });
}

// Wait until the GPU has nothing to do, as freeing device memory does, and give the sockets back.
void reclaim(ncclComm* comm) {
  synchronize_device(comm->device, false);
  comm->closed = true;
  for (auto* sockets : {&comm->out, &comm->in})
    for (int fd : *sockets) close(fd);
}

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  std::vector<ncclComm*> aborts;

  void end() {
    auto all = std::move(operations);
    auto aborted = std::move(aborts);
    operations.clear();
    aborts.clear();
    std::vector<ncclComm*> order;
    std::map<ncclComm*, std::vector<Operation*>> by_comm;
    for (auto& operation : all) {
      if (!by_comm.count(operation.comm)) order.push_back(operation.comm);
      by_comm[operation.comm].push_back(&operation);
    }
    for (auto* comm : order) launch(by_comm[comm]);
    for (auto* comm : aborted) reclaim(comm);
  }
};
thread_local Group group;

using Build = std::function<void(Operation&)>;

ncclResult_t issue(ncclComm* comm, void* stream, Offer offer, std::vector<const void*> buffers, const Build& build) {
  if (!comm || comm->closed) return refuse(ncclInvalidArgument, "the communicator was destroyed or aborted");
  if (failure() != cudaSuccess) return refuse(ncclUnhandledCudaError, "an earlier operation of the GPU failed");
  if (offer.type < 0 || offer.type >= ncclNumTypes) return refuse(ncclInvalidArgument, "unknown data type");
  Operation operation{comm, stream_of(stream), offer, offer.count * kSizes[offer.type], {}};
  std::string what = offer.text(comm->rank) + " on GPU " + std::to_string(comm->device);
  int device = device_of(operation.stream);
  if (device != comm->device)
    return refuse(ncclInvalidUsage, what + ", in a stream of GPU " + std::to_string(device));
  for (const void* buffer : buffers) {
    int place = device_of_memory(buffer);
    if (offer.count && place != comm->device && place != -1)
      return refuse(ncclInvalidArgument, what + ", with memory of " + (place < 0 ? "the host" : "GPU " + std::to_string(place)));
  }
  build(operation);
  group.operations.push_back(std::move(operation));
  if (group.depth == 0) group.end();
  return ncclSuccess;
}

// ---- reductions ----------------------------------------------------------------------------------

template <class T, class Sum = T>
void reduce(void* out, const char* parts, size_t count, int ranks, int op) {
  const T* values = reinterpret_cast<const T*>(parts);
  for (size_t i = 0; i < count; ++i) {
    Sum total = Sum(values[i]);
    for (int r = 1; r < ranks; ++r) {
      Sum value = Sum(values[r * count + i]);
      if (op == ncclProd) total = total * value;
      else if (op == ncclMax) total = std::max(total, value);
      else if (op == ncclMin) total = std::min(total, value);
      else total = total + value;
    }
    static_cast<T*>(out)[i] = T(op == ncclAvg ? Sum(total / Sum(ranks)) : total);
  }
}

using Reduction = void (*)(void*, const char*, size_t, int, int);
const Reduction kReductions[] = {reduce<int8_t>,   reduce<uint8_t>,        reduce<int32_t>, reduce<uint32_t>,
                                 reduce<int64_t>,  reduce<uint64_t>,       reduce<__half, float>,
                                 reduce<float>,    reduce<double>,         reduce<__nv_bfloat16, float>};

// Receive all ranks' values and reduce them, in the order of ranks: the same on every rank.
void receive_and_reduce(Operation& operation, void* out) {
  auto parts = std::make_shared<std::vector<char>>(operation.bytes * operation.comm->size + 1);
  for (int r = 0; r < operation.comm->size; ++r) operation.receive(r, parts->data() + r * operation.bytes);
  operation.finish = [parts, out, offer = operation.offer, ranks = operation.comm->size, op = operation.offer.detail] {
    kReductions[offer.type](out, parts->data(), offer.count, ranks, op);
  };
}

ncclResult_t issue_reduction(Call call, const void* in, void* out, size_t count, int type, int op, int root,
                             ncclComm* comm, void* stream) {
  if (op >= ncclNumOps || type > ncclBfloat16)
    return refuse(ncclInvalidArgument, "the emulated NCCL does not reduce this type or with this operator");
  Offer offer{call, type, op, root, count};
  bool result = root < 0 || comm->rank == root;
  return issue(comm, stream, offer, {in, result ? out : in}, [=](Operation& o) {
    for (int r = 0; r < comm->size; ++r)
      if (root < 0 || r == root)
        o.send(r, static_cast<const char*>(in) + (call == kReduceScatter ? r * o.bytes : 0));
    if (result) receive_and_reduce(o, out);
  });
}

// ---- communicators -------------------------------------------------------------------------------

struct Member {
  int rank, out, color, key;  // out: the connecting side's data goes through this socket
  uint64_t machine;
  char gpu[32];
};

sockaddr_un address(const std::string& id, int rank, socklen_t* size) {
  sockaddr_un it{};
  it.sun_family = AF_UNIX;
  // The first byte stays 0: a name that vanishes with its socket, not a file.
  int n = snprintf(it.sun_path + 1, sizeof it.sun_path - 1, "emulated-nccl-%s-%d", id.c_str(), rank);
  *size = offsetof(sockaddr_un, sun_path) + 1 + n;
  return it;
}

bool swap(int fd, const Member& mine, Member* theirs) {
  return send(fd, &mine, sizeof mine, MSG_NOSIGNAL) == sizeof mine &&
         recv(fd, theirs, sizeof *theirs, MSG_WAITALL) == sizeof *theirs;
}

// Connect to every other rank, however long they take to come; gives all members by rank.
ncclResult_t connect_all(ncclComm& comm, Member me, std::vector<Member>* members) {
  comm.out.assign(comm.size, -1);
  comm.in.assign(comm.size, -1);
  members->assign(comm.size, me);
  socklen_t size;
  sockaddr_un own = address(comm.id, comm.rank, &size);
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, reinterpret_cast<sockaddr*>(&own), size) || listen(listener, 2 * comm.size))
    return refuse(ncclInvalidUsage, "rank " + std::to_string(comm.rank) + " is there twice");
  bool good = true;
  for (int peer = 0; peer < comm.rank; ++peer)
    for (me.out = 0; me.out < 2; ++me.out) {
      sockaddr_un other = address(comm.id, peer, &size);
      int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      while (connect(fd, reinterpret_cast<sockaddr*>(&other), size)) usleep(1000);
      good = good && swap(fd, me, &(*members)[peer]);
      (me.out ? comm.out : comm.in)[peer] = fd;
    }
  for (int i = 0; i < 2 * (comm.size - 1 - comm.rank) && good; ++i) {
    int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    Member other;
    if (!(good = swap(fd, me, &other))) break;
    (*members)[other.rank] = other;
    (other.out ? comm.in : comm.out)[other.rank] = fd;
  }
  close(listener);
  int self[2];
  socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, self);
  comm.out[comm.rank] = self[0];
  comm.in[comm.rank] = self[1];
  return good ? ncclSuccess : refuse(ncclRemoteError, "a rank went away while the communicator was built");
}

ncclResult_t check_gpus(const std::vector<Member>& members) {
  const char* shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (shared && atoi(shared)) return ncclSuccess;
  for (auto& a : members)
    for (auto& b : members)
      if (a.rank < b.rank && a.machine == b.machine && !strcmp(a.gpu, b.gpu))
        return refuse(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a.rank) + " and rank " +
                                            std::to_string(b.rank) + " both on CUDA device " + a.gpu);
  return ncclSuccess;
}

Member member(int rank, int device, int color, int key) {
  Member me{rank, 0, color, key, std::hash<std::string>()(settings().folder), ""};
  cudaDeviceGetPCIBusId(me.gpu, sizeof me.gpu, device);
  return me;
}

ncclResult_t create(ncclComm_t* out, int size, const std::string& id, int rank) {
  if (rank < 0 || rank >= size) return refuse(ncclInvalidArgument, "no such rank");
  auto* comm = new ncclComm;
  comm->id = id;
  comm->rank = rank;
  comm->size = size;
  cudaGetDevice(&comm->device);
  std::vector<Member> members;
  ncclResult_t result = connect_all(*comm, member(rank, comm->device, 0, rank), &members);
  if (result == ncclSuccess) result = check_gpus(members);
  if (result == ncclSuccess) *out = comm;
  return result;
}

ncclResult_t unsupported(const char* name) {
  return refuse(ncclInvalidUsage, std::string("the emulated NCCL has no ") + name);
}

}  // namespace
}  // namespace emulated

using namespace emulated;

// ---- calls: communicators ------------------------------------------------------------------------

CALL ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

extern "C" EMULATED const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {"no error",         "unhandled cuda error", "unhandled system error",
                                      "internal error",   "invalid argument",     "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return result >= 0 && result <= ncclInProgress ? texts[result] : "unknown result code";
}

extern "C" EMULATED const char* ncclGetLastError(ncclComm_t) { return state().error; }

CALL ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  static std::random_device random;
  snprintf(id->internal, sizeof id->internal, "%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}

CALL ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return create(comm, size, id.internal, rank);
}

CALL ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return create(comm, size, id.internal, rank);
}

CALL ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return create(comm, size, ids[0].internal, rank);
}

CALL ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  auto* comm = new ncclComm;  // first of all the parent's ranks, then of those of one color
  comm->id = parent->id + "/" + std::to_string(parent->splits++);
  comm->rank = parent->rank;
  comm->size = parent->size;
  comm->device = parent->device;
  std::vector<Member> members;
  ncclResult_t result = connect_all(*comm, member(comm->rank, comm->device, color, key), &members);
  if (result != ncclSuccess) return result;
  std::stable_sort(members.begin(), members.end(), [](auto& a, auto& b) { return a.key < b.key; });
  std::vector<int> ways[2];
  for (auto& other : members)
    if (other.color == color) {
      if (other.rank == parent->rank) comm->rank = ways[0].size();
      ways[0].push_back(comm->out[other.rank]);
      ways[1].push_back(comm->in[other.rank]);
    } else {
      close(comm->out[other.rank]);
      close(comm->in[other.rank]);
    }
  comm->out = ways[0];
  comm->in = ways[1];
  comm->size = ways[0].size();
  *out = color == NCCL_SPLIT_NOCOLOR ? nullptr : comm;
  return ncclSuccess;
}

CALL ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}

CALL ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

// A dead peer is no error: an operation that waits for it just does not end.
CALL ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

CALL ncclCommFinalize(ncclComm_t comm) {
  std::unique_lock<std::mutex> lock(state().mutex);
  while (comm->finished != comm->issued && !comm->aborted && failure() == cudaSuccess)
    state().changed.wait_for(lock, std::chrono::milliseconds(100));
  return ncclSuccess;
}

CALL ncclCommDestroy(ncclComm_t comm) {
  reclaim(comm);
  return ncclSuccess;
}

CALL ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;  // at once, also inside a group: this is what ends its kernels
  uint64_t one = 1;
  if (write(comm->wake, &one, sizeof one) != sizeof one) return ncclSystemError;
  state().changed.notify_all();
  group.aborts.push_back(comm);
  if (group.depth == 0) group.end();
  return ncclSuccess;
}

CALL ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

CALL ncclGroupEnd() {
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth == 0) group.end();
  return ncclSuccess;
}

// ---- calls: operations ---------------------------------------------------------------------------

CALL ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, {kSend, type, 0, 0, count}, {data}, [=](Operation& o) { o.send(peer, data); });
}

CALL ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, {kReceive, type, 0, 0, count}, {data}, [=](Operation& o) { o.receive(peer, data); });
}

CALL ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                   cudaStream_t stream) {
  return issue_reduction(kAllReduce, in, out, count, type, op, -1, comm, stream);
}

CALL ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                ncclComm_t comm, cudaStream_t stream) {
  return issue_reduction(kReduce, in, out, count, type, op, root, comm, stream);
}

CALL ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                       cudaStream_t stream) {
  return issue_reduction(kReduceScatter, in, out, count, type, op, -1, comm, stream);
}

CALL ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                   cudaStream_t stream) {
  bool sends = comm->rank == root;
  return issue(comm, stream, {kBroadcast, type, root, 0, count}, {sends ? in : out, out}, [=](Operation& o) {
    for (int r = 0; sends && r < comm->size; ++r) o.send(r, in);
    o.receive(root, out);
  });
}

CALL ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

CALL ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                   cudaStream_t stream) {
  return issue(comm, stream, {kAllGather, type, 0, 0, count}, {in, out}, [=](Operation& o) {
    for (int r = 0; r < comm->size; ++r) {
      o.send(r, in);
      o.receive(r, static_cast<char*>(out) + r * o.bytes);
    }
  });
}

CALL ncclGather(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                cudaStream_t stream) {
  bool collects = comm->rank == root;
  return issue(comm, stream, {kGather, type, root, 0, count}, {in, collects ? out : in}, [=](Operation& o) {
    o.send(root, in);
    for (int r = 0; collects && r < comm->size; ++r) o.receive(r, static_cast<char*>(out) + r * o.bytes);
  });
}

CALL ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                  cudaStream_t stream) {
  return issue(comm, stream, {kAllToAll, type, 0, 0, count}, {in, out}, [=](Operation& o) {
    for (int r = 0; r < comm->size; ++r) {
      o.send(r, static_cast<const char*>(in) + r * o.bytes);
      o.receive(r, static_cast<char*>(out) + r * o.bytes);
    }
  });
}

// ---- what torch links against and the emulator has not -------------------------------------------

// Defined under the real name, whatever its arguments are, so that the real library's is never taken.
#define UNSUPPORTED(name)                                            \
  extern "C" EMULATED ncclResult_t no_##name() __asm__(#name); \
  extern "C" ncclResult_t no_##name() { return unsupported(#name); }

UNSUPPORTED(ncclCommDeregister)
UNSUPPORTED(ncclCommGetUniqueId)
UNSUPPORTED(ncclCommGrow)
UNSUPPORTED(ncclCommInitAll)
UNSUPPORTED(ncclCommMemStats)
UNSUPPORTED(ncclCommRegister)
UNSUPPORTED(ncclCommResume)
UNSUPPORTED(ncclCommRevoke)
UNSUPPORTED(ncclCommShrink)
UNSUPPORTED(ncclCommSuspend)
UNSUPPORTED(ncclCommWindowDeregister)
UNSUPPORTED(ncclCommWindowRegister)
UNSUPPORTED(ncclDevCommCreate)
UNSUPPORTED(ncclDevCommDestroy)
UNSUPPORTED(ncclGetLsaMultimemDevicePointer)
UNSUPPORTED(ncclGetPeerDevicePointer)
UNSUPPORTED(ncclGroupSimulateEnd)
UNSUPPORTED(ncclMemAlloc)
UNSUPPORTED(ncclMemFree)
UNSUPPORTED(ncclPutSignal)
UNSUPPORTED(ncclRedOpCreatePreMulSum)
UNSUPPORTED(ncclRedOpDestroy)
UNSUPPORTED(ncclSignal)
UNSUPPORTED(ncclWaitSignal)
UNSUPPORTED(ncclWinGetUserPtr)
