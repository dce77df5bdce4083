// allocator.cpp: memory given out and taken back, and the start of CUDA.
//
// The fast path has no lock, map or driver call of its own: where nothing records, tracks, profiles or allocates from a pool
// (mode is 0), a request is the current device, the current stream and one call of the library.
#include "adapter.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/util/env.h>

#include <pthread.h>

#include <mutex>
#include <unordered_set>

namespace cistern_torch {

std::atomic<uint32_t> mode{kNotReady};
Library lib;
Adapter* adapter = nullptr;
int device_count = 0;
std::atomic<bool> touched[kMaxDevices];

void set_mode(uint32_t bit, bool on) {
  if (on)
    mode.fetch_or(bit);
  else
    mode.fetch_and(~bit);
}

namespace {

std::mutex touch_mutex;

// Memory from cudaMalloc, given out while caching was off.
struct Uncached {
  std::mutex mutex;
  std::unordered_set<void*> pointers;
};
Uncached& uncached = *new Uncached; // never destroyed: see Adapter
std::atomic<bool> enabled{true};

bool caching_forced_off() {
  static const bool off = c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true ||
      c10::utils::check_env("PYTORCH_NO_HIP_MEMORY_CACHING") == true;
  return off;
}

bool caching() { return enabled.load(std::memory_order_relaxed) && !caching_forced_off(); }

void* take_uncached(size_t n) {
  void* p = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&p, n)); // fails in a capture, as it should: there the memory would have to stay
  if (p) {
    std::lock_guard<std::mutex> lock(uncached.mutex);
    uncached.pointers.insert(p);
  }
  return p;
}

// Streams of c10's pools live as long as the process: the library is notified once for each. Bits by type and index of the
// stream's id, which are its low 10 bits after the one that tells c10's streams from others.
std::atomic<uint64_t> promised[kMaxDevices][8];

void promise(DeviceIndex device, const c10::cuda::CUDAStream& stream) {
  const auto id = static_cast<uint64_t>(stream.id());
  if ((id & 1) == 0 && id != 0)
    return; // a stream of another owner, which may be destroyed
  const unsigned i = (id >> 1) & 511;
  std::atomic<uint64_t>& word = promised[device][i / 64];
  const uint64_t bit = uint64_t(1) << (i % 64);
  if (C10_LIKELY(word.load(std::memory_order_relaxed) & bit))
    return;
  if (mode.load(std::memory_order_acquire) & (kNotReady | kForked))
    return;
  touch(device);
  if ((id >> 1) < 512 && lib.stream_durable(device, stream.stream()) == CISTERN_OK)
    word.fetch_or(bit);
}

// What profilers and tracers record of an allocation or release.
void report(void* ptr, int64_t sign, size_t size, DeviceIndex device) {
  cistern_stats s;
  library_stats(device, &s);
  c10::reportMemoryUsageToProfiler(ptr, sign * static_cast<int64_t>(size), s.allocated.all.current,
                                   s.reserved.all.current, c10::Device(c10::DeviceType::CUDA, device));
}

inline void taken(void* ptr, DeviceIndex device) {
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    cistern_block b;
    if (lib.find && lib.find(ptr, &b) == CISTERN_OK)
      report(ptr, 1, b.size, device);
  }
  const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(interp != nullptr))
    (*interp)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
}

void* take_slowly(uint32_t m, Request r) {
  if (m & kUncached && !caching()) {
    void* p = take_uncached(r.size);
    taken(p, r.device);
    return p;
  }
  if (m & kForked)
    raise(CISTERN_FORKED, "");
  TORCH_CHECK(!(m & kNotReady), "Allocator not initialized for device ", static_cast<int>(r.device),
              ": did you call init?");
  touch(r.device);
  // Before any lock: the recorder may want Python's.
  const Context context = m & kHistory ? gather(cca::RecordContext::STATE) : nullptr;
  if (m & kScopes)
    route(&r);
  void* p = nullptr;
  const int code = m & kHistory ? take_recorded(r, context, &p) : take_from_library(r, &p);
  if (code != CISTERN_OK)
    p = refused(code, r, context);
  taken(p, r.device);
  return p;
}

