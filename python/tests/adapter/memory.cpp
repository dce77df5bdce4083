// memory.cpp: allocations, statistics, limits, out of memory, and memory without a cache.
#include "check.h"

#include <torch/version.h>

namespace {

// Puts an allocator into c10's table with the priority that it takes there: PyTorch's own has 0, from 2.12 on 1.
void put(c10::Allocator* a) {
  for (uint8_t priority = 0; priority < 9; priority++)
    c10::SetAllocator(c10::DeviceType::CUDA, a, priority);
}

// torch.accelerator looks for the allocator in a table of c10's, where a later one of the program's takes the place of the adapter.
void registered() {
  constexpr auto cuda = c10::DeviceType::CUDA;
  CHECK(c10::GetAllocator(cuda) == cca::get());
  auto* const later = reinterpret_cast<c10::Allocator*>(8);
  auto* replaced = function<void()>("cistern_torch_replaced");
  put(later);
  CHECK(c10::GetAllocator(cuda) == later);
  replaced();
  CHECK(c10::GetAllocator(cuda) == later);
  put(cca::get());
  replaced(); // by torch.cuda.memory.change_current_allocator: then it is as PyTorch alone has it
  CHECK(c10::GetAllocator(cuda) != cca::get() && c10::GetAllocator(cuda) != later);
  put(cca::get());
}

void before_cuda() {
  registered();
  auto* started = function<int()>("cistern_torch_started");
  CHECK(started() == 0 && !cca::get()->initialized());
  THROWS(c10::Error, "did you call init", cca::raw_alloc(10));
  cca::emptyCache();
  CHECK(cca::snapshot().segments.empty());
  cca::init(2);
  CHECK(started() == 1 && cca::get()->initialized());
#if TORCH_VERSION_MINOR >= 9
  CHECK(c10::getDeviceAllocator(c10::DeviceType::CUDA) == cca::get()); // torch.accelerator looks there
#endif
  CHECK(strcmp(function<const char*()>("cistern_torch_abi")(), TORCH_VERSION) == 0);
}

void allocations() {
  CHECK(cca::raw_alloc(0) == nullptr && cca::raw_alloc_with_stream(0, nullptr) == nullptr);
  cca::raw_delete(nullptr);
  void* p = cca::raw_alloc(1000);
  CHECK(stats().allocated_bytes[0].current == 1024 && stats().requested_bytes[0].current == 1000);
  CHECK(stats(1).reserved_bytes[0].current == 0);
  size_t size = 0;
  THROWS(c10::Error, "lies in mapped chunks", cca::getBaseAllocation(p, &size)); // as PyTorch with expandable segments
  cca::raw_delete(p);
  THROWS(c10::Error, "invalid device pointer", cca::raw_delete(p));
  THROWS(c10::Error, "invalid device pointer", cca::getBaseAllocation(reinterpret_cast<void*>(64), nullptr));
  for (const size_t n : {size_t(1) << 60, size_t(1) << 61, size_t(1) << 63, ~size_t(0)}) {
    THROWS(c10::OutOfMemoryError, "more than 1EB", cca::get()->allocate(n));
    THROWS(c10::OutOfMemoryError, "more than 1EB", cca::raw_alloc(n));
    THROWS(c10::OutOfMemoryError, "more than 1EB", cca::raw_alloc_with_stream(n, nullptr));
  }
  {
    // One deleter, whatever the size: PyTorch compares it.
    c10::DataPtr d = cca::get()->allocate(5 * MiB), none = cca::get()->allocate(0);
    CHECK(d.get() != nullptr && none.get() == nullptr);
    CHECK(d.get_deleter() == cca::get()->raw_deleter() && none.get_deleter() == d.get_deleter());
    cca::recordStream(d, some_stream());
    cca::recordStream(none, some_stream());
    cca::recordStream(c10::DataPtr(), some_stream());
    c10::DataPtr theirs(d.get(), d.get(), [](void*) {}, d.device());
    cca::recordStream(theirs, some_stream());
    CHECK(stats().allocation[0].current == 1);
  }
  CHECK(stats().allocation[0].current == 0);
  {
    c10::cuda::CUDAGuard other(1);
    p = cca::raw_alloc(MiB);
    CHECK(stats(1).allocated_bytes[0].current == MiB && stats().allocated_bytes[0].current == 0);
    cca::raw_delete(p);
  }
  cca::raw_delete(cca::raw_alloc_with_stream(MiB, reinterpret_cast<cudaStream_t>(0x4440))); // a stream of another library
  THROWS(c10::Error, "did you call init", stats(7));
  CHECK(cca::memcpyAsync(nullptr, 0, nullptr, 0, 1, nullptr, false) == cudaSuccess && test_peer_copies == 0);
  CHECK(cca::memcpyAsync(nullptr, 0, nullptr, 1, 1, nullptr, false) == cudaSuccess && test_peer_copies == 1);
}

// PyTorch says that there is access before it has it enabled: copies wait for it, and do without where it is not available.
void peers() {
  const int before = test_peer_copies;
  auto copy = [](int to, int from) { return cca::memcpyAsync(nullptr, to, nullptr, from, 1, nullptr, true); };
  CHECK(test_peers == 0);
  test_peer_fails = 1;
  CHECK(copy(1, 0) == cudaSuccess && test_peers == 0 && test_peer_copies == before + 1);
  THROWS(c10::Error, "", cca::get()->enablePeerAccess(0, 1));
  test_peer_fails = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; i++)
    threads.emplace_back([&, i] {
      if (i % 4 == 0)
        cca::get()->enablePeerAccess(0, 1);
      CHECK(copy(1, 0) == cudaSuccess);
    });
  for (std::thread& t : threads)
    t.join();
  CHECK(test_peers == 1 && test_peer_copies == before + 1);
  CHECK(copy(0, 1) == cudaSuccess && test_peers == 2 && test_peer_copies == before + 1); // the other way is another matter
  c10::DeviceIndex now = -1;
  CHECK(c10::cuda::GetDevice(&now) == cudaSuccess && now == 0);
}

