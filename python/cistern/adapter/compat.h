// compat.h: where PyTorch's versions differ, from 2.6 on: the class that PyTorch calls, and names for what it passes.
//
// Every override stands here. Those that differ between versions call functions that do not, whose names are in lower case.
// CISTERN_TORCH_... are 1 or 0, as probe.cpp finds them.
#pragma once

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#if CISTERN_TORCH_ACCELERATOR_CONFIG // 2.10: settings that do not belong to CUDA alone
#include <c10/core/AllocatorConfig.h>
#endif

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace cistern_torch {

namespace cca = c10::cuda::CUDACachingAllocator;
using c10::DataPtr;
using c10::DeviceIndex;
using cca::SegmentInfo;
using cca::SnapshotInfo;
using cca::TraceEntry;
using c10::CachingDeviceAllocator::DeviceStats;
using Context = std::shared_ptr<c10::GatheredContext>;
using Pointer = std::shared_ptr<cca::CUDAAllocator>;

// Types whose namespaces differ, by where they are used.
using MempoolId_t = decltype(SegmentInfo::owner_private_pool_id);
using AnnotationEntry = decltype(SnapshotInfo::external_annotations)::value_type;
using TraceTime = decltype(TraceEntry::time_);

struct PoolHash {
  size_t operator()(const MempoolId_t& id) const noexcept { return id.first != 0 ? id.first : id.second; }
};

// What a stream has in expandable segments of one size class.
struct ExpandableSize {
  cudaStream_t stream;
  bool small_pool;
  size_t size;
};

class Adapter final : public cca::CUDAAllocator {
 public:
  explicit Adapter(std::string library, std::string conf, bool has_conf);

  // Memory: allocator.cpp.
  void* raw_alloc(size_t nbytes) override;
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override;
  void raw_delete(void* ptr) override;
  DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dest, const void* src, std::size_t count) const override;
  void init(int device_count) override;
  bool initialized() override;
  void enable(bool value) override;
  bool isEnabled() const override;
  void recordStream(const DataPtr& ptr, c10::cuda::CUDAStream stream) override;
  using cca::CUDAAllocator::recordStream;
  void* getBaseAllocation(void* ptr, size_t* size) override;
  std::string name() override;
#if CISTERN_TORCH_EMPTY_POOL // 2.8: of one pool
  void emptyCache(MempoolId_t pool) override { empty_cache(pool); }
#else
  void emptyCache() override { empty_cache({0, 0}); }
#endif
  void empty_cache(MempoolId_t pool);

  // Pools and captures: pools.cpp, checkpoint.cpp.
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override;
  void releasePool(DeviceIndex device, MempoolId_t pool) override;
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override;
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& expected) override;
  std::shared_ptr<cca::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override;
  cca::CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) override;
#if CISTERN_TORCH_POOL_OWNS // 2.11: the pool owns its allocator
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, Pointer allocator) override {
    create_pool(device, pool, std::move(allocator));
  }
#elif CISTERN_TORCH_CREATE_POOL // 2.8: the program owns it
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, cca::CUDAAllocator* allocator) override {
    create_pool(device, pool, unowned(allocator));
  }
#else // 2.6: it is told with the scopes of the pool (active_allocator)
  void ensureExistsAndIncrefPool(DeviceIndex device, MempoolId_t pool) override { create_pool(device, pool, nullptr); }
#endif
  void create_pool(DeviceIndex device, MempoolId_t pool, Pointer allocator);
#if CISTERN_TORCH_USE_ON_OOM_OFF // 2.11: on or off
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) override { use_pool_on_oom(device, pool, use_on_oom); }
#elif CISTERN_TORCH_USE_ON_OOM // 2.8: on
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool) override { use_pool_on_oom(device, pool, true); }
#endif
  void use_pool_on_oom(DeviceIndex device, MempoolId_t pool, bool use);
#if CISTERN_TORCH_NO_SPLIT // 2.10
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override { set_no_split(device, pool); }
#endif
  void set_no_split(DeviceIndex device, MempoolId_t pool);

  // Statistics and snapshots: stats.cpp, snapshot.cpp.
  DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex device) override;
  void resetPeakStats(DeviceIndex device) override;
  double getMemoryFraction(DeviceIndex device) override;
  void setMemoryFraction(double fraction, DeviceIndex device) override;
  void cacheInfo(DeviceIndex device, size_t* largest) override;
