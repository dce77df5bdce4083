// reentry.cpp: while history is on, what the library calls in the middle of a request frees, waits for other threads of PyTorch,
// and is notified of what others do; nothing of that waits for the request itself.
#include "check.h"

#include <cistern.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <vector>

namespace {

void* library;

template <class F>
F* of_library(const char* name, F*) {
  void* f = dlsym(library, name);
  if (f == nullptr) {
    printf("the library has no %s\n", name);
    exit(1);
  }
  return reinterpret_cast<F*>(f);
}
#define LIB(name) of_library(#name, static_cast<decltype(::name)*>(nullptr))

// Nothing below takes that long but a deadlock, which ends by it and is a failure.
constexpr auto deadlock = std::chrono::seconds(20);

// The interpreter's lock. The recorder of stacks takes it, whichever thread has it already.
struct Interpreter {
  std::recursive_timed_mutex lock;
  bool take() { return lock.try_lock_for(deadlock); }
} interpreter;

std::shared_ptr<c10::GatheredContext> gather() {
  const bool taken = interpreter.take();
  CHECK(taken);
  if (taken)
    interpreter.lock.unlock();
  return std::make_shared<c10::GatheredContext>();
}

// Event is what one thread waits for another to do.
class Event {
 public:
  void set() {
    std::lock_guard<std::mutex> lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  bool wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, deadlock, [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// PyTorch's own callback before out of memory: it frees tensors that were sent to other processes.
std::function<bool()> on_out_of_memory;
struct Callback : c10::FreeMemoryCallback {
  bool Execute() override { return on_out_of_memory && on_out_of_memory(); }
};
void callback_that_frees() {
  cca::recordHistory(true, gather, 1000, cca::RecordContext::ALL, true, {});
  void* kept = cca::raw_alloc(5 * GiB);
  Event holds;
  std::thread python;
  on_out_of_memory = [&] {
    if (kept == nullptr)
      return false;
    python = std::thread([&] { // asks for memory while it has the interpreter's lock, as all of Python does
      std::lock_guard<std::recursive_timed_mutex> lock(interpreter.lock);
      holds.set();
      cca::raw_delete(cca::raw_alloc(MiB));
    });
    CHECK(holds.wait());
    cca::raw_delete(kept); // which wants a stack, and so the interpreter's lock
    kept = nullptr;
    return true;
  };
  void* p = cca::raw_alloc(6 * GiB);
  CHECK(kept == nullptr);
  on_out_of_memory = nullptr;
  python.join();
  cca::raw_delete(p);
  cca::recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
  cca::emptyCache();
  CHECK(reserved() == 0);
}

// Every event has the stack of the thread that caused it, whichever thread reads it; those of others beside PyTorch have none.
struct Number : c10::GatheredContext {
  size_t n;
  explicit Number(size_t n) : n(n) {}
};
thread_local size_t my_number;

void whose() {
  constexpr size_t threads = 4, rounds = 3000;
  cca::recordHistory(true, [] { return std::shared_ptr<c10::GatheredContext>(std::make_shared<Number>(my_number)); }, 1 << 20,
                     cca::RecordContext::ALL, true, {});
  std::vector<std::thread> all;
  for (size_t t = 1; t <= threads; t++)
    all.emplace_back([t] {
      c10::cuda::CUDAStreamGuard guard(some_stream());
      my_number = t;
      for (size_t i = 0; i < rounds; i++) {
        void* p = cca::raw_alloc(t);
        LIB(cistern_release)(LIB(cistern_malloc)(100 + static_cast<ssize_t>(t), 0, nullptr)); // beside PyTorch, in the same thread
        cca::raw_delete(p);
        if (i % 500 == t)
          cca::emptyCache();
      }
    });
  for (std::thread& t : all)
    t.join();
  std::map<cca::TraceEntry::Action, size_t> seen;
  const auto snapshot = cca::snapshot();
  for (const cca::TraceEntry& e : snapshot.device_traces[0]) {
    const size_t number = e.context_ ? static_cast<const Number*>(e.context_.get())->n : 0;
    seen[e.action_]++;
    if (e.action_ == cca::TraceEntry::ALLOC || e.action_ == cca::TraceEntry::FREE_REQUESTED ||
        e.action_ == cca::TraceEntry::FREE_COMPLETED)
      CHECK(number == (e.size_ > 100 ? 0 : e.size_));
    if (e.action_ == cca::TraceEntry::SEGMENT_UNMAP) // by emptyCache, or moved by a request beside PyTorch
      CHECK(number <= threads);
  }
  CHECK(seen[cca::TraceEntry::ALLOC] == 2 * threads * rounds && seen[cca::TraceEntry::SEGMENT_UNMAP] > 0);
  cca::recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
  cca::emptyCache();
  CHECK(reserved() == 0);
}

// What a tracker registered, as NCCL would, of device 0.
struct Registry {
  std::mutex mutex;
  std::map<size_t, size_t> ranges;
  std::function<void()> gone; // called when memory goes
  void track(const cca::TraceEntry& e) {
    if (e.device_ != 0)
      return;
    const bool maps = e.action_ == cca::TraceEntry::SEGMENT_MAP || e.action_ == cca::TraceEntry::SEGMENT_ALLOC;
    const bool unmaps = e.action_ == cca::TraceEntry::SEGMENT_UNMAP || e.action_ == cca::TraceEntry::SEGMENT_FREE;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (maps)
        CHECK(ranges.emplace(e.addr_, e.size_).second);
      if (unmaps)
        CHECK(ranges.erase(e.addr_) == 1);
    }
    if (unmaps && gone)
      gone();
  }
  bool covers(const void* p, size_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t at = reinterpret_cast<size_t>(p), end = at + n; at < end;) {
      auto after = ranges.upper_bound(at);
      if (after == ranges.begin() || (--after)->first + after->second <= at)
        return false;
      at = after->first + after->second;
    }
    return true;
  }
  size_t sum() {
    std::lock_guard<std::mutex> lock(mutex);
    size_t n = 0;
    for (const auto& [addr, size] : ranges)
      n += size;
    return n;
  }
} registry;

// Memory of libraries beside PyTorch, CuPy for one, is known to trackers too: from when it is mapped until it goes.
void others() {
  void* p = LIB(cistern_malloc)(300 * MiB, 0, nullptr);
  CHECK(registry.covers(p, 300 * MiB));
  // More than the library keeps events of goes by before PyTorch asks for anything.
  for (int i = 0; i < 40000; i++)
    LIB(cistern_release)(LIB(cistern_malloc)(512, 0, nullptr));
  void* q = cca::raw_alloc(MiB);
  CHECK(registry.covers(p, 300 * MiB) && registry.covers(q, MiB));
  CHECK(registry.sum() == static_cast<size_t>(reserved()));
  CHECK(LIB(cistern_pause)(0, nullptr, nullptr) == CISTERN_OK);
  CHECK(reserved() == 0 && registry.sum() == 0);
  CHECK(LIB(cistern_resume)(0, nullptr, nullptr) == CISTERN_OK);
  CHECK(registry.covers(p, 300 * MiB) && registry.covers(q, MiB) && registry.sum() == static_cast<size_t>(reserved()));
  cca::raw_delete(q);
  CHECK(LIB(cistern_release)(p) == CISTERN_OK);
  cca::emptyCache();
  CHECK(reserved() == 0 && registry.sum() == 0);
}

// A thread gives memory back outside of PyTorch, and a tracker must hear of that first, while a request of PyTorch's waits for
// memory.
struct Outside {
  void* held;
  Event notified;
  static int ask(void* ctx, int device, uint64_t) {
    auto* o = static_cast<Outside*>(ctx);
    CHECK(device == 0);
    if (o->held == nullptr)
      return 0;
    registry.gone = [o] { o->notified.set(); };
    std::thread outside([o] {
      CHECK(LIB(cistern_release)(o->held) == CISTERN_OK);
      CHECK(LIB(cistern_trim)(0) == CISTERN_OK);
    });
    const bool heard = o->notified.wait();
    CHECK(heard);
    if (heard)
      outside.join();
    else
      outside.detach();
    registry.gone = nullptr;
    o->held = nullptr;
    return 1;
  }
};

void unmapped_outside() {
  static Outside o;
  o.held = LIB(cistern_malloc)(5 * GiB, 0, nullptr);
  CHECK(LIB(cistern_on_out_of_memory)(0, Outside::ask, &o) == CISTERN_OK);
  void* p = cca::raw_alloc(6 * GiB);
  CHECK(LIB(cistern_off_out_of_memory)(0, Outside::ask, &o) == CISTERN_OK);
  cca::raw_delete(p);
  cca::emptyCache();
  CHECK(reserved() == 0 && registry.sum() == 0);
}

// While a tracker hears of memory of one device, requests for another go on.
void devices_apart() {
  Event inside, done;
  registry.gone = [&] {
    inside.set();
    CHECK(done.wait());
  };
  cca::raw_delete(cca::raw_alloc(MiB));
  std::thread first([] { cca::emptyCache(); });
  CHECK(inside.wait());
  {
    c10::cuda::CUDAGuard other(1);
    cca::raw_delete(cca::raw_alloc(MiB));
  }
  done.set();
  first.join();
  registry.gone = nullptr;
}

} // namespace

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("reentry", Callback);
}

int main(int, char** argv) {
  install(argv);
  cca::init(2);
  library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
  callback_that_frees();
  whose();
  cca::attachAllocatorTraceTracker([](const cca::TraceEntry& e) { registry.track(e); });
  others();
  unmapped_outside();
  devices_apart();
  return done();
}
