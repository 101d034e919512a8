// Streams and events: each stream is a thread that does its operations in order.
//
// An operation has a number, counted from 1 in its stream. A "point" is a stream and a number: it
// is reached when the stream has done that operation. Recording an event notes a point; waiting for
// an event is waiting for the point that was noted last when the wait was called.
#include "emulator.h"

#include <pthread.h>
#include <signal.h>
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
#include <set>
#include <thread>

namespace emulated {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

struct Point {
  Stream* stream = nullptr;
  uint64_t number = 0;
};

struct Operation {
  std::function<void()> run;
  std::vector<Point> after;  // of other streams
  Clock::time_point starved_until;
};

// Never deleted: events may refer to a stream that is destroyed.
struct Stream {
  int device;
  uint64_t id;        // in the order of creation
  int priority;
  bool legacy;        // the default stream of its device
  bool blocking;      // ordered with the default stream
  bool starved;       // does nothing until waited for, or for starve_ms
  bool destroyed = false, has_thread = false;
  std::deque<Operation> queue;
  uint64_t submitted = 0, completed = 0;
  uint64_t wanted = 0;  // up to this number somebody waits
  std::vector<Stream*> waiting;        // streams to wake when an operation is done
  std::condition_variable wake;        // what its own thread waits for
};

struct Event {
  int device;
  bool timing;
  Point point;  // no stream: never recorded
  std::shared_ptr<Clock::time_point> time;
};

namespace {

// Never destroyed: threads use it until the process is gone.
struct State {
  std::mutex mutex;
  std::condition_variable host;  // what threads of the program wait for
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

const char* const kKinds[] = {"stream", "event", "device", "pageable copy", "free"};
std::atomic<long> synchronizations[5];

bool reached(const Point& point) {
  return !point.stream || point.stream->completed >= point.number;
}

// Say that somebody waits for a point, so that its stream starves no longer before it.
void want(const Point& point) {
  if (!point.stream || point.stream->wanted >= point.number) return;
  point.stream->wanted = point.number;
  point.stream->wake.notify_one();
}

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

void delay(Stream* stream) {
  if (const int longest = settings().delay_us)
    usleep(seeded(stream->id << 32, stream->completed) % longest);
}

bool ending() { return failure() == cudaErrorCudartUnloading; }

// As the process ends: do nothing more, and destroy nothing, since what operations refer to may be
// destroyed already.
void stop(Stream* stream, Lock& lock) {
  stream->completed = stream->submitted;
  state().host.notify_all();
  lock.unlock();
  for (;;) pause();
}

void work(Stream* stream) {
  State& all = state();
  Lock lock(all.mutex);
  for (;;) {
    stream->wake.wait(lock,
                      [&] { return !stream->queue.empty() || stream->destroyed || ending(); });
    if (ending()) stop(stream, lock);
    if (stream->queue.empty()) {
      all.streams.erase(stream);
      return;
    }
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (stream->starved) starve(stream, lock, operation.starved_until);
    for (const Point& point : operation.after) wait_in_stream(stream, lock, point);
    ++all.running;
    lock.unlock();
    if (!failure()) delay(stream);
    if (!failure()) operation.run();
    if (!ending()) operation = {};
    lock.lock();
    --all.running;
    if (ending()) stop(stream, lock);
    ++stream->completed;
    for (Stream* other : stream->waiting) other->wake.notify_one();
    if (all.hosts_waiting) all.host.notify_all();
  }
}

// Signals go to the program's own threads.
void start_thread(Stream* stream) {
  sigset_t others, before;
  sigfillset(&others);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&others, fault);
  pthread_sigmask(SIG_SETMASK, &others, &before);
  std::thread(work, stream).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  stream->has_thread = true;
}

Stream* new_stream(int device, bool legacy, bool blocking, int priority) {
  State& all = state();
  const uint64_t id = all.streams_created++;
  const bool starved = settings().starve_ms && seeded(0x737461727665, id) % 3 == 0;
  auto* stream = new Stream{device, id, priority, legacy, blocking, starved};
  all.streams.insert(stream);
  return stream;
}

// The default stream and blocking streams of a device wait for one another.
std::vector<Point> implicit_points(Stream* stream) {
  std::vector<Point> points;
  if (!stream->legacy && !stream->blocking) return points;
  for (Stream* other : state().streams)
    if (other->device == stream->device && other != stream &&
        (stream->legacy ? other->blocking : other->legacy) && other->completed < other->submitted)
      points.push_back({other, other->submitted});
  return points;
}

Point submit(Stream* stream, std::function<void()> run, const Point& after = {}) {
  Lock lock(state().mutex);
  if (ending()) return {stream, stream->completed};
  std::vector<Point> points = implicit_points(stream);
  if (after.stream && after.stream != stream) points.push_back(after);
  const auto starved_until = Clock::now() + std::chrono::milliseconds(settings().starve_ms);
  stream->queue.push_back({std::move(run), std::move(points), starved_until});
  if (!stream->has_thread) start_thread(stream);
  stream->wake.notify_one();
  return {stream, ++stream->submitted};
}

// Wait in a thread of the program.
void wait_for(const std::vector<Point>& points) {
  auto all_reached = [&] { return std::all_of(points.begin(), points.end(), reached); };
  without_python([&] {
    State& all = state();
    Lock lock(all.mutex);
    for (const Point& point : points) want(point);
    ++all.hosts_waiting;
    all.host.wait(lock, [&] { return all_reached() || failure(); });
    --all.hosts_waiting;
  });
}

Event* event_of(cudaEvent_t handle) {
  auto* event = (Event*)handle;
  return state().events.count(event) ? event : nullptr;
}

cudaError_t create_stream(cudaStream_t* handle, unsigned flags, int priority) {
  if (cudaError_t error = begin()) return end(error);
  const int device = current_device();
  Lock lock(state().mutex);
  *handle = (cudaStream_t)new_stream(device, false, !(flags & cudaStreamNonBlocking), priority);
  return cudaSuccess;
}

}  // namespace

Stream* stream_of(void* handle) {
  const int device = (uintptr_t)handle <= 2 ? current_device() : -1;
  State& all = state();
  Lock lock(all.mutex);
  if (device < 0) {
    auto* const stream = (Stream*)handle;
    return all.streams.count(stream) && !stream->destroyed ? stream : nullptr;
  }
  Stream*& stream = all.defaults[device];
  if (!stream) stream = new_stream(device, true, false, 0);
  return stream;
}

int device_of(Stream* stream) { return stream->device; }

void enqueue(Stream* stream, std::function<void()> run) { submit(stream, std::move(run)); }

void synchronize(Stream* stream, bool counted) {
  if (counted) count_synchronization("stream");
  Point point;
  {
    Lock lock(state().mutex);
    point = {stream, stream->submitted};
  }
  wait_for({point});
}

void synchronize_device(int device, bool counted) {
  if (counted) count_synchronization("device");
  std::vector<Point> points;
  {
    Lock lock(state().mutex);
    for (Stream* stream : state().streams)
      if (stream->device == device) points.push_back({stream, stream->submitted});
  }
  wait_for(points);
}

void count_synchronization(const char* kind) {
  for (int i = 0; i < 5; ++i)
    if (!strcmp(kKinds[i], kind)) ++synchronizations[i];
}

void wake_all() {
  State& all = state();
  Lock lock(all.mutex);
  for (Stream* stream : all.streams) stream->wake.notify_one();
  all.host.notify_all();
}

// An operation that computes ends first: what it uses is about to be destroyed.
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

#define STREAM(name, handle)                     \
  if (cudaError_t error = begin()) return end(error); \
  Stream* const name = stream_of(handle);        \
  if (!name) return end(cudaErrorInvalidResourceHandle)

// How often the host waited for a GPU: of a kind (see count_synchronization), and of all kinds.
extern "C" EMULATED long emulated_gpu_synchronizations_of(const char* kind) {
  for (int i = 0; i < 5; ++i)
    if (!strcmp(kKinds[i], kind)) return synchronizations[i];
  return -1;
}
extern "C" EMULATED long emulated_gpu_synchronizations() {
  long sum = 0;
  for (auto& number : synchronizations) sum += number;
  return sum;
}
extern "C" EMULATED void emulated_gpu_reset_synchronizations() {
  for (auto& number : synchronizations) number = 0;
}

RUNTIME cudaStreamCreate(cudaStream_t* stream) { return create_stream(stream, 0, 0); }
RUNTIME cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags, 0);
}
RUNTIME cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}

