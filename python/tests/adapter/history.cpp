// history.cpp: what is recorded, its cause, and trackers of segments.
#include "check.h"

#include <map>

namespace {

using Entry = cca::TraceEntry;

// A stack is a number here.
struct Stack : c10::GatheredContext {
  int number;
  explicit Stack(int n) : number(n) {}
};
int stacks;
std::shared_ptr<c10::GatheredContext> gather() { return std::make_shared<Stack>(++stacks); }
int number(const std::shared_ptr<c10::GatheredContext>& c) { return c ? static_cast<const Stack*>(c.get())->number : 0; }

void record(cca::RecordContext when, size_t entries = 1000, std::vector<std::string> skip = {}, bool clear = true) {
  cca::recordHistory(true, gather, entries, when, clear, skip);
}
std::vector<Entry> trace() { return cca::snapshot().device_traces[0]; }
int count(const std::vector<Entry>& entries, Entry::Action action) {
  int n = 0;
  for (const Entry& e : entries)
    n += e.action_ == action;
  return n;
}
// The stack that the snapshot has for the block at p, -1 where there is no such block.
int block_stack(void* p) {
  for (const auto& s : cca::snapshot().segments) {
    size_t at = s.address;
    for (const auto& b : s.blocks) {
      if (at == reinterpret_cast<size_t>(p) && b.allocated)
        return number(b.context_when_allocated);
      at += b.size;
    }
  }
  return -1;
}

bool described([[maybe_unused]] const Entry& e, [[maybe_unused]] const std::string& compiled,
               [[maybe_unused]] const std::string& metadata) {
#if CISTERN_TORCH_COMPILE_CONTEXT
  if (e.compile_context_ != compiled)
    return false;
#endif
#if CISTERN_TORCH_USER_METADATA
  if (e.user_metadata_ != metadata)
    return false;
#endif
  return true;
}

void events() {
  void* before = cca::raw_alloc(100);
  CHECK(!cca::isHistoryEnabled());
  THROWS(c10::Error, "recorder", cca::recordHistory(true, nullptr, 10, cca::RecordContext::ALL, false, {}));
#if CISTERN_TORCH_HISTORY_SKIP
  THROWS(c10::Error, "nonsense", record(cca::RecordContext::ALL, 10, {"nonsense"}));
#endif
  CHECK(!cca::isHistoryEnabled());
  record(cca::RecordContext::ALL);
  CHECK(cca::isHistoryEnabled());

  std::string region = "a compiled region";
  cca::setUserMetadata("metadata");
  cca::pushCompileContext(region);
  void* p = cca::raw_alloc(1000); // stack 1
  cca::popCompileContext();
  cca::setUserMetadata("");
  void* q = cca::raw_alloc(3 * MiB); // stack 2
  cca::raw_delete(before);           // stack 3
  cca::raw_delete(p);                // stack 4
  {
    c10::DataPtr d = cca::get()->allocate(5 * MiB); // stack 5
    cca::recordStream(d, some_stream());
  } // stack 6
  OUT_OF_MEMORY(cca::raw_alloc(100 * GiB)); // stack 7
  cca::emptyCache();                        // stack 8
  const std::vector<Entry> entries = trace();
  CHECK(count(entries, Entry::ALLOC) == 3 && count(entries, Entry::FREE_REQUESTED) == 3);
  CHECK(count(entries, Entry::FREE_COMPLETED) == 3 && count(entries, Entry::OOM) == 1);
  CHECK(count(entries, Entry::SEGMENT_MAP) > 0 && count(entries, Entry::SEGMENT_UNMAP) > 0);
  time_t last = 0;
  for (const Entry& e : entries) {
    CHECK(e.time_.t_ >= last);
    last = e.time_.t_;
    const bool of_p = e.addr_ == reinterpret_cast<size_t>(p), of_q = e.addr_ == reinterpret_cast<size_t>(q);
    if (e.action_ == Entry::ALLOC && of_p)
      CHECK(e.size_ == 1000 && number(e.context_) == 1 && described(e, region, "metadata"));
    if (e.action_ == Entry::ALLOC && of_q)
      CHECK(e.size_ == 3 * MiB && number(e.context_) == 2 && described(e, "N/A", ""));
    if (e.action_ == Entry::FREE_REQUESTED && e.size_ == 100)
      CHECK(number(e.context_) == 3);
    if (e.action_ == Entry::FREE_COMPLETED && of_p)
      CHECK(number(e.context_) == 4);
    if (e.action_ == Entry::FREE_COMPLETED && e.size_ == 5 * MiB)
      CHECK(number(e.context_) == 6); // of the release, which completed when its other stream was done
    if (e.action_ == Entry::OOM)
      CHECK(e.size_ == 100 * GiB && number(e.context_) == 7);
  }
  CHECK(block_stack(q) == 2);
  CHECK(count(trace(), Entry::SNAPSHOT) > 0);
#if CISTERN_TORCH_SNAPSHOT_TRACES
  CHECK(cca::snapshot({0, 0}, false).device_traces.empty());
#endif
#if CISTERN_TORCH_ANNOTATE
  CHECK(cca::get()->supportsUserMetadata());
  cca::get()->annotateMemory(q, "of a late note");
  cca::get()->annotateMemory(p, "of nothing that lives");
  const std::vector<Entry> noted = trace();
  CHECK(count(noted, Entry::ANNOTATE) == 1);
  for (const Entry& e : noted)
    if (e.action_ == Entry::ANNOTATE)
      CHECK(e.addr_ == reinterpret_cast<size_t>(q) && e.size_ == 3 * MiB && described(e, "N/A", "of a late note"));
#endif
#if CISTERN_TORCH_POINTER_CONTEXT
  CHECK(number(cca::getContextForPointer(q)) == 2 && cca::getContextForPointer(p) == nullptr);
#endif
  cca::get()->recordAnnotation({{"name", "a step"}});
  const auto annotations = cca::snapshot().external_annotations;
  CHECK(annotations.size() == 1 && annotations[0].metadata_.at("name") == "a step");
  cca::raw_delete(q);
}

void levels() {
  using Level = cca::RecordContext;
  for (const Level when : {Level::NEVER, Level::STATE, Level::ALLOC, Level::ALL}) {
    record(when, 1000, {"snapshot"});
    void *held = cca::raw_alloc(MiB), *gone = cca::raw_alloc(2 * MiB);
    cca::raw_delete(gone);
    CHECK((block_stack(held) > 0) == (when >= cca::RecordContext::STATE));
    int of_alloc = 0, of_free = 0;
    for (const Entry& e : trace()) {
      CHECK(e.action_ != Entry::SNAPSHOT || !CISTERN_TORCH_HISTORY_SKIP);
      if (e.action_ == Entry::ALLOC && e.size_ == 2 * MiB)
        of_alloc = number(e.context_);
      if (e.action_ == Entry::FREE_REQUESTED && e.size_ == 2 * MiB)
        of_free = number(e.context_);
    }
    CHECK((of_alloc > 0) == (when >= cca::RecordContext::ALLOC));
    // Where releases have no stack of their own, they have that of the allocation.
    CHECK(when == cca::RecordContext::ALL ? of_free > of_alloc : of_free == of_alloc);
    cca::raw_delete(held);
  }
  cca::recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, false, {});
  CHECK(!cca::isHistoryEnabled() && trace().empty());
}

