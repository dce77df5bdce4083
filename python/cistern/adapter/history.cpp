// history.cpp: torch.cuda.memory._record_memory_history, and trackers of segments.
//
// The library keeps the events, each with the thread that caused it; this file keeps what each thread asks of the library at the
// moment (Recorded), and so knows the stack that belongs to an event. Stacks are gathered before, as the recorder may want the
// interpreter's lock. Every call reads the events of its device when it begins, which are not its own, and when it ends. No lock is
// held while the library works.
//
// Trackers hear of segments from the library itself, before memory is handed out and before it is unmapped, on the thread that
// does it: so they miss nothing, however many events there were. They get all other events when those are read.
#include "adapter.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <stack>
#include <unordered_map>

#include <sys/syscall.h>
#include <unistd.h>

namespace cistern_torch {

namespace {

using Action = TraceEntry::Action;

// Ring keeps the newest entries, in order.
template <class T>
class Ring {
 public:
  void limit(size_t n) {
    max_ = std::max<size_t>(n, 1);
    std::rotate(entries_.begin(), entries_.begin() + static_cast<ptrdiff_t>(next_), entries_.end());
    next_ = 0;
    if (entries_.size() > max_)
      entries_.erase(entries_.begin(), entries_.end() - static_cast<ptrdiff_t>(max_));
  }
  void clear() {
    entries_.clear();
    entries_.shrink_to_fit();
    next_ = 0;
  }
  void add(T entry) {
    if (entries_.size() < max_)
      entries_.push_back(std::move(entry));
    else {
      entries_[next_] = std::move(entry);
      next_ = (next_ + 1) % entries_.size();
    }
  }
  void copy_to(std::vector<T>* out) const {
    out->reserve(out->size() + entries_.size());
    for (size_t i = 0; i < entries_.size(); i++)
      out->push_back(entries_[(next_ + i) % entries_.size()]);
  }

