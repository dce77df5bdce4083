// history.cpp: torch.cuda.memory._record_memory_history, and those who track segments.
//
// The library keeps the events, this file says who caused them. While history is on, a mutex is held over each call of the
// library and the reading of its events after it, so what was read happened on behalf of that call, or of somebody beside
// PyTorch. Stacks are gathered before, as the recorder may want the interpreter's lock; for the same reason the mutex is let go
// while the library calls a pool's upstream or callback.
#include "adapter.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <mutex>
#include <stack>
#include <unordered_map>

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
  bool on = false; // the library keeps events
  Ring<TraceEntry> trace;
  std::unordered_map<uint64_t, Live> live;
  std::unordered_map<uint64_t, SegmentNote> segments;
  // What was mapped already when somebody began to track, by the end of each range.
  std::map<uint64_t, std::pair<uint64_t, SegmentNote>> older;
  SegmentNote at(uint64_t addr) const {
    const auto it = segments.find(addr);
    if (it != segments.end())
      return it->second;
    const auto range = older.upper_bound(addr);
    return range != older.end() && range->second.first <= addr ? range->second.second : SegmentNote{};
  }
};

struct History {
  std::recursive_mutex mutex;
  std::atomic<bool> recording{false};
  std::atomic<cca::RecordContext> when{cca::RecordContext::NEVER};
  std::atomic<cca::CreateContextFn> recorder{nullptr};
  size_t max_entries = 1;
  uint32_t skipped = 0; // actions, as bits
  std::vector<cca::AllocatorTraceTracker> trackers;
  std::mutex annotations_mutex;
  Ring<c10::CachingDeviceAllocator::AnnotationEntry> annotations;
  Call* call = nullptr;
  DeviceHistory devices[kMaxDevices];
};
History& history = *new History; // never destroyed: stacks hold Python objects

thread_local int recorded = 0; // how often the calling thread holds the mutex as a Recorded
thread_local std::stack<std::string> compile_context;
thread_local std::string user_metadata;

// How many events the library keeps between two readings: more than one call makes.
constexpr size_t library_events = 1 << 16;

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

void set_time(c10::CachingDeviceAllocator::trace_time_* t, int64_t us) { t->t_ = static_cast<time_t>(us); }

TraceEntry make_entry(Action action, DeviceIndex device, uint64_t addr, uint64_t size, void* stream, MempoolId_t pool,
                      int64_t time, const Context& context) {
  const bool keep = history.when.load() >= cca::RecordContext::ALLOC;
  TraceEntry te(action, device, addr, size, stream, pool, 0, keep ? context : nullptr,
                compile_context.empty() ? "N/A" : compile_context.top(), user_metadata);
  set_time(&te.time_, time);
  return te;
}

void tell(const TraceEntry& te) {
  for (const auto& tracker : history.trackers) {
    try {
      tracker(te);
    } catch (const std::exception& e) {
      TORCH_WARN_ONCE("Cistern: a tracker of memory failed: ", e.what());
    } catch (...) {
      TORCH_WARN_ONCE("Cistern: a tracker of memory failed");
    }
  }
}

void keep(const TraceEntry& te) {
  if (history.recording && !(history.skipped >> te.action_ & 1))
    history.devices[te.device_].trace.add(te);
}

// note turns one event of the library into an entry. The caller holds the mutex.
void note(DeviceIndex device, const cistern_event& e) {
  DeviceHistory& d = history.devices[device];
  const void* const ptr = reinterpret_cast<void*>(e.addr);
  Call* const call = history.call;
  const Context caller = call != nullptr ? call->context : nullptr;
  Context context;
  Action action = TraceEntry::ALLOC;
  bool told = false; // trackers know already
  switch (e.kind) {
    case CISTERN_EVENT_ALLOC:
      for (Call* c = call; c != nullptr; c = c->outer)
        if (c->allocated == ptr || c->restored.count(e.addr) != 0)
          context = c->context;
      if (context)
        d.live[e.addr] = {context, nullptr};
      else
        d.live.erase(e.addr);
      break;
    case CISTERN_EVENT_FREE_REQUESTED: {
      action = TraceEntry::FREE_REQUESTED;
      const auto it = d.live.find(e.addr);
      if (it != d.live.end())
        context = it->second.taken;
      for (Call* c = call; c != nullptr; c = c->outer)
        if (c->freed == ptr && c->context) {
          context = c->context;
          d.live[e.addr].freed = context;
        }
      break;
    }
    case CISTERN_EVENT_FREE_COMPLETED: {
      action = TraceEntry::FREE_COMPLETED;
      const auto it = d.live.find(e.addr);
      if (it != d.live.end()) {
        context = it->second.freed ? it->second.freed : it->second.taken;
        d.live.erase(it);
      }
      break;
    }
    case CISTERN_EVENT_SEGMENT_ALLOC:
    case CISTERN_EVENT_SEGMENT_MAP:
      action = e.kind == CISTERN_EVENT_SEGMENT_MAP ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_ALLOC;
      context = caller;
      d.segments[e.addr] = {context, action == TraceEntry::SEGMENT_MAP, e.stream, {e.pool[0], e.pool[1]}};
      break;
    case CISTERN_EVENT_SEGMENT_FREE:
    case CISTERN_EVENT_SEGMENT_UNMAP: {
      action = e.kind == CISTERN_EVENT_SEGMENT_UNMAP ? TraceEntry::SEGMENT_UNMAP : TraceEntry::SEGMENT_FREE;
      context = caller;
      const auto it = d.segments.find(e.addr);
      if (it != d.segments.end()) {
        if (!context)
          context = it->second.context;
        d.segments.erase(it);
      }
      told = true; // before it happened
      break;
    }
    default:
      return; // out of memory is recorded where it is thrown: the library may fail a request that is then met elsewhere
  }
  const TraceEntry te =
      make_entry(action, device, e.addr, e.size, e.stream, {e.pool[0], e.pool[1]}, e.time_us, context);
  if (!told)
    tell(te);
  keep(te);
}

