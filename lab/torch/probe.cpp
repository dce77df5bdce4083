// What the tests need from PyTorch's C++ interface that Python does not offer: trace trackers, observers of out of memory,
// free-memory callbacks, and allocators for a MemPool. Plain C functions, called by ctypes; each that can fail returns
// nullptr or the words of the failure.
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace ca = c10::cuda::CUDACachingAllocator;
using Entry = ca::TraceEntry;

namespace {
thread_local std::string words;

template <class F> const char *guarded(F f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception &e) {
    words = e.what();
    return words.c_str();
  }
}

std::atomic<int64_t> trackedCount[16], trackedBytes[16];
std::mutex rangesMutex;
std::map<uint64_t, uint64_t> ranges; // what a tracker would have registered: segments by address
std::atomic<int64_t> unannounced;    // unmaps of what was not announced as mapped

std::atomic<int64_t> oomCount, oomAllocated, oomTotal, oomFree;

std::atomic<int64_t> callbackRuns;
std::atomic<void *> held; // freed by the callback
struct Callback : c10::FreeMemoryCallback {
  bool Execute() override {
    callbackRuns++;
    if (void *p = held.exchange(nullptr)) {
      ca::raw_delete(p);
      return true;
    }
    return false;
  }
};

struct Custom {
  std::mutex mutex;
  std::map<void *, size_t> live;
  int64_t allocs = 0, frees = 0, wrong = 0;
};
Custom customs[2];

void *customAlloc(Custom &c, size_t n, int device) {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  void *p = nullptr;
  if (cudaMalloc(&p, n) != cudaSuccess) {
    cudaGetLastError();
    p = nullptr;
  }
  cudaSetDevice(before);
  std::lock_guard<std::mutex> l(c.mutex);
  if (p) {
    c.allocs++;
    c.live[p] = n;
  }
  return p;
}

void customFree(Custom &c, void *p, size_t n) {
  {
    std::lock_guard<std::mutex> l(c.mutex);
    auto it = c.live.find(p);
    c.frees++;
    if (it == c.live.end() || (n != 0 && it->second != n)) {
      c.wrong++; // other memory, or in pieces
      return;
    }
    c.live.erase(it);
  }
  cudaFree(p);
}
} // namespace

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("cistern_probe", Callback);
}

