// probe.cpp: which features of its allocator's interface this PyTorch has. It is compiled once for a PyTorch and never run: the
// builder finds the strings in what the compiler makes of it, and gives each to all sources as a macro, 1 or 0 (compat.h). So
// a nightly or a fork is known by what it has, not by its version.
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <type_traits>
#include <utility>

// Only declared where this PyTorch has no such class.
namespace c10 {
class AcceleratorError;
namespace CachingAllocator {
class AcceleratorAllocatorConfig;
}
namespace cuda {
struct MemPoolContext;
}
} // namespace c10

namespace cca = c10::cuda::CUDACachingAllocator;
using Allocator = cca::CUDAAllocator;
using Config = cca::CUDAAllocatorConfig;
using Info = cca::AllocatorConfigInfo;
using Pool = decltype(cca::SegmentInfo::owner_private_pool_id);
using Pointer = std::shared_ptr<Allocator>;
using Strings = std::vector<std::string>;

template <template <class> class Use, class T, class = void>
struct Has : std::false_type {};
template <template <class> class Use, class T>
struct Has<Use, T, std::void_t<Use<T>>> : std::true_type {};

// A feature is an expression in t, a T, that compiles.
#define EXPRESSION(name, type, ...)                               \
  template <class T>                                              \
  using use_##name = decltype(std::declval<T&>().__VA_ARGS__);    \
  constexpr bool has_##name = Has<use_##name, type>::value;
#define COMPLETE(name, type)                                      \
  template <class T>                                              \
  using use_##name = char[sizeof(T)];                             \
  constexpr bool has_##name = Has<use_##name, type>::value;

EXPRESSION(EMPTY_POOL, Allocator, emptyCache(Pool()))
EXPRESSION(SNAPSHOT_POOL, Allocator, snapshot(Pool()))
EXPRESSION(SNAPSHOT_TRACES, Allocator, snapshot(Pool(), true))
EXPRESSION(CREATE_POOL, Allocator, createOrIncrefPool(0, Pool(), nullptr))
EXPRESSION(POOL_OWNS, Allocator, createOrIncrefPool(0, Pool(), Pointer()))
EXPRESSION(USE_ON_OOM, Allocator, setUseOnOOM(0, Pool()))
EXPRESSION(USE_ON_OOM_OFF, Allocator, setUseOnOOM(0, Pool(), true))
EXPRESSION(NO_SPLIT, Allocator, setNoSplit(0, Pool()))
EXPRESSION(EXPANDABLE_SIZES, Allocator, getExpandableSegmentSizes(0))
EXPRESSION(HISTORY_CLEAR, Allocator, recordHistory(true, nullptr, 0, cca::RecordContext::ALL, true))
EXPRESSION(HISTORY_SKIP, Allocator, recordHistory(true, nullptr, 0, cca::RecordContext::ALL, true, Strings()))
EXPRESSION(COMPILE_CONTEXT, Allocator, popCompileContext())
EXPRESSION(USER_METADATA, Allocator, getUserMetadata())
EXPRESSION(ANNOTATE, Allocator, annotateMemory(nullptr, std::string()))
EXPRESSION(POINTER_CONTEXT, Allocator, getContextForPointer(nullptr))
EXPRESSION(REJECTION_OBSERVER, Allocator, attachOomRejectionObserver(nullptr))
EXPRESSION(TRACE_POOL, cca::TraceEntry, mempool_)
EXPRESSION(SEGMENT_ORDER, cca::SegmentInfo, registration_counter)
EXPRESSION(POOL_STATS, c10::CachingDeviceAllocator::DeviceStats, reserved_bytes_by_private_pools)
EXPRESSION(CAPTURE_REUSE, Config, graph_capture_record_stream_reuse())
EXPRESSION(MEMORY_FRACTION, Config, per_process_memory_fraction())
EXPRESSION(INFO_PINNED_CACHE, Info, max_cached_size)
COMPLETE(ACCELERATOR_ERROR, c10::AcceleratorError)
COMPLETE(ACCELERATOR_CONFIG, c10::CachingAllocator::AcceleratorAllocatorConfig)
COMPLETE(ACTIVE_POOL, c10::cuda::MemPoolContext)

#define FOUND(name) has_##name ? "cistern:CISTERN_TORCH_" #name "=1" : "cistern:CISTERN_TORCH_" #name "=0",
extern const char* const found[];
const char* const found[] = {
    FOUND(EMPTY_POOL) FOUND(SNAPSHOT_POOL) FOUND(SNAPSHOT_TRACES) FOUND(CREATE_POOL) FOUND(POOL_OWNS)
    FOUND(USE_ON_OOM) FOUND(USE_ON_OOM_OFF) FOUND(NO_SPLIT) FOUND(EXPANDABLE_SIZES) FOUND(HISTORY_CLEAR) FOUND(HISTORY_SKIP)
    FOUND(COMPILE_CONTEXT) FOUND(USER_METADATA) FOUND(ANNOTATE) FOUND(POINTER_CONTEXT) FOUND(REJECTION_OBSERVER)
    FOUND(TRACE_POOL) FOUND(SEGMENT_ORDER) FOUND(POOL_STATS) FOUND(CAPTURE_REUSE) FOUND(MEMORY_FRACTION)
    FOUND(INFO_PINNED_CACHE) FOUND(ACCELERATOR_ERROR) FOUND(ACCELERATOR_CONFIG) FOUND(ACTIVE_POOL)};