// Returns the library's code; CISTERN_OK also where nothing is to be done.
int give_back(void* ptr) {
  const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(interp != nullptr))
    (*interp)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
  const uint32_t m = mode.load(std::memory_order_acquire);
  const bool profiled = c10::memoryProfilingEnabled();
  if (C10_LIKELY(m == 0 && !profiled))
    return lib.release(ptr);
  if (m & kForked)
    return CISTERN_OK; // the parent's memory: nothing that this process could do
  if (m & kUncached) {
    std::unique_lock<std::mutex> lock(uncached.mutex);
    if (uncached.pointers.erase(ptr) != 0) {
      lock.unlock();
      C10_CUDA_CHECK(cudaFree(ptr));
      return CISTERN_OK;
    }
  }
  if (m & kNotReady)
    return CISTERN_INVALID;
  cistern_block b{};
  if (profiled && lib.find(ptr, &b) != CISTERN_OK)
    return CISTERN_INVALID;
  const int code = m & kHistory ? release_recorded(ptr) : lib.release(ptr);
  if (profiled && code == CISTERN_OK)
    report(ptr, -1, b.size, static_cast<DeviceIndex>(b.device));
  return code;
}

// The one deleter of all memory of ours, also of size 0: PyTorch compares it.
void deleter(void* ptr) {
  if (ptr == nullptr)
    return;
  const int code = give_back(ptr);
  if (C10_UNLIKELY(code != CISTERN_OK))
    warn(code, "freeing memory");
}

extern "C" void forked_child() { set_mode(kForked, true); }

DeviceIndex current_device() {
  DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

} // namespace

bool is_uncached(void* ptr) {
  if (!(mode.load(std::memory_order_acquire) & kUncached))
    return false;
  std::lock_guard<std::mutex> lock(uncached.mutex);
  return uncached.pointers.count(ptr) != 0;
}

int take_from_library(const Request& r, void** out) {
  if (r.pooled) {
    forget_custom();
    const int code = lib.alloc(out, r.size, r.device, r.stream, Ids(r.pool));
    if (code == CISTERN_OK)
      forget_custom(); // of an attempt before the one that succeeded
    return code;
  }
  *out = lib.malloc(static_cast<ssize_t>(r.size), r.device, r.stream);
  return *out != nullptr ? CISTERN_OK : lib.last_error(nullptr, 0);
}

inline void* Adapter::get(size_t nbytes, DeviceIndex device, cudaStream_t stream) {
  constexpr size_t one_exabyte = size_t(1) << 60;
  TORCH_CHECK_WITH(OutOfMemoryError, nbytes < one_exabyte,
                   "CUDA out of memory. Tried to allocate more than 1EB memory.");
  const uint32_t m = mode.load(std::memory_order_acquire);
  if (C10_UNLIKELY(m != 0 || !touched[device].load(std::memory_order_relaxed)))
    return take_slowly(m, {nbytes, device, stream});
  void* p = lib.malloc(static_cast<ssize_t>(nbytes), device, stream);
  if (C10_UNLIKELY(p == nullptr))
    p = refused(lib.last_error(nullptr, 0), {nbytes, device, stream}, nullptr);
  taken(p, device);
  return p;
}

void* Adapter::raw_alloc(size_t nbytes) {
  if (nbytes == 0)
    return nullptr;
  const DeviceIndex device = current_device();
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  promise(device, stream);
  return get(nbytes, device, stream.stream());
}

void* Adapter::raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) {
  if (nbytes == 0)
    return nullptr;
  return get(nbytes, current_device(), stream);
}

DataPtr Adapter::allocate(size_t nbytes) {
  const DeviceIndex device = current_device();
  void* p = nullptr;
  if (nbytes != 0) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    promise(device, stream);
    p = get(nbytes, device, stream.stream());
  }
  return {p, p, &deleter, c10::Device(c10::DeviceType::CUDA, device)};
}

void Adapter::raw_delete(void* ptr) {
  if (ptr == nullptr)
    return;
  const int code = give_back(ptr);
  TORCH_CHECK(code != CISTERN_INVALID, "invalid device pointer: ", ptr);
  check(code);
}

c10::DeleterFnPtr Adapter::raw_deleter() const { return &deleter; }