[[maybe_unused]] void ring() {
  record(cca::RecordContext::NEVER, 5, {"snapshot"});
  for (size_t i = 1; i <= 100; i++)
    cca::raw_delete(cca::raw_alloc(512 * i));
  CHECK(trace().size() == 5 && trace().back().action_ == Entry::FREE_COMPLETED && trace().back().size_ == 51200);
  record(cca::RecordContext::NEVER, 7, {"snapshot"}, false); // longer, with what is in it
  void* p = cca::raw_alloc(77);
  CHECK(trace().size() == 6 && trace().back().size_ == 77 && trace()[4].size_ == 51200);
  cca::raw_delete(p);
  CHECK(trace().size() == 7 && trace().back().size_ == 77);
}

// The recorder takes the interpreter's lock, which another thread may hold while it allocates.
std::mutex interpreter;
std::shared_ptr<c10::GatheredContext> gather_locked() {
  std::lock_guard<std::mutex> lock(interpreter);
  return std::make_shared<Stack>(1);
}
void threads() {
  cca::recordHistory(true, gather_locked, 2000, cca::RecordContext::ALL, true, {});
  auto work = [] {
    c10::cuda::CUDAStreamGuard guard(some_stream());
    for (size_t i = 0; i < 3000; i++) {
      void* p = cca::raw_alloc(1 + 1000 * (i % 50));
      std::unique_lock<std::mutex> lock(interpreter);
      lock.unlock();
      cca::raw_delete(p);
    }
  };
  std::thread a(work), b(work);
  a.join();
  b.join();
  const std::vector<Entry> entries = trace();
  CHECK(entries.size() == 2000);
  std::map<size_t, bool> live;
  for (const Entry& e : entries) {
    if (e.action_ == Entry::ALLOC) {
      CHECK(!live[e.addr_]);
      live[e.addr_] = true;
    }
    if (e.action_ == Entry::FREE_COMPLETED)
      live[e.addr_] = false;
  }
  cca::recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, true, {});
}