#if CISTERN_TORCH_EXPANDABLE_SIZES // 2.10
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    std::vector<cca::StreamSegmentSize> out;
    for (const ExpandableSize& s : expandable_sizes(device))
      out.emplace_back(s.stream, s.small_pool, s.size);
    return out;
  }
#endif
  std::vector<ExpandableSize> expandable_sizes(DeviceIndex device);
#if CISTERN_TORCH_SNAPSHOT_TRACES // 2.11: with traces or without
  SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) override { return take_snapshot(pool, include_traces); }
#elif CISTERN_TORCH_SNAPSHOT_POOL // 2.8: of one pool
  SnapshotInfo snapshot(MempoolId_t pool) override { return take_snapshot(pool, true); }
#else
  SnapshotInfo snapshot() override { return take_snapshot({0, 0}, true); }
#endif
  SnapshotInfo take_snapshot(MempoolId_t pool, bool include_traces);

  // History: history.cpp.
  bool isHistoryEnabled() override;
#if CISTERN_TORCH_HISTORY_SKIP // 2.11: without some actions
  void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries, cca::RecordContext when, bool clear,
                     const std::vector<std::string>& skip_actions) override {
    uint32_t skipped = 0;
    for (const std::string& s : skip_actions)
      skipped |= 1u << c10::CachingDeviceAllocator::parseTraceEntryAction(s);
    record_history(enabled, recorder, max_entries, when, clear, skipped);
  }
#elif CISTERN_TORCH_HISTORY_CLEAR // 2.8: from an empty list on
  void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries, cca::RecordContext when,
                     bool clear) override {
    record_history(enabled, recorder, max_entries, when, clear, 0);
  }
#else
  void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries, cca::RecordContext when) override {
    record_history(enabled, recorder, max_entries, when, false, 0);
  }
#endif
  void record_history(bool enabled, cca::CreateContextFn recorder, size_t max_entries, cca::RecordContext when, bool clear,
                      uint32_t skipped);
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& md) override;
#if CISTERN_TORCH_COMPILE_CONTEXT // 2.8
  void pushCompileContext(std::string& md) override { push_compile_context(md); }
  void popCompileContext() override { pop_compile_context(); }
#endif
  void push_compile_context(const std::string& context);
  void pop_compile_context();
#if CISTERN_TORCH_USER_METADATA // 2.10
  void setUserMetadata(const std::string& metadata) override { user_metadata() = metadata; }
  std::string getUserMetadata() override { return user_metadata(); }
#endif
  static std::string& user_metadata(); // the calling thread's
#if CISTERN_TORCH_ANNOTATE // 2.14: metadata for memory that was given out before
  bool supportsUserMetadata() override { return true; }
  void annotateMemory(const void* ptr, const std::string& metadata) override { annotate(ptr, metadata, TraceEntry::ANNOTATE); }
#endif
  void annotate(const void* ptr, const std::string& metadata, TraceEntry::Action action);
#if CISTERN_TORCH_POINTER_CONTEXT // 2.12
  Context getContextForPointer(const void* ptr) override { return context_of(ptr); }
#endif
  Context context_of(const void* ptr);
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override;
#if CISTERN_TORCH_REJECTION_OBSERVER // 2.12: of the setting throw_on_cudamalloc_oom, which has no effect here: there is none to tell
  void attachOomRejectionObserver(cca::OomRejectionObserver) override {}
#endif
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override;

  // Other devices and processes: share.cpp.
  cca::ShareableHandle shareIpcHandle(void* ptr) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  void enablePeerAccess(DeviceIndex dev, DeviceIndex dev_to_access) override;
  cudaError_t memcpyAsync(void* dst, int dst_device, const void* src, int src_device, size_t count,
                          cudaStream_t stream, bool p2p_enabled) override;

 private:
  void* get(size_t nbytes, DeviceIndex device, cudaStream_t stream);
  static Pointer unowned(cca::CUDAAllocator* a) { return a != nullptr ? Pointer(a, [](cca::CUDAAllocator*) {}) : nullptr; }

  std::string library_, conf_;
  bool has_conf_;
};

// active_allocator is the allocator of the pool, where PyTorch says it with each scope that it opens, on the thread that does.
inline Pointer active_allocator([[maybe_unused]] MempoolId_t pool) {
#if CISTERN_TORCH_ACTIVE_POOL // until 2.7
  c10::cuda::MemPool* const active = c10::cuda::MemPoolContext::getActiveMemPool();
  if (active != nullptr && active->id() == pool && active->allocator() != nullptr)
    return Pointer(active->allocator(), [](cca::CUDAAllocator*) {});
#endif
  return nullptr;
}