// What is queued is still done.
RUNTIME cudaStreamDestroy(cudaStream_t handle) {
  STREAM(stream, handle);
  Lock lock(state().mutex);
  if (stream->legacy || stream->destroyed) return end(cudaErrorInvalidResourceHandle);
  stream->destroyed = true;
  if (!stream->has_thread) state().streams.erase(stream);
  stream->wake.notify_one();
  return cudaSuccess;
}

RUNTIME cudaStreamQuery(cudaStream_t handle) {
  STREAM(stream, handle);
  Lock lock(state().mutex);
  return end(stream->completed == stream->submitted ? cudaSuccess : cudaErrorNotReady);
}

RUNTIME cudaStreamSynchronize(cudaStream_t handle) {
  STREAM(stream, handle);
  synchronize(stream);
  return end(failure());
}

RUNTIME cudaDeviceSynchronize() {
  if (cudaError_t error = begin()) return end(error);
  synchronize_device(current_device());
  return end(failure());
}

RUNTIME cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  STREAM(stream, handle);
  *priority = stream->priority;
  return cudaSuccess;
}

RUNTIME cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  STREAM(stream, handle);
  enqueue(stream, [=] { function(data); });
  return cudaSuccess;
}

RUNTIME cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data,
                              unsigned) {
  STREAM(stream, handle);
  enqueue(stream, [=] { function(handle, failure(), data); });
  return cudaSuccess;
}

