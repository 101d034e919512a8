// Streams and events: each stream is a thread that runs its operations in order.
//
// Recording an event stores the end of its stream's queue as a point; a wait for the event waits
// for the point that was stored last at the time of the call.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "emulator.h"

namespace emulated {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// A hardware queue: its operations begin in the order in which they were queued, whatever their
// streams. Waits begin when they are over.
struct Connection {
  uint64_t submitted = 0, begun = 0;
};

struct Operation {
  std::function<void()> run;
  std::vector<Point> after;
  Clock::time_point starved_until;
  bool is_wait;
  uint64_t place;  // in its connection
};

// Never deleted: points may refer to a destroyed stream.
struct Stream {
  int device;
  int priority;
  bool legacy;    // the default stream of its device
  bool blocking;  // ordered with the default stream
  uint64_t id;    // in the order of creation
  bool starved;   // does nothing until it is waited for, or for starve_ms
  bool destroyed = false, has_thread = false;
  Connection* connection = nullptr;  // none: never used, or connections are not modelled
  std::deque<Operation> queue{};
  uint64_t submitted = 0, completed = 0;
  uint64_t wanted = 0;              // waited for up to this number
  std::vector<Stream*> waiting{};   // streams to wake when an operation is done
  std::condition_variable wake{};   // its own thread waits for it
};

struct Event {
  int device;
  bool timed;
  Point point{};
  std::shared_ptr<Clock::time_point> time{};  // none: never recorded
};

namespace {

// Never destroyed: threads use it until the process has ended.
struct State {
  std::mutex mutex;
  std::condition_variable host;  // threads of the program wait for it
  std::map<int, std::vector<Connection>> connections;  // of each device
  std::map<int, int> streams_used;
  Stream* captured = nullptr;  // by the program's only capture of a graph
  bool capture_is_valid = true;
  int hosts_waiting = 0, running = 0;
  std::set<Stream*> streams;
  std::map<int, Stream*> defaults;
  std::set<Event*> events;
  uint64_t streams_created = 0;
};
State& state() {
  static State* const all = new State;
  return *all;
}

std::atomic<long> synchronizations;

bool reached(const Point& point) {
  return !point.stream || point.stream->completed >= point.number;
}

// Register a wait for a point, so that its stream is no longer starved before it.
void want(const Point& point) {
  if (reached(point) || point.stream->wanted >= point.number) return;
  point.stream->wanted = point.number;
  point.stream->wake.notify_one();
}

// ---- a stream's thread --------------------------------------------------------------------------

void wait_in_stream(Stream* stream, Lock& lock, const Point& point) {
  if (reached(point)) return;
  want(point);
  point.stream->waiting.push_back(stream);
  stream->wake.wait(lock, [&] { return reached(point) || failure(); });
  auto& others = point.stream->waiting;
  others.erase(std::find(others.begin(), others.end(), stream));
}

void starve(Stream* stream, Lock& lock, Clock::time_point until) {
  const uint64_t number = stream->completed + 1;
  stream->wake.wait_until(lock, until, [&] { return stream->wanted >= number || failure(); });
}

// Wait until the operations before this one in its connection have begun.
void wait_for_turn(Stream* stream, const Operation& operation, Lock& lock) {
  if (!stream->connection) return;
  const uint64_t& begun = stream->connection->begun;
  stream->wake.wait(lock, [&] { return begun + 1 == operation.place || failure(); });
}

void begin_next(Stream* stream) {
  if (!stream->connection) return;
  ++stream->connection->begun;
  for (Stream* other : state().streams)
    if (other->connection == stream->connection) other->wake.notify_one();
}

bool ending() { return failure() == cudaErrorCudartUnloading; }

// As the process ends: run no operations, and destroy nothing, since objects that operations refer
// to may be destroyed already.
void stop(Stream* stream, Lock& lock) {
  stream->completed = stream->submitted;
  state().host.notify_all();
  lock.unlock();
  for (;;) pause();
}

void run(Stream* stream, Operation operation, Lock& lock) {
  ++state().running;
  const bool is_wait = operation.is_wait;
  if (!is_wait) begin_next(stream);
  lock.unlock();
  const int longest = settings().delay_us;
  if (longest && !failure()) usleep(seeded(stream->id << 32, stream->completed) % longest);
  if (!failure()) operation.run();
  if (!ending()) operation = {};
  lock.lock();
  --state().running;
  if (ending()) stop(stream, lock);
  ++stream->completed;
  if (is_wait) begin_next(stream);
  for (Stream* other : stream->waiting) other->wake.notify_one();
  if (state().hosts_waiting) state().host.notify_all();
}

void work(Stream* stream) {
  Lock lock(state().mutex);
  for (;;) {
    stream->wake.wait(
        lock, [&] { return !stream->queue.empty() || stream->destroyed || ending(); });
    if (ending()) stop(stream, lock);
    if (stream->queue.empty()) {
      state().streams.erase(stream);
      return;
    }
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (stream->starved) starve(stream, lock, operation.starved_until);
    for (const Point& point : operation.after) wait_in_stream(stream, lock, point);
    wait_for_turn(stream, operation, lock);
    run(stream, std::move(operation), lock);
  }
}

// Signals are delivered to the program's own threads.
void start_thread(Stream* stream) {
  sigset_t others, before;
  sigfillset(&others);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&others, fault);
  pthread_sigmask(SIG_SETMASK, &others, &before);
  std::thread(work, stream).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  stream->has_thread = true;
}

// ---- a program's threads ------------------------------------------------------------------------

Stream* new_stream(int device, int priority, bool legacy, bool blocking) {
  const uint64_t id = state().streams_created++;
  const bool starved = settings().starve_ms && seeded(0x737461727665, id) % 3 == 0;
  auto* stream = new Stream{device, priority, legacy, blocking, id, starved};
  state().streams.insert(stream);
  return stream;
}

// Give a stream that is used for the first time its hardware queue: in turn.
void connect(Stream* stream) {
  const int number = settings().connections;
  if (!number || stream->connection) return;
  auto& all = state().connections[stream->device];
  all.resize(number);
  stream->connection = &all[state().streams_used[stream->device]++ % number];
}

// Add waits between a default stream and the blocking streams of its device.
void add_implicit(Stream* stream, std::vector<Point>& points) {
  if (!stream->legacy && !stream->blocking) return;
  for (Stream* other : state().streams)
    if (other->device == stream->device && other != stream &&
        (stream->legacy ? other->blocking : other->legacy) && other->completed < other->submitted)
      points.push_back({other, other->submitted});
}

// A query, in whichever thread, breaks a capture; and it may hang while another thread waits for
// the GPU (https://github.com/pytorch/pytorch/issues/104487), so here it does.
void begin_query(Lock& lock) {
  if (state().captured) {
    state().capture_is_valid = false;
    throw Error{cudaErrorStreamCaptureUnsupported};
  }
  state().host.wait(lock, [] { return !state().hosts_waiting || failure(); });
}

// Run the body with an event and the lock held.
template <class Body>
Result call_with_event(cudaEvent_t handle, Body body) {
  return call([&] {
    Lock lock(state().mutex);
    auto* event = (Event*)handle;
    if (!state().events.count(event)) throw Error{cudaErrorInvalidResourceHandle};
    body(event);
  });
}

}  // namespace