void drain(DeviceIndex device) {
  if (!history.devices[device].on)
    return;
  cistern_event events[64];
  size_t n = 0;
  do {
    n = 0;
    if (lib.history_drain(device, events, std::size(events), &n, nullptr) != CISTERN_OK)
      return;
    for (size_t i = 0; i < n; i++)
      note(device, events[i]);
  } while (n == std::size(events));
}

void drain_all() {
  for (int d = 0; d < device_count; d++)
    drain(static_cast<DeviceIndex>(d));
}

// Before memory of the device is unmapped. The library holds no lock.
extern "C" void before_unmap(void*, int device, void* addr, size_t size) {
  try {
    std::lock_guard<std::recursive_mutex> lock(history.mutex);
    drain(static_cast<DeviceIndex>(device)); // its mapping may be among what was not read yet
    const SegmentNote n = history.devices[device].at(reinterpret_cast<uint64_t>(addr));
    tell(make_entry(n.mapped ? TraceEntry::SEGMENT_UNMAP : TraceEntry::SEGMENT_FREE, static_cast<DeviceIndex>(device),
                    reinterpret_cast<uint64_t>(addr), size, n.stream, n.pool, now_us(), n.context));
  } catch (...) { // no memory for the entry
  }
}

// follow makes the library keep events of the device, or stop, as is wanted now. The caller holds the mutex.
void follow(DeviceIndex device) {
  DeviceHistory& d = history.devices[device];
  const bool wanted = history.recording || !history.trackers.empty();
  if (wanted != d.on) {
    check(lib.history(device, wanted ? library_events : 0));
    d.on = wanted;
  }
  if (!history.trackers.empty())
    check(lib.on_unmap(device, before_unmap, nullptr));
}

// remember notes what is mapped on the device now. The caller holds the mutex.
void remember(DeviceIndex device) {
  cistern_snapshot* snapshot = nullptr;
  check(lib.snapshot_take(device, nullptr, &snapshot));
  for (size_t i = 0; i < snapshot->num_segments; i++) {
    const cistern_segment& g = snapshot->segments[i];
    if (g.addr != 0)
      history.devices[device].older[g.addr + g.size] = {g.addr, {nullptr, g.expandable != 0, g.stream, {g.pool[0], g.pool[1]}}};
  }
  lib.snapshot_free(snapshot);
}

void follow_all() {
  for (int d = 0; d < device_count; d++)
    if (touched[d].load())
      follow(static_cast<DeviceIndex>(d));
  set_mode(kHistory, history.recording || !history.trackers.empty());
}

} // namespace

Context gather(cca::RecordContext level) {
  if (history.when.load() < level)
    return nullptr;
  const cca::CreateContextFn recorder = history.recorder.load();
  return recorder != nullptr ? recorder() : nullptr;
}

Recorded::Recorded(cca::RecordContext level) : Recorded(gather(level), nullptr) {}

Recorded::Recorded(Context context, void* freed) : call{std::move(context), freed}, on_(mode.load() & kHistory) {
  if (!on_)
    return;
  history.mutex.lock();
  recorded++;
  call.outer = history.call;
  history.call = &call;
}

Recorded::~Recorded() {
  if (!on_)
    return;
  drain_all();
  history.call = call.outer;
  recorded--;
  history.mutex.unlock();
}