RUNTIME cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  STREAM(stream, handle);
  Point point;
  {
    Lock lock(state().mutex);
    Event* const event = event_of(event_handle);
    if (!event) return end(cudaErrorInvalidResourceHandle);
    point = event->point;
    if (reached(point)) return cudaSuccess;
  }
  submit(stream, [] {}, point);
  return cudaSuccess;
}

RUNTIME cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  if (cudaError_t error = begin()) return end(error);
  auto* event = new Event{current_device(), !(flags & cudaEventDisableTiming), {}, nullptr};
  Lock lock(state().mutex);
  state().events.insert(event);
  *handle = (cudaEvent_t)event;
  return cudaSuccess;
}
RUNTIME cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

RUNTIME cudaEventDestroy(cudaEvent_t handle) {
  if (cudaError_t error = begin()) return end(error);
  Lock lock(state().mutex);
  Event* const event = event_of(handle);
  if (!event) return end(cudaErrorInvalidResourceHandle);
  state().events.erase(event);
  delete event;
  return cudaSuccess;
}

RUNTIME cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  STREAM(stream, stream_handle);
  {
    Lock lock(state().mutex);
    Event* const event = event_of(handle);
    if (!event || event->device != stream->device) return end(cudaErrorInvalidResourceHandle);
  }
  auto time = std::make_shared<Clock::time_point>();
  const Point point = submit(stream, [time] { *time = Clock::now(); });
  Lock lock(state().mutex);
  if (Event* const event = event_of(handle)) event->point = point, event->time = time;
  return cudaSuccess;
}
RUNTIME cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

RUNTIME cudaEventQuery(cudaEvent_t handle) {
  if (cudaError_t error = begin()) return end(error);
  Lock lock(state().mutex);
  Event* const event = event_of(handle);
  if (!event) return end(cudaErrorInvalidResourceHandle);
  return end(reached(event->point) ? cudaSuccess : cudaErrorNotReady);
}

RUNTIME cudaEventSynchronize(cudaEvent_t handle) {
  if (cudaError_t error = begin()) return end(error);
  Point point;
  {
    Lock lock(state().mutex);
    Event* const event = event_of(handle);
    if (!event) return end(cudaErrorInvalidResourceHandle);
    point = event->point;
  }
  count_synchronization("event");
  wait_for({point});
  return end(failure());
}

RUNTIME cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  if (cudaError_t error = begin()) return end(error);
  Lock lock(state().mutex);
  Event *const from = event_of(first), *const to = event_of(second);
  if (!from || !to || !from->timing || !to->timing || !from->time || !to->time ||
      from->device != to->device)
    return end(cudaErrorInvalidResourceHandle);
  if (!reached(from->point) || !reached(to->point)) return end(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(*to->time - *from->time).count();
  return cudaSuccess;
}