Stream* stream_of(void* handle) {
  const int device = (uintptr_t)handle <= 2 ? current_device() : kUnknown;
  Lock lock(state().mutex);
  auto* stream = (Stream*)handle;
  if (device == kUnknown) {
    if (state().streams.count(stream) && !stream->destroyed) return stream;
    throw Error{cudaErrorInvalidResourceHandle};
  }
  Stream*& standard = state().defaults[device];
  if (!standard) standard = new_stream(device, 0, true, false);
  return standard;
}

int device_of(Stream* stream) { return stream->device; }

Point enqueue(Stream* stream, std::function<void()> run, std::vector<Point> after, bool is_wait) {
  Lock lock(state().mutex);
  if (ending()) return {};
  add_implicit(stream, after);
  const auto starved_until = Clock::now() + std::chrono::milliseconds(settings().starve_ms);
  connect(stream);
  const uint64_t place = stream->connection ? ++stream->connection->submitted : 0;
  stream->queue.push_back({std::move(run), std::move(after), starved_until, is_wait, place});
  if (!stream->has_thread) start_thread(stream);
  stream->wake.notify_one();
  return {stream, ++stream->submitted};
}

Point last_point(Stream* stream) {
  Lock lock(state().mutex);
  return {stream, stream->submitted};
}

void wait_for(const std::vector<Point>& points) {
  State& all = state();
  Lock lock(all.mutex);
  for (const Point& point : points) want(point);
  ++all.hosts_waiting;
  all.host.wait(lock, [&] {
    return failure() || std::all_of(points.begin(), points.end(), reached);
  });
  if (!--all.hosts_waiting) all.host.notify_all();
}

void synchronize(Stream* stream) {
  count_synchronization();
  wait_for({last_point(stream)});
}

void synchronize_device(int device, bool counted) {
  if (counted) count_synchronization();
  std::vector<Point> points;
  {
    Lock lock(state().mutex);
    for (Stream* stream : state().streams)
      if (stream->device == device) points.push_back({stream, stream->submitted});
  }
  wait_for(points);
}

void count_synchronization() { ++synchronizations; }

void wake_all() {
  Lock lock(state().mutex);
  for (Stream* stream : state().streams) stream->wake.notify_one();
  state().host.notify_all();
}

// Wait for running operations: the objects that they use are about to be destroyed.
void stop_streams() {
  wake_all();
  for (int tries = 0; tries < 1000; ++tries) {
    {
      Lock lock(state().mutex);
      if (!state().running) return;
    }
    usleep(1000);
  }
}

}  // namespace emulated

