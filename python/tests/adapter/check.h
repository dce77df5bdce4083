// check.h: what the tests of the adapter share. Each is a program that runs it under the real libc10 and libc10_cuda, over a
// stand-in for the CUDA runtime and a simulated device, and speaks to it as PyTorch does. It is started with the adapter and
// libcistern.so as arguments.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

using Pool = decltype(c10::cuda::CUDACachingAllocator::SegmentInfo::owner_private_pool_id);

// c10::cuda::CUDACachingAllocator as PyTorch 2.11 has it. What a version lacks does nothing.
namespace cca {
using namespace c10::cuda::CUDACachingAllocator;

inline void emptyCache([[maybe_unused]] Pool pool = {0, 0}) {
#if CISTERN_TORCH_EMPTY_POOL
  get()->emptyCache(pool);
#else
  get()->emptyCache();
#endif
}

inline SnapshotInfo snapshot([[maybe_unused]] Pool pool = {0, 0}, [[maybe_unused]] bool traces = true) {
#if CISTERN_TORCH_SNAPSHOT_TRACES
  return get()->snapshot(pool, traces);
#elif CISTERN_TORCH_SNAPSHOT_POOL
  return get()->snapshot(pool);
#else
  SnapshotInfo all = get()->snapshot();
  if (pool != Pool{0, 0})
    all.segments.erase(std::remove_if(all.segments.begin(), all.segments.end(),
                                      [&](const SegmentInfo& s) { return s.owner_private_pool_id != pool; }),
                       all.segments.end());
  return all;
#endif
}

inline void createOrIncrefPool(c10::DeviceIndex device, Pool pool, [[maybe_unused]] std::shared_ptr<CUDAAllocator> allocator = nullptr) {
#if CISTERN_TORCH_POOL_OWNS
  get()->createOrIncrefPool(device, pool, allocator);
#elif CISTERN_TORCH_CREATE_POOL
  if (allocator)
    new std::shared_ptr<CUDAAllocator>(allocator); // the program is to own it
  get()->createOrIncrefPool(device, pool, allocator.get());
#else
  get()->ensureExistsAndIncrefPool(device, pool);
#endif
}

inline void setUseOnOOM([[maybe_unused]] c10::DeviceIndex device, [[maybe_unused]] Pool pool, [[maybe_unused]] bool use) {
#if CISTERN_TORCH_USE_ON_OOM_OFF
  get()->setUseOnOOM(device, pool, use);
#elif CISTERN_TORCH_USE_ON_OOM
  if (use)
    get()->setUseOnOOM(device, pool);
#endif
}

inline void setNoSplit([[maybe_unused]] c10::DeviceIndex device, [[maybe_unused]] Pool pool) {
#if CISTERN_TORCH_NO_SPLIT
  get()->setNoSplit(device, pool);
#endif
}

inline void recordHistory(bool on, CreateContextFn recorder, size_t entries, RecordContext when, [[maybe_unused]] bool clear,
                          [[maybe_unused]] const std::vector<std::string>& skip) {
#if CISTERN_TORCH_HISTORY_SKIP
  get()->recordHistory(on, recorder, entries, when, clear, skip);
#elif CISTERN_TORCH_HISTORY_CLEAR
  get()->recordHistory(on, recorder, entries, when, clear);
#else
  if (on && clear)
    get()->recordHistory(false, nullptr, 1, RecordContext::NEVER);
  get()->recordHistory(on, recorder, entries, when);
#endif
}

inline void pushCompileContext([[maybe_unused]] std::string& context) {
#if CISTERN_TORCH_COMPILE_CONTEXT
  get()->pushCompileContext(context);
#endif
}

inline void popCompileContext() {
#if CISTERN_TORCH_COMPILE_CONTEXT
  get()->popCompileContext();
#endif
}

inline void setUserMetadata([[maybe_unused]] const std::string& metadata) {
#if CISTERN_TORCH_USER_METADATA
  get()->setUserMetadata(metadata);
#endif
}

// A segment's place in NCCL's order, which has no 0; 1 where segments have none.
inline int32_t order([[maybe_unused]] const SegmentInfo& s) {
#if CISTERN_TORCH_SEGMENT_ORDER
  return s.registration_counter;
#else
  return 1;
#endif
}

// Whether an entry of a trace is of the pool, as far as entries say.
inline bool is_of([[maybe_unused]] const TraceEntry& e, [[maybe_unused]] Pool pool) {
#if CISTERN_TORCH_TRACE_POOL
  return e.mempool_ == pool;
#else
  return true;
#endif
}
} // namespace cca