// A trace entry without a time. Pools are among its data from 2.8 on, the context of the compiler as well, the user's metadata from
// 2.10 on.
inline TraceEntry trace_entry(TraceEntry::Action action, DeviceIndex device, uint64_t addr, uint64_t size, void* stream,
                              [[maybe_unused]] MempoolId_t pool, Context context, [[maybe_unused]] const std::string& compiled,
                              [[maybe_unused]] const std::string& metadata) {
  const auto s = static_cast<decltype(TraceEntry::stream_)>(stream); // void* from 2.11 on
#if CISTERN_TORCH_USER_METADATA
  return {action, device, addr, size, s, pool, 0, std::move(context), compiled, metadata};
#elif CISTERN_TORCH_TRACE_POOL
  return {action, device, addr, size, s, pool, 0, std::move(context), compiled};
#else
  return {action, device, addr, size, s, 0, std::move(context)};
#endif
}

inline void set_stream(SegmentInfo* s, void* stream) { s->stream = static_cast<decltype(SegmentInfo::stream)>(stream); }

// The place of a segment in the order that NCCL takes for the same in all ranks.
inline void set_order([[maybe_unused]] SegmentInfo* s, [[maybe_unused]] int32_t order) {
#if CISTERN_TORCH_SEGMENT_ORDER // 2.11
  s->registration_counter = order;
#endif
}

// What each of the pools that pools() lists has reserved, which f(pool, Stat*) writes.
template <class Pools, class F>
void set_pool_stats([[maybe_unused]] DeviceStats* d, [[maybe_unused]] Pools pools, [[maybe_unused]] F f) {
#if CISTERN_TORCH_POOL_STATS // 2.13
  for (const MempoolId_t& pool : pools())
    f(pool, &d->reserved_bytes_by_private_pools[pool][0]);
#endif
}

// ---- PyTorch's settings

#if CISTERN_TORCH_ACCELERATOR_CONFIG
using Settings = c10::CachingAllocator::AcceleratorAllocatorConfig;
inline bool expandable_segments() { return Settings::use_expandable_segments(); }
#else
using Settings = cca::CUDAAllocatorConfig;
inline bool expandable_segments() { return Settings::expandable_segments(); }
#endif

inline bool reuse_in_captures() {
#if CISTERN_TORCH_CAPTURE_REUSE // 2.9
  return cca::CUDAAllocatorConfig::graph_capture_record_stream_reuse();
#else
  return false;
#endif
}

inline double wanted_fraction() {
#if CISTERN_TORCH_MEMORY_FRACTION // 2.10
  return cca::CUDAAllocatorConfig::per_process_memory_fraction();
#else
  return 1;
#endif
}

inline void describe_settings(cca::AllocatorConfigInfo* md) {
  md->garbage_collection_threshold = Settings::garbage_collection_threshold();
  md->max_split_size = Settings::max_split_size();
  md->pinned_num_register_threads = cca::CUDAAllocatorConfig::pinned_num_register_threads();
  md->expandable_segments = expandable_segments();
  md->release_lock_on_malloc = cca::CUDAAllocatorConfig::release_lock_on_cudamalloc();
  md->pinned_use_host_register = cca::CUDAAllocatorConfig::pinned_use_cuda_host_register();
#if CISTERN_TORCH_CAPTURE_REUSE
  md->graph_capture_record_stream_reuse = reuse_in_captures();
#endif
#if CISTERN_TORCH_INFO_PINNED_CACHE // 2.13
  md->max_round_threshold = Settings::pinned_max_round_threshold();
  md->max_cached_size = Settings::pinned_max_cached_size();
#endif
  md->last_allocator_settings = Settings::last_allocator_settings();
  md->roundup_power2_divisions = Settings::roundup_power2_divisions();
}

// throw_cuda_error throws what PyTorch does for an error of CUDA.
[[noreturn]] inline void throw_cuda_error(c10::SourceLocation where, [[maybe_unused]] cudaError_t err, const std::string& words) {
#if CISTERN_TORCH_ACCELERATOR_ERROR // 2.8: with the error's number
  throw c10::AcceleratorError(where, err, words);
#else
  throw c10::Error(where, words);
#endif
}

} // namespace cistern_torch