using namespace emulated;

// The number of times that the host waited for a GPU.
extern "C" EMULATED long emulated_gpu_synchronizations() { return synchronizations; }

RUNTIME cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return call([&] {
    const int device = current_device();
    Lock lock(state().mutex);
    *stream = (cudaStream_t)new_stream(device, priority, false, !(flags & cudaStreamNonBlocking));
  });
}

// Queued work is still done.
RUNTIME cudaStreamDestroy(cudaStream_t handle) {
  return call([&] {
    Stream* const stream = stream_of(handle);
    Lock lock(state().mutex);
    if (stream->legacy) throw Error{cudaErrorInvalidResourceHandle};
    stream->destroyed = true;
    if (!stream->has_thread) state().streams.erase(stream);
    stream->wake.notify_one();
  });
}

RUNTIME cudaStreamQuery(cudaStream_t handle) {
  return call([&] {
    const Point last = last_point(stream_of(handle));
    Lock lock(state().mutex);
    begin_query(lock);
    if (!reached(last)) throw Error{cudaErrorNotReady};
  });
}
RUNTIME cudaStreamSynchronize(cudaStream_t handle) {
  return call([&] { synchronize(stream_of(handle)); });
}
RUNTIME cudaDeviceSynchronize() {
  return call([] { synchronize_device(current_device()); });
}
RUNTIME cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return call([&] { *priority = stream_of(handle)->priority; });
}

RUNTIME cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  Point point;
  const Result result = call_with_event(event_handle, [&](Event* event) { point = event->point; });
  if (result.number) return result;
  return call([&] {
    Stream* const stream = stream_of(handle);
    if (point.stream && point.stream != stream) enqueue(stream, [] {}, {point});
  });
}

RUNTIME cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  return call([&] {
    auto* event = new Event{current_device(), !(flags & cudaEventDisableTiming)};
    Lock lock(state().mutex);
    state().events.insert(event);
    *handle = (cudaEvent_t)event;
  });
}
RUNTIME cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

RUNTIME cudaEventDestroy(cudaEvent_t handle) {
  return call_with_event(handle, [&](Event* event) {
    state().events.erase(event);
    delete event;
  });
}

RUNTIME cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  auto time = std::make_shared<Clock::time_point>();
  Point point;
  const Result result = call([&] {
    Stream* const stream = stream_of(stream_handle);
    point = enqueue(stream, [time] { *time = Clock::now(); });
  });
  if (result.number) return result;
  return call_with_event(handle, [&](Event* event) {
    if (point.stream && event->device != point.stream->device)
      throw Error{cudaErrorInvalidResourceHandle};
    event->point = point, event->time = time;
  });
}
RUNTIME cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

RUNTIME cudaEventQuery(cudaEvent_t handle) {
  return call([&] {
    Lock lock(state().mutex);
    begin_query(lock);
    auto* const event = (Event*)handle;
    if (!state().events.count(event)) throw Error{cudaErrorInvalidResourceHandle};
    if (!reached(event->point)) throw Error{cudaErrorNotReady};
  });
}

RUNTIME cudaEventSynchronize(cudaEvent_t handle) {
  Point point;
  const Result result = call_with_event(handle, [&](Event* event) { point = event->point; });
  if (result.number) return result;
  count_synchronization();
  return call([&] { wait_for({point}); });
}

RUNTIME cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  return call_with_event(first, [&](Event* from) {
    auto* const to = (Event*)second;
    if (!state().events.count(to) || !from->timed || !to->timed || !from->time || !to->time)
      throw Error{cudaErrorInvalidResourceHandle};
    if (!reached(from->point) || !reached(to->point)) throw Error{cudaErrorNotReady};
    *ms = std::chrono::duration<float, std::milli>(*to->time - *from->time).count();
  });
}

// ---- graphs: a capture is only noted, and what it has captured cannot be launched ----------------

RUNTIME cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  return call([&] {
    Stream* const stream = stream_of(handle);
    Lock lock(state().mutex);
    if (stream->legacy || state().captured) throw Error{cudaErrorStreamCaptureUnsupported};
    state().captured = stream, state().capture_is_valid = true;
  });
}
RUNTIME cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call([&] {
    Stream* const stream = stream_of(handle);
    Lock lock(state().mutex);
    if (state().captured != stream) throw Error{cudaErrorIllegalState};
    state().captured = nullptr, *graph = nullptr;
    if (!state().capture_is_valid) throw Error{cudaErrorStreamCaptureInvalidated};
  });
}
RUNTIME cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call([&] {
    Stream* const stream = stream_of(handle);
    Lock lock(state().mutex);
    *status = state().captured != stream     ? cudaStreamCaptureStatusNone
              : state().capture_is_valid ? cudaStreamCaptureStatusActive
                                         : cudaStreamCaptureStatusInvalidated;
  });
}
RUNTIME cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                 unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                 const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 1;
  return cudaStreamIsCapturing(handle, status);
}