Unrecorded::Unrecorded() : depth_(recorded) {
  if (depth_ == 0)
    return;
  drain_all();
  call_ = history.call;
  history.call = nullptr;
  recorded = 0;
  for (int i = 0; i < depth_; i++)
    history.mutex.unlock();
}

Unrecorded::~Unrecorded() {
  if (depth_ == 0)
    return;
  for (int i = 0; i < depth_; i++)
    history.mutex.lock();
  drain_all();
  recorded = depth_;
  history.call = call_;
}

int take_recorded(const Request& r, const Context& context, void** out) {
  Recorded recorded(context, nullptr);
  const int code = take_from_library(r, out);
  recorded.call.allocated = *out;
  return code;
}

int release_recorded(void* ptr) {
  Recorded recorded(gather(cca::RecordContext::ALL), ptr);
  return lib.release(ptr);
}

void history_touch(DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  if (history.recording || !history.trackers.empty())
    follow(device);
}

void record_oom(const Request& r, size_t device_free, const Context& context) {
  if (!(mode.load() & kHistory))
    return;
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  constexpr size_t unit = 512; // PyTorch records the rounded size here
  const TraceEntry te = make_entry(TraceEntry::OOM, r.device, device_free, (r.size + unit - 1) / unit * unit, r.stream,
                                   r.pool, now_us(), context);
  tell(te);
  keep(te);
}

void record_snapshot(DeviceIndex device, size_t active, MempoolId_t pool) {
  if (!(mode.load() & kHistory))
    return;
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  const TraceEntry te = make_entry(TraceEntry::SNAPSHOT, device, 0, active, nullptr, pool, now_us(), nullptr);
  tell(te);
  keep(te);
}

void copy_traces(cca::SnapshotInfo* out) {
  {
    std::lock_guard<std::mutex> lock(history.annotations_mutex);
    history.annotations.copy_to(&out->external_annotations);
  }
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  drain_all();
  for (int d = 0; d < device_count; d++) {
    out->device_traces.emplace_back();
    history.devices[d].trace.copy_to(&out->device_traces.back());
  }
}

Context block_context(DeviceIndex device, uint64_t addr) {
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  const auto& live = history.devices[device].live;
  const auto it = live.find(addr);
  return it != live.end() ? it->second.taken : nullptr;
}

Context segment_context(DeviceIndex device, uint64_t addr) {
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  const auto& segments = history.devices[device].segments;
  const auto it = segments.find(addr);
  return it != segments.end() ? it->second.context : nullptr;
}

bool Adapter::isHistoryEnabled() { return history.recording; }

void Adapter::recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries, cca::RecordContext when,
                            bool clear, const std::vector<std::string>& skip_actions) {
  TORCH_CHECK(when == cca::RecordContext::NEVER || recorder != nullptr, "expected a recorder of contexts");
  uint32_t skipped = 0;
  for (const std::string& s : skip_actions)
    skipped |= 1u << c10::CachingDeviceAllocator::parseTraceEntryAction(s);
  {
    std::lock_guard<std::mutex> lock(history.annotations_mutex);
    history.annotations.limit(max_entries);
    if (!enabled || clear)
      history.annotations.clear();
  }
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  history.recording = enabled;
  history.recorder = enabled ? recorder : nullptr;
  history.when = enabled ? when : cca::RecordContext::NEVER;
  history.skipped = skipped;
  for (DeviceHistory& d : history.devices) {
    d.trace.limit(max_entries);
    if (!enabled || clear)
      d.trace.clear();
    if (!enabled) {
      // Releases are not seen from now on, so a stack could be taken for that of the next block at its address.
      d.live.clear();
      if (history.trackers.empty())
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
  c10::CachingDeviceAllocator::AnnotationEntry entry(device, 0);
  set_time(&entry.time_, now_us());
  for (const auto& [name, value] : md)
    entry.recordUserMetadata(name, value);
  std::lock_guard<std::mutex> lock(history.annotations_mutex);
  history.annotations.add(std::move(entry));
}

void Adapter::pushCompileContext(std::string& md) {
  if (history.recording)
    compile_context.push(md);
}

void Adapter::popCompileContext() {
  if (history.recording && !compile_context.empty())
    compile_context.pop();
}

void Adapter::setUserMetadata(const std::string& metadata) { user_metadata = metadata; }

std::string Adapter::getUserMetadata() { return user_metadata; }

void Adapter::attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) { add_observer(std::move(observer)); }

void Adapter::attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) {
  std::lock_guard<std::recursive_mutex> lock(history.mutex);
  if (history.trackers.empty())
    for (int d = 0; d < device_count; d++)
      if (touched[d].load())
        remember(static_cast<DeviceIndex>(d));
  history.trackers.push_back(std::move(tracker));
  follow_all();
}

} // namespace cistern_torch