// What a tracker registered, as NCCL would.
std::map<size_t, size_t> registered;
int undone;
size_t older_begin, older_end, older_gone;
void track(const Entry& e) {
  if (e.action_ == Entry::SEGMENT_MAP || e.action_ == Entry::SEGMENT_ALLOC) {
    CHECK(registered.count(e.addr_) == 0);
    registered[e.addr_] = e.size_;
  }
  if (e.action_ == Entry::SEGMENT_UNMAP || e.action_ == Entry::SEGMENT_FREE) {
    undone++;
    if (e.addr_ >= older_begin && e.addr_ < older_end) { // mapped before tracking began
      CHECK(cca::is_of(e, {0, 2}));
      older_gone += e.size_;
      return;
    }
    CHECK(registered.count(e.addr_) == 1 && registered[e.addr_] == e.size_);
    CHECK(cca::is_of(e, {0, 0}) || cca::is_of(e, {0, 1}));
    registered.erase(e.addr_);
  }
}
size_t sum() {
  size_t n = 0;
  for (const auto& [addr, size] : registered)
    n += size;
  return n;
}
void trackers() {
  cca::emptyCache();
  CHECK(reserved() == 0);
  const Pool old{0, 2};
  cca::createOrIncrefPool(0, old);
  cca::beginAllocateToPool(0, old, this_thread());
  cca::raw_delete(cca::raw_alloc(20 * MiB));
  cca::endAllocateToPool(0, old);
  cca::releasePool(0, old);
  const auto mapped = cca::snapshot(old).segments;
  CHECK(mapped.size() == 1);
  older_begin = mapped[0].address;
  older_end = older_begin + mapped[0].total_size;
  cca::attachAllocatorTraceTracker(track);
#if CISTERN_TORCH_EMPTY_POOL
  cca::emptyCache(old);
  CHECK(older_gone == older_end - older_begin);
#endif
  cca::releasePool(0, old); // or its end empties it
  CHECK(older_gone == older_end - older_begin);
  older_begin = older_end = undone = 0;
  cca::attachAllocatorTraceTracker([](const Entry&) { throw std::runtime_error("a tracker that fails"); });
  void* p = cca::raw_alloc(100 * MiB);
  CHECK(sum() == size_t(reserved()) && sum() >= 100 * MiB);
  cca::raw_delete(p);
  CHECK(undone == 0);
  cca::raw_delete(cca::raw_alloc(7 * GiB)); // what is registered does not move
  CHECK(sum() == size_t(reserved()));
  const Pool id{0, 1};
  cca::createOrIncrefPool(0, id);
  cca::setNoSplit(0, id);
  cca::beginAllocateToPool(0, id, this_thread());
  cca::raw_delete(cca::raw_alloc(3 * MiB));
  CHECK(sum() == size_t(reserved()));
  // The memory of a pool that lives stays registered, as PyTorch's own allocator has it: to register it is the same on all ranks,
  // to empty a cache is not.
  p = cca::raw_alloc(5 * MiB);
  size_t of_pool = 0;
  for (const auto& s : cca::snapshot(id).segments)
    of_pool += s.total_size;
  undone = 0;
  cca::emptyCache();
  CHECK(of_pool > 5 * MiB && sum() == of_pool && size_t(reserved()) == of_pool && undone > 0);
  cca::endAllocateToPool(0, id);
  undone = 0;
  cca::emptyCache();
  CHECK(sum() == of_pool && undone == 0);
  cca::releasePool(0, id);
  cca::releasePool(0, id);
  // Its end gives back what is free of it, and emptying the cache what becomes free.
  CHECK((sum() < of_pool || !CISTERN_TORCH_NO_SPLIT) && sum() >= 5 * MiB);
  cca::raw_delete(p);
  cca::emptyCache();
  CHECK(registered.empty() && reserved() == 0);
}

} // namespace

int main(int, char** argv) {
  install(argv);
  cca::init(2);
  events();
  levels();
#if CISTERN_TORCH_HISTORY_SKIP // else the entries of snapshots are among those that are counted
  ring();
#endif
  threads();
  trackers();
  return done();
}