void out_of_memory() {
  cca::emptyCache();
  int observed = 0;
  cca::attachOutOfMemoryObserver([&](int64_t device, size_t size, size_t total, size_t) {
    observed++;
    CHECK(device == 0 && size > 2 * GiB && total <= 8 * GiB);
  });
  OUT_OF_MEMORY(cca::raw_alloc(100 * GiB));
  THROWS(c10::OutOfMemoryError, "GPU 0 has a total capacity of 8.00 GiB of which ", cca::raw_alloc(100 * GiB));
  THROWS(c10::OutOfMemoryError, " is reserved by PyTorch but unallocated.\nCistern: allocated: ", cca::raw_alloc(100 * GiB));
  CHECK(observed == 3 && stats().num_ooms == 3);

  cca::emptyCache();
  CHECK(cca::getMemoryFraction(0) == 1.0);
  cca::setMemoryFraction(0.25, 0);
  CHECK(cca::getMemoryFraction(0) == 0.25);
  THROWS(c10::OutOfMemoryError, "2.00 GiB allowed; ", cca::raw_alloc(3 * GiB));
  cca::raw_delete(cca::raw_alloc(GiB));
  cca::setMemoryFraction(1.0, 0);
  CHECK(cca::getMemoryFraction(0) == 1.0);
  cca::raw_delete(cca::raw_alloc(3 * GiB));
  THROWS(c10::Error, "invalid fraction", cca::setMemoryFraction(1.5, 0));
  size_t largest = 1;
  cca::cacheInfo(0, &largest);
  CHECK(largest >= 3 * GiB);

  CHECK(reserved() >= int64_t(3 * GiB) && stats().max_split_size == -1);
  cca::emptyCache();
  CHECK(reserved() == 0 && stats().reserved_bytes[0].peak > 0);
  cca::resetPeakStats(0);
  cca::resetAccumulatedStats(0);
  CHECK(stats().reserved_bytes[0].peak == 0 && stats().num_ooms == 0 && stats().allocation[0].allocated == 0);

  // Caught again and again, it leaks nothing.
  for (int i = 0; i < 200; i++) {
    void* a = cca::raw_alloc(4 * GiB);
    OUT_OF_MEMORY(cca::raw_alloc(5 * GiB));
    cca::raw_delete(a);
  }
  cca::emptyCache();
  CHECK(reserved() == 0 && stats().num_ooms == 200);
}