 private:
  size_t max_ = 1, next_ = 0;
  std::vector<T> entries_;
};

struct Live {
  Context taken, freed; // the stacks of its allocation and of its release
};

struct SegmentNote {
  Context context;
  bool mapped = true; // a chunk of a larger range
  void* stream = nullptr;
  MempoolId_t pool{0, 0};
};

struct DeviceHistory {
  bool ready = false;          // PyTorch uses the device
  std::atomic<bool> on{false}; // the library keeps events
  bool hooked = false;         // the library says what it maps and unmaps
  // Held while trackers are notified, and while their events are read: so they get one event at a time, in order, as
  // they do from PyTorch's own allocator. A tracker may free memory.
  std::recursive_mutex telling;
  std::mutex mutex; // guards what follows, and is held while events are read
  Ring<TraceEntry> trace;
  std::unordered_map<uint64_t, Live> live;
  std::unordered_map<uint64_t, SegmentNote> segments;
  // What was mapped already when tracking began, by the end of each range.
  std::map<uint64_t, std::pair<uint64_t, SegmentNote>> older;
  SegmentNote at(uint64_t addr) const {
    const auto it = segments.find(addr);
    if (it != segments.end())
      return it->second;
    const auto range = older.upper_bound(addr);
    return range != older.end() && range->second.first <= addr ? range->second.second : SegmentNote{};
  }
};

using Trackers = std::vector<cca::AllocatorTraceTracker>;

// History has locks in this order: mutex, DeviceHistory::telling, DeviceHistory::mutex, calls_mutex.
struct History {
  std::mutex mutex; // held while history is switched on or off, never by what the library calls
  std::atomic<bool> recording{false};
  std::atomic<cca::RecordContext> when{cca::RecordContext::NEVER};
  std::atomic<cca::CreateContextFn> recorder{nullptr};
  std::atomic<uint32_t> skipped{0};         // actions, as bits
  std::atomic<const Trackers*> trackers{nullptr}; // nullptr: none; each list is kept, as threads may read one that was replaced
  std::mutex annotations_mutex;
  Ring<AnnotationEntry> annotations;
  std::mutex calls_mutex;
  std::unordered_map<uint32_t, std::vector<Call>> calls; // guarded by calls_mutex: by thread, the innermost last
  DeviceHistory devices[kMaxDevices];
};
History& history = *new History; // never destroyed: stacks hold Python objects

thread_local std::stack<std::string> compile_context;

// How many events the library keeps between two readings: more than one call makes.
constexpr size_t library_events = 1 << 16;

const Trackers* trackers() { return history.trackers.load(); }

// this_thread is the number by which events name the calling thread.
uint32_t this_thread() {
  thread_local const auto number = static_cast<uint32_t>(syscall(SYS_gettid));
  return number;
}

// A call of the calling thread, for itself or for the library.
Call new_call(Context context, const void* freed) {
  return {std::move(context), freed, compile_context.empty() ? "N/A" : compile_context.top(), Adapter::user_metadata()};
}

// call_of is what a thread asks of the library now.
Call call_of(uint32_t thread) {
  std::lock_guard<std::mutex> lock(history.calls_mutex);
  const auto it = history.calls.find(thread);
  return it != history.calls.end() ? it->second.back() : Call{};
}

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

void set_time(TraceTime* t, int64_t us) { t->t_ = static_cast<time_t>(us); }

TraceEntry make_entry(Action action, DeviceIndex device, uint64_t addr, uint64_t size, void* stream, MempoolId_t pool,
                      int64_t time, const Call& by) {
  const bool keep = history.when.load() >= cca::RecordContext::ALLOC;
  TraceEntry te = trace_entry(action, device, addr, size, stream, pool, keep ? by.context : nullptr, by.compiled, by.metadata);
  set_time(&te.time_, time);
  return te;
}

void tell(const Trackers& list, const TraceEntry& te) {
  for (const auto& tracker : list) {
    try {
      tracker(te);
    } catch (const std::exception& e) {
      TORCH_WARN_ONCE("Cistern: a tracker of memory failed: ", e.what());
    } catch (const abi::__forced_unwind&) {
      throw;
    } catch (...) {
      TORCH_WARN_ONCE("Cistern: a tracker of memory failed");
    }
  }
}

// keep adds an entry to those that a snapshot shows. The caller holds the device's mutex.
void keep(const TraceEntry& te) {
  if (history.recording && !(history.skipped >> te.action_ & 1))
    history.devices[te.device_].trace.add(te);
}

// note turns one event of the library into an entry, none where PyTorch has none. The caller holds the device's mutex.
std::optional<TraceEntry> note(DeviceIndex device, const cistern_event& e) {
  DeviceHistory& d = history.devices[device];
  const void* const ptr = reinterpret_cast<void*>(e.addr);
  Call by = call_of(e.thread);
  Action action = TraceEntry::ALLOC;
  switch (e.kind) {
    case CISTERN_EVENT_ALLOC:
      if (by.context)
        d.live[e.addr] = {by.context, nullptr};
      else
        d.live.erase(e.addr);
      break;
    case CISTERN_EVENT_FREE_REQUESTED: {
      action = TraceEntry::FREE_REQUESTED;
      if (by.freed == ptr && by.context) {
        d.live[e.addr].freed = by.context;
        break;
      }
      const auto it = d.live.find(e.addr);
      by.context = it != d.live.end() ? it->second.taken : nullptr;
      break;
    }
    case CISTERN_EVENT_FREE_COMPLETED: {
      action = TraceEntry::FREE_COMPLETED;
      const auto it = d.live.find(e.addr);
      by.context = nullptr;
      if (it != d.live.end()) {
        by.context = it->second.freed ? it->second.freed : it->second.taken;
        d.live.erase(it);
      }
      break;
    }
    case CISTERN_EVENT_SEGMENT_ALLOC:
    case CISTERN_EVENT_SEGMENT_MAP:
      action = e.kind == CISTERN_EVENT_SEGMENT_MAP ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_ALLOC;
      d.segments[e.addr] = {by.context, action == TraceEntry::SEGMENT_MAP, e.stream, {e.pool[0], e.pool[1]}};
      break;
    case CISTERN_EVENT_SEGMENT_FREE:
    case CISTERN_EVENT_SEGMENT_UNMAP: {
      action = e.kind == CISTERN_EVENT_SEGMENT_UNMAP ? TraceEntry::SEGMENT_UNMAP : TraceEntry::SEGMENT_FREE;
      const auto it = d.segments.find(e.addr);
      if (it != d.segments.end()) {
        if (!by.context)
          by.context = it->second.context;
        d.segments.erase(it);
      }
      break;
    }
    default:
      return std::nullopt; // out of memory is recorded where it is thrown: the library may fail a request that is then met elsewhere
  }
  return make_entry(action, device, e.addr, e.size, e.stream, {e.pool[0], e.pool[1]}, e.time_us, by);
}

// of_segment says whether trackers hear of an action from the library itself.
bool of_segment(Action a) {
  return a == TraceEntry::SEGMENT_ALLOC || a == TraceEntry::SEGMENT_FREE || a == TraceEntry::SEGMENT_MAP ||
      a == TraceEntry::SEGMENT_UNMAP;
}

// Threads that notify trackers of a device, or read their events, hold a Telling.
struct Telling {
  const Trackers* const list = trackers();
  std::unique_lock<std::recursive_mutex> lock;
  explicit Telling(DeviceHistory& d) : lock(d.telling, std::defer_lock) {
    if (list)
      lock.lock();
  }
};

// read reads what happened on the device, and tells trackers.
void read(DeviceIndex device) {
  DeviceHistory& d = history.devices[device];
  if (!d.on)
    return;
  const Telling telling(d);
  std::vector<TraceEntry> pending;
  {
    std::lock_guard<std::mutex> lock(d.mutex);
    cistern_event events[64];
    size_t n = 0;
    do {
      n = 0;
      if (lib.history_drain(device, events, std::size(events), &n, nullptr) != CISTERN_OK)
        break;
      for (size_t i = 0; i < n; i++)
        if (const auto te = note(device, events[i])) {
          keep(*te);
          if (telling.list && !of_segment(te->action_))
            pending.push_back(*te);
        }
    } while (n == std::size(events));
  }
  for (const TraceEntry& te : pending)
    tell(*telling.list, te);
}

constexpr DeviceIndex all_devices = -1;

void read_of(DeviceIndex device) {
  if (device != all_devices)
    return read(device);
  for (int d = 0; d < device_count; d++)
    read(static_cast<DeviceIndex>(d));
}

// add adds what happened here, rather than in the library, behind all that happened there before.
void add(Action action, DeviceIndex device, uint64_t addr, uint64_t size, void* stream, MempoolId_t pool, const Call& by) {
  DeviceHistory& d = history.devices[device];
  const Telling telling(d);
  read(device);
  const TraceEntry te = make_entry(action, device, addr, size, stream, pool, now_us(), by);
  {
    std::lock_guard<std::mutex> lock(d.mutex);
    keep(te);
  }
  if (telling.list)
    tell(*telling.list, te);
}

// segment tells trackers of memory that was mapped, of which nothing is handed out yet, or that is to be unmapped.
void segment(DeviceIndex device, void* ptr, size_t size, bool mapped) {
  DeviceHistory& d = history.devices[device];
  const Telling telling(d);
  if (!telling.list)
    return;
  read(device); // its mapping is among what was not read yet
  const auto addr = reinterpret_cast<uint64_t>(ptr);
  SegmentNote n;
  {
    std::lock_guard<std::mutex> lock(d.mutex);
    n = d.at(addr);
  }
  Call by = call_of(this_thread());
  if (!by.context)
    by.context = n.context;
  const Action action = mapped ? (n.mapped ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_ALLOC)
                               : (n.mapped ? TraceEntry::SEGMENT_UNMAP : TraceEntry::SEGMENT_FREE);
  tell(*telling.list, make_entry(action, device, addr, size, n.stream, n.pool, now_us(), by));
}

// The library calls these with no lock held, on the thread whose call maps or unmaps.
extern "C" void mapped(void*, int device, void* addr, size_t size) {
  try {
    segment(static_cast<DeviceIndex>(device), addr, size, true);
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) { // no memory for the entry
  }
}

extern "C" void before_unmap(void*, int device, void* addr, size_t size) {
  try {
    segment(static_cast<DeviceIndex>(device), addr, size, false);
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) { // no memory for the entry
  }
}

// remember notes what is mapped on the device now. The caller holds history's mutex.
void remember(DeviceIndex device) {
  cistern_snapshot* snapshot = nullptr;
  check(lib.snapshot_take(device, nullptr, &snapshot));
  DeviceHistory& d = history.devices[device];
  std::lock_guard<std::mutex> lock(d.mutex);
  for (size_t i = 0; i < snapshot->num_segments; i++) {
    const cistern_segment& g = snapshot->segments[i];
    if (g.addr != 0)
      d.older[g.addr + g.size] = {g.addr, {nullptr, g.expandable != 0, g.stream, {g.pool[0], g.pool[1]}}};
  }
  lib.snapshot_free(snapshot);
}

// follow makes the library keep events of the device, or stop, as is wanted now. The caller holds history's mutex.
void follow(DeviceIndex device) {
  DeviceHistory& d = history.devices[device];
  const bool wanted = history.recording || trackers();
  if (wanted != d.on) {
    check(lib.history(device, wanted ? library_events : 0));
    d.on = wanted;
  }
  if (trackers() && !d.hooked) {
    check(lib.on_map(device, mapped, nullptr));
    check(lib.on_unmap(device, before_unmap, nullptr));
    d.hooked = true;
    remember(device);
  }
}

void follow_all() {
  for (int d = 0; d < device_count; d++)
    if (history.devices[d].ready)
      follow(static_cast<DeviceIndex>(d));
  set_mode(kHistory, history.recording || trackers());
}

} // namespace

Context gather(cca::RecordContext level) {
  if (history.when.load() < level)
    return nullptr;
  const cca::CreateContextFn recorder = history.recorder.load();
  return recorder != nullptr ? recorder() : nullptr;
}

Recorded::Recorded(cca::RecordContext level) : Recorded(gather(level), nullptr) {}

Recorded::Recorded(Context context, const void* freed, DeviceIndex device) : device_(device), on_(mode.load() & kHistory) {
  if (!on_)
    return;
  read_of(device_); // what happened so far is not of this call
  std::lock_guard<std::mutex> lock(history.calls_mutex);
  history.calls[this_thread()].push_back(new_call(std::move(context), freed));
}

Recorded::~Recorded() {
  if (!on_)
    return;
  try {
    read_of(device_);
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) { // no memory for an entry
  }
  std::vector<Call> none;
  Call over;
  std::lock_guard<std::mutex> lock(history.calls_mutex);
  const auto it = history.calls.find(this_thread());
  over = std::move(it->second.back());
  it->second.pop_back();
  if (it->second.empty()) { // threads come and go
    none = std::move(it->second);
    history.calls.erase(it);
  }
}

int take_recorded(const Request& r, const Context& context, void** out) {
  Recorded recorded(context, nullptr, r.device);
  return take_from_library(r, out);
}

int release_recorded(void* ptr) {
  const Context context = gather(cca::RecordContext::ALL);
  cistern_block b;
  const int code = lib.find(ptr, &b);
  if (code != CISTERN_OK)
    return code;
  Recorded recorded(context, ptr, static_cast<DeviceIndex>(b.device));
  return lib.release(ptr);
}

void history_touch(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(history.mutex);
  follow(device);
  history.devices[device].ready = true;
}

void record_oom(const Request& r, size_t device_free, const Context& context) {
  constexpr size_t unit = 512; // PyTorch records the rounded size here
  if (mode.load() & kHistory)
    add(TraceEntry::OOM, r.device, device_free, (r.size + unit - 1) / unit * unit, r.stream, r.pool, new_call(context, nullptr));
}

void record_snapshot(DeviceIndex device, size_t active, MempoolId_t pool) {
  if (mode.load() & kHistory)
    add(TraceEntry::SNAPSHOT, device, 0, active, nullptr, pool, new_call(nullptr, nullptr));
}

bool tracked() { return trackers() != nullptr; }

void copy_traces(SnapshotInfo* out) {
  {
    std::lock_guard<std::mutex> lock(history.annotations_mutex);
    history.annotations.copy_to(&out->external_annotations);
  }
  read_of(all_devices);
  for (int d = 0; d < device_count; d++) {
    out->device_traces.emplace_back();
    std::lock_guard<std::mutex> lock(history.devices[d].mutex);
    history.devices[d].trace.copy_to(&out->device_traces.back());
  }
}

Context block_context(DeviceIndex device, uint64_t addr) {
  const DeviceHistory& d = history.devices[device];
  std::lock_guard<std::mutex> lock(history.devices[device].mutex);
  const auto it = d.live.find(addr);
  return it != d.live.end() ? it->second.taken : nullptr;
}

Context segment_context(DeviceIndex device, uint64_t addr) {
  const DeviceHistory& d = history.devices[device];
  std::lock_guard<std::mutex> lock(history.devices[device].mutex);
  const auto it = d.segments.find(addr);
  return it != d.segments.end() ? it->second.context : nullptr;
}

bool Adapter::isHistoryEnabled() { return history.recording; }

void Adapter::record_history(bool enabled, cca::CreateContextFn recorder, size_t max_entries, cca::RecordContext when,
                             bool clear, uint32_t skipped) {
  TORCH_CHECK(when == cca::RecordContext::NEVER || recorder != nullptr, "expected a recorder of contexts");
  {
    std::lock_guard<std::mutex> lock(history.annotations_mutex);
    history.annotations.limit(max_entries);
    if (!enabled || clear)
      history.annotations.clear();
  }
  std::lock_guard<std::mutex> lock(history.mutex);
  history.recording = enabled;
  history.recorder = enabled ? recorder : nullptr;
  history.when = enabled ? when : cca::RecordContext::NEVER;
  history.skipped = skipped;
  for (DeviceHistory& d : history.devices) {
    std::lock_guard<std::mutex> of_device(d.mutex);
    d.trace.limit(max_entries);
    if (!enabled || clear)
      d.trace.clear();
    if (!enabled) {
      // Releases are not seen from now on, so a stack could be taken for that of the next block at its address.
      d.live.clear();
      if (!trackers())
        d.segments.clear();
    }
  }
  follow_all();
}

void Adapter::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& md) {
  if (!history.recording)
    return;
  DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  AnnotationEntry entry(device, 0);
  set_time(&entry.time_, now_us());
  for (const auto& [name, value] : md)
    entry.recordUserMetadata(name, value);
  std::lock_guard<std::mutex> lock(history.annotations_mutex);
  history.annotations.add(std::move(entry));
}