// Of the stand-in runtime.
extern "C" void test_capture(void* stream, int on);
extern "C" int test_mallocs, test_syncs, test_peer_copies, test_peers, test_peer_fails;

inline std::atomic<int> failures{0};

#define CHECK(x)                                                  \
  do {                                                            \
    if (!(x)) {                                                   \
      failures++;                                                 \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #x);      \
    }                                                             \
  } while (0)

// Runs x, which is to throw a kind of exception whose words hold part.
#define THROWS(kind, part, x)                                                                             \
  do {                                                                                                    \
    const char* words = "nothing was thrown";                                                             \
    std::string kept;                                                                                     \
    try {                                                                                                 \
      x;                                                                                                  \
    } catch (const kind& e) {                                                                             \
      kept = e.what();                                                                                    \
      words = strstr(kept.c_str(), part) != nullptr ? nullptr : kept.c_str();                             \
    } catch (const std::exception& e) {                                                                   \
      kept = std::string("another exception: ") + e.what();                                               \
      words = kept.c_str();                                                                               \
    }                                                                                                     \
    if (words != nullptr) {                                                                               \
      failures++;                                                                                         \
      printf("%s:%d: %s: expected \"%s\", got: %.400s\n", __FILE__, __LINE__, #x, part, words);           \
    }                                                                                                     \
  } while (0)

#define OUT_OF_MEMORY(x) THROWS(c10::OutOfMemoryError, "CUDA out of memory. Tried to allocate ", x)

constexpr size_t KiB = 1 << 10, MiB = 1 << 20, GiB = 1 << 30;

// What libtorch_cuda.so has, as far as the adapter needs it.
namespace torch::cuda::CUDAPluggableAllocator {
inline std::shared_ptr<cca::CUDAAllocator> current;
__attribute__((visibility("default"), used, noinline)) void changeCurrentAllocator(
    const std::shared_ptr<cca::CUDAAllocator>& allocator);
} // namespace torch::cuda::CUDAPluggableAllocator

namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

inline void* adapter;

template <class F>
F* function(const char* name) {
  void* f = dlsym(adapter, name);
  if (f == nullptr) {
    printf("the adapter has no %s\n", name);
    exit(1);
  }
  return reinterpret_cast<F*>(f);
}

inline void install(char** argv) {
  setvbuf(stdout, nullptr, _IONBF, 0);
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  adapter = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  using Install = const char*(const char*, const char*);
  const char* why = adapter == nullptr ? dlerror() : function<Install>("cistern_torch_install")(argv[2], nullptr);
  if (why != nullptr) {
    printf("%s\n", why);
    exit(1);
  }
}

inline int done() {
  printf("%d failures\n", failures.load());
  return failures != 0;
}

inline c10::CachingDeviceAllocator::DeviceStats stats(int device = 0) {
  return cca::getDeviceStats(static_cast<c10::DeviceIndex>(device));
}
inline int64_t reserved() { return stats().reserved_bytes[0].current; }

// The stream whose turn it is of c10's.
inline c10::cuda::CUDAStream some_stream() { return c10::cuda::getStreamFromPool(false, 0); }

// As torch.cuda.use_mem_pool has it.
inline std::function<bool(cudaStream_t)> this_thread() {
  return [id = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == id; };
}

// As the filter of a graph has it.
inline bool captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  return status != cudaStreamCaptureStatusNone;
}