void* hoard;
int asked;
struct Hoarder : c10::FreeMemoryCallback {
  bool Execute() override {
    asked++;
    const bool had = hoard != nullptr;
    cca::raw_delete(hoard);
    hoard = nullptr;
    return had;
  }
};
struct Thrower : c10::FreeMemoryCallback {
  bool Execute() override { throw std::runtime_error("a callback that fails"); }
};

void callbacks() {
  hoard = cca::raw_alloc(6 * GiB);
  void* p = cca::raw_alloc(5 * GiB); // fits only after what the callback frees
  CHECK(p != nullptr && asked > 0 && hoard == nullptr);
  cca::raw_delete(p);
}

struct Profiler : c10::MemoryReportingInfoBase {
  int64_t sum = 0, failed = 0;
  size_t allocated = 0, reserved = 0;
  void reportMemoryUsage(void*, int64_t size, size_t a, size_t r, c10::Device) override {
    sum += size;
    allocated = a;
    reserved = r;
  }
  void reportOutOfMemory(int64_t size, size_t, size_t, c10::Device) override { failed = size; }
  bool memoryProfilingEnabled() const override { return true; }
};

void profiled() {
  auto profiler = std::make_shared<Profiler>();
  c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, profiler);
  void* p = cca::raw_alloc(1000);
  CHECK(profiler->sum == 1024 && profiler->allocated == 1024 && profiler->reserved >= 1024);
  cca::raw_delete(p);
  CHECK(profiler->sum == 0 && profiler->allocated == 0);
  OUT_OF_MEMORY(cca::raw_alloc(50 * GiB));
  CHECK(profiler->failed == int64_t(50 * GiB));
}

void without_cache() {
  cca::get()->enable(false);
  CHECK(!cca::get()->isEnabled());
  void* p = cca::raw_alloc(100);
  c10::DataPtr d = cca::get()->allocate(100);
  CHECK(test_mallocs == 2 && stats().allocation[0].current == 0);
  cca::recordStream(d, some_stream());
  cca::get()->enable(true);
  void* q = cca::raw_alloc(100);
  CHECK(test_mallocs == 2 && stats().allocation[0].current == 1);
  for (void* each : {p, q})
    cca::raw_delete(each); // each goes where it came from
  d.clear();
  CHECK(stats().allocation[0].current == 0);
  THROWS(c10::Error, "invalid device pointer", cca::raw_delete(p));
}

void settings() {
  auto* of = function<const char*(const char*)>("cistern_torch_settings_of");
  const std::string said =
      of("max_split_size_mb:128, roundup_power2_divisions:[256:1,512:2], pinned_num_register_threads:2,odd:1");
  for (const char* part : {"max_split_size_mb:128: no effect", "roundup_power2_divisions:[256:1,512:2]: no effect",
                           "pinned_num_register_threads:2: honoured", "odd:1: unknown"})
    CHECK(said.find(part) != std::string::npos);
  CHECK(strlen(of("")) == 0);
}

} // namespace

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("a_thrower", Thrower);
REGISTER_FREE_MEMORY_CALLBACK("hoarder", Hoarder);
REGISTER_FREE_MEMORY_CALLBACK("z_thrower", Thrower);
} // namespace c10

int main(int, char** argv) {
  install(argv);
  before_cuda();
  allocations();
  peers();
  out_of_memory();
  callbacks();
  profiled();
  without_cache();
  settings();
  return done();
}