extern "C" {
const char *probe_track() {
  return guarded([] {
    ca::attachAllocatorTraceTracker([](const Entry &e) {
      int a = (int)e.action_;
      if (a < 0 || a >= 16) return;
      trackedCount[a]++;
      trackedBytes[a] += (int64_t)e.size_;
      std::lock_guard<std::mutex> l(rangesMutex);
      if (a == Entry::SEGMENT_ALLOC || a == Entry::SEGMENT_MAP) {
        ranges[(uint64_t)e.addr_] = e.size_;
      } else if (a == Entry::SEGMENT_FREE || a == Entry::SEGMENT_UNMAP) {
        uint64_t from = e.addr_, to = from + e.size_;
        bool any = false;
        for (auto it = ranges.begin(); it != ranges.end();) {
          if (it->first < to && it->first + it->second > from) {
            any = true;
            uint64_t f = it->first, t = f + it->second;
            it = ranges.erase(it);
            if (f < from) ranges[f] = from - f;
            if (t > to) ranges[to] = t - to;
          } else {
            ++it;
          }
        }
        if (!any) unannounced++;
      }
    });
  });
}
int64_t probe_tracked(int action) { return trackedCount[action]; }
int64_t probe_tracked_bytes(int action) { return trackedBytes[action]; }
int64_t probe_unannounced() { return unannounced; }
// Whether all of [addr, addr+size) lies in ranges that a tracker was notified of.
int probe_known(uint64_t addr, uint64_t size) {
  std::lock_guard<std::mutex> l(rangesMutex);
  uint64_t at = addr, end = addr + size;
  while (at < end) {
    auto it = ranges.upper_bound(at);
    if (it == ranges.begin()) return 0;
    --it;
    if (it->first + it->second <= at) return 0;
    at = it->first + it->second;
  }
  return 1;
}

const char *probe_observe_oom() {
  return guarded([] {
    ca::attachOutOfMemoryObserver([](int64_t, size_t allocated, size_t total, size_t free) {
      oomCount++;
      oomAllocated = (int64_t)allocated;
      oomTotal = (int64_t)total;
      oomFree = (int64_t)free;
    });
  });
}
int64_t probe_ooms() { return oomCount; }
int64_t probe_oom_allocated() { return oomAllocated; }
int64_t probe_oom_total() { return oomTotal; }
int64_t probe_oom_free() { return oomFree; }

int64_t probe_callback_runs() { return callbackRuns; }
const char *probe_hold(size_t n) {
  return guarded([&] { held = ca::raw_alloc(n); });
}

const char *probe_raw_alloc(size_t n, void **out) {
  return guarded([&] { *out = ca::raw_alloc(n); });
}
const char *probe_raw_alloc_stream(size_t n, void *stream, void **out) {
  return guarded([&] { *out = ca::raw_alloc_with_stream(n, (cudaStream_t)stream); });
}
const char *probe_raw_delete(void *p) {
  return guarded([&] { ca::raw_delete(p); });
}
const char *probe_base(void *p, void **base, size_t *size) {
  return guarded([&] { *base = ca::getBaseAllocation(p, size); });
}
const char *probe_cache_info(int device, size_t *largest) {
  return guarded([&] { ca::cacheInfo((c10::DeviceIndex)device, largest); });
}
const char *probe_pool_use_count(int device, uint64_t a, uint64_t b, int *out) {
  return guarded([&] { *out = ca::getPoolUseCount((c10::DeviceIndex)device, {a, b}); });
}
const char *probe_expandable_sizes(int device, int64_t *n) {
  return guarded([&] { *n = (int64_t)ca::getExpandableSegmentSizes((c10::DeviceIndex)device).size(); });
}
const char *probe_compile_context(const char *text) {
  return guarded([&] {
    if (text) {
      std::string s = text;
      ca::get()->pushCompileContext(s);
    } else {
      ca::get()->popCompileContext();
    }
  });
}
const char *probe_empty_cache_of(uint64_t a, uint64_t b) {
  return guarded([&] { ca::emptyCache({a, b}); });
}
const char *probe_name() {
  const char *bad = guarded([] { words = ca::name(); });
  return bad ? bad : words.c_str();
}

void *probe_custom_alloc_0(size_t n, int device, void *) { return customAlloc(customs[0], n, device); }
void *probe_custom_alloc_1(size_t n, int device, void *) { return customAlloc(customs[1], n, device); }
// One that gives memory once and throws from then on.
void *probe_custom_alloc_once(size_t n, int device, void *) {
  static std::atomic<int> asked{0};
  if (asked++ > 0) throw std::runtime_error("an allocator that fails");
  return customAlloc(customs[0], n, device);
}
void probe_custom_free_0(void *p, size_t n, int, void *) { customFree(customs[0], p, n); }
void probe_custom_free_1(void *p, size_t n, int, void *) { customFree(customs[1], p, n); }
int64_t probe_custom(int which, int what) {
  Custom &c = customs[which];
  std::lock_guard<std::mutex> l(c.mutex);
  return what == 0 ? c.allocs : what == 1 ? c.frees : what == 2 ? c.wrong : (int64_t)c.live.size();
}
// Whether the address lies in memory of that custom allocator.
int probe_custom_owns(int which, uint64_t addr) {
  Custom &c = customs[which];
  std::lock_guard<std::mutex> l(c.mutex);
  for (auto &it : c.live)
    if (addr >= (uint64_t)it.first && addr < (uint64_t)it.first + it.second) return 1;
  return 0;
}

// The runtime's calls, for tests of an address.
int probe_ipc_get(void *p) {
  cudaIpcMemHandle_t h;
  cudaError_t e = cudaIpcGetMemHandle(&h, p);
  cudaGetLastError();
  return (int)e;
}
int probe_stream_create(void **out) { return (int)cudaStreamCreateWithFlags((cudaStream_t *)out, cudaStreamNonBlocking); }
int probe_stream_destroy(void *s) { return (int)cudaStreamDestroy((cudaStream_t)s); }
}