void Adapter::push_compile_context(const std::string& context) {
  if (history.recording)
    compile_context.push(context);
}

void Adapter::pop_compile_context() {
  if (history.recording && !compile_context.empty())
    compile_context.pop();
}

std::string& Adapter::user_metadata() {
  thread_local std::string metadata;
  return metadata;
}

void Adapter::annotate(const void* ptr, const std::string& metadata, TraceEntry::Action action) {
  cistern_block b{};
  if (!(mode.load() & kHistory) || lib.find(const_cast<void*>(ptr), &b) != CISTERN_OK)
    return;
  Call by = new_call(gather(cca::RecordContext::ALLOC), nullptr);
  by.metadata = metadata;
  add(action, static_cast<DeviceIndex>(b.device), b.addr, b.size, b.stream, {b.pool[0], b.pool[1]}, by);
}

Context Adapter::context_of(const void* ptr) {
  cistern_block b{};
  if (!(mode.load() & kHistory) || lib.find(const_cast<void*>(ptr), &b) != CISTERN_OK)
    return nullptr;
  const auto device = static_cast<DeviceIndex>(b.device);
  read(device);
  return block_context(device, b.addr);
}

void Adapter::attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) { add_observer(std::move(observer)); }

void Adapter::attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) {
  std::lock_guard<std::mutex> lock(history.mutex);
  const Trackers* const now = trackers();
  auto* const list = now != nullptr ? new Trackers(*now) : new Trackers;
  list->push_back(std::move(tracker));
  history.trackers = list;
  follow_all();
}

} // namespace cistern_torch