void Adapter::copy_data(void* dest, const void* src, std::size_t count) const {
  C10_CUDA_CHECK(cudaMemcpy(dest, src, count, cudaMemcpyDeviceToDevice));
}

void Adapter::recordStream(const DataPtr& ptr, c10::cuda::CUDAStream stream) {
  // Memory of others, such as tensors shared by another process, is theirs to keep.
  if (!ptr.get() || ptr.get_deleter() != &deleter)
    return;
  if (mode.load(std::memory_order_acquire) & (kNotReady | kForked) || is_uncached(ptr.get()))
    return;
  check(lib.record_stream(ptr.get(), stream.stream()));
}

void* Adapter::getBaseAllocation(void* ptr, size_t* size) {
  TORCH_CHECK(initialized(), "invalid device pointer: ", ptr);
  void* base = nullptr;
  const int code = lib.segment_base(ptr, &base, size);
  TORCH_CHECK(code != CISTERN_INVALID, "invalid device pointer: ", ptr);
  check(code);
  return base;
}

void Adapter::empty_cache(MempoolId_t pool) {
  if (mode.load(std::memory_order_acquire) & (kNotReady | kForked))
    return;
  if (pool.first == 0 && pool.second == 0) {
    Recorded recorded(cca::RecordContext::ALL);
    if (!tracked()) {
      check(lib.trim(-1));
      return;
    }
    // A pool that lives may be registered on all ranks, of which this may be the only one that empties its cache.
    for (int d = 0; d < device_count; d++)
      if (touched[d].load(std::memory_order_acquire))
        check(lib.pool_trim(d, Ids(pool)));
    return;
  }
  for (int d = 0; d < device_count; d++)
    if (pool_known(static_cast<DeviceIndex>(d), pool)) {
      Recorded recorded(cca::RecordContext::ALL);
      warn(lib.pool_trim(d, Ids(pool)), "emptying a pool"); // the destructor of torch.cuda.MemPool calls this
    }
}

void Adapter::enable(bool value) {
  enabled.store(value);
  if (!value)
    set_mode(kUncached, true); // for good: some of its memory may live long
}

bool Adapter::isEnabled() const { return enabled.load(); }

// The name that torch.cuda.get_allocator_backend() gives. In PyTorch itself only tests compare it, with "cudaMallocAsync";
// programs print it. So it says what is the case.
std::string Adapter::name() { return "cistern"; }

bool Adapter::initialized() { return (mode.load() & kNotReady) == 0; }

Adapter::Adapter(std::string library, std::string conf, bool has_conf)
    : library_(std::move(library)), conf_(std::move(conf)), has_conf_(has_conf) {}

void Adapter::init(int count) {
  if (initialized())
    return;
  TORCH_CHECK(count <= kMaxDevices, "Cistern: ", count, " devices, more than the ", kMaxDevices, " it knows of");
  const std::string wrong = lib.load(library_.c_str());
  TORCH_CHECK(wrong.empty(), "Cistern cannot start: ", wrong);
  if (lib.init(has_conf_ ? conf_.c_str() : nullptr) != CISTERN_OK)
    TORCH_CHECK(false, "Cistern cannot start: ", last_words());
  start_upstream();
  check(lib.library_default("torch")); // the library of callers that name none, in statistics
  pools_init(count);
  device_count = count;
  pthread_atfork(nullptr, nullptr, &forked_child);
  if (caching_forced_off())
    set_mode(kUncached, true);
  set_mode(kNotReady, false);
}

void check_device(DeviceIndex device) {
  TORCH_CHECK(!(mode.load(std::memory_order_acquire) & kForked), "Cannot use CUDA memory in a forked subprocess");
  TORCH_CHECK(0 <= device && device < device_count, "Invalid device argument ", static_cast<int>(device),
              ": did you call init?");
}

void touch(DeviceIndex device) {
  if (touched[device].load(std::memory_order_acquire))
    return;
  check_device(device);
  std::lock_guard<std::mutex> lock(touch_mutex);
  if (touched[device].load())
    return;
  limit_touch(device);
  callbacks_touch(device);
  history_touch(device);
  touched[device].store(true, std::memory_order_release);
}

} // namespace cistern_torch
