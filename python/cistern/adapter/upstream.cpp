// upstream.cpp: pools whose memory comes from elsewhere: from an allocator object of PyTorch's, from functions of the program's
// own, or from an upstream of the library's that has a name; and the function that such a pool asks when it is out of memory.
//
// The library calls what is here with no lock held, as the functions may take the interpreter's. Once Python ends nothing
// of the program's is called any more, because it may be Python's; a thread that is in such a function by then stays in it (stay).
#include "upstream.h"

#include <mutex>
#include <optional>
#include <unordered_map>

namespace cistern_torch {

namespace {

std::atomic<bool> python_over{false};

// What a custom allocator threw during the calling thread's request: it must not cross the library.
thread_local std::exception_ptr thrown;

// The pool whose callback the calling thread is in, on which device.
struct Asking {
  DeviceIndex device;
  MempoolId_t pool;
  const Asking* outer;
};
thread_local const Asking* asking = nullptr;

// AskingScope is the time for which it is in there, however that ends.
class AskingScope {
 public:
  AskingScope(DeviceIndex device, MempoolId_t pool) : here_{device, pool, asking} { asking = &here_; }
  ~AskingScope() { asking = here_.outer; }
  AskingScope(const AskingScope&) = delete;
  AskingScope& operator=(const AskingScope&) = delete;

 private:
  const Asking here_;
};

// The device, and for allocators of PyTorch's the stream, that is current in the function.
class Current {
 public:
  explicit Current(DeviceIndex device) : device_(device), before_(device) {
    C10_CUDA_CHECK(c10::cuda::GetDevice(&before_));
    if (before_ != device)
      C10_CUDA_CHECK(c10::cuda::SetDevice(device));
  }
  Current(DeviceIndex device, cudaStream_t stream) : Current(device) {
    const c10::cuda::CUDAStream now = c10::cuda::getCurrentCUDAStream(device);
    if (now.stream() != stream) {
      stream_ = now.unwrap();
      c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(stream, device));
    }
  }
  ~Current() {
    if (stream_)
      c10::cuda::setCurrentCUDAStream(c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, *stream_));
    if (before_ != device_)
      C10_CUDA_CHECK_WARN(c10::cuda::SetDevice(before_));
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  DeviceIndex device_, before_;
  std::optional<c10::Stream> stream_;
};

// Functions without a ctx are those that torch.cuda.memory.CUDAPluggableAllocator takes.
using BareAlloc = void* (*)(ssize_t, int, cudaStream_t);
using BareFree = void (*)(void*, ssize_t, int, cudaStream_t);

void* call_alloc(const Source& s, size_t size, DeviceIndex device, cudaStream_t stream) {
  if (s.allocator) {
    Current current(device, stream);
    return s.allocator->raw_alloc_with_stream(size, stream);
  }
  Current current(device);
  const cistern_pool_options& o = s.spec->wanted.options;
  if (s.spec->wanted.bare != 0)
    return reinterpret_cast<BareAlloc>(reinterpret_cast<void*>(o.alloc))(static_cast<ssize_t>(size), device, stream);
  return o.alloc(o.ctx, size, device, stream);
}

void call_free(const Source& s, void* ptr, size_t size, DeviceIndex device, cudaStream_t stream) {
  if (s.allocator) {
    Current current(device, stream);
    s.allocator->raw_delete(ptr);
    return;
  }
  Current current(device);
  const cistern_pool_options& o = s.spec->wanted.options;
  if (s.spec->wanted.bare != 0)
    reinterpret_cast<BareFree>(reinterpret_cast<void*>(o.free))(ptr, static_cast<ssize_t>(size), device, stream);
  else
    o.free(o.ctx, ptr, size, device, stream);
}

extern "C" void* upstream_alloc(void* ctx, size_t size, int device, void* stream) {
  auto* const s = static_cast<Source*>(ctx);
  if (python_over && !s->allocator)
    return nullptr;
  try {
    Unrecorded unrecorded;
    void* p = call_alloc(*s, size, static_cast<DeviceIndex>(device), static_cast<cudaStream_t>(stream));
    if (p != nullptr) {
      s->refs.fetch_add(1);
      segment_made(static_cast<DeviceIndex>(device), p);
    }
    return p;
  } catch (const c10::OutOfMemoryError&) {
    return nullptr;
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) {
    thrown = std::current_exception();
    return nullptr;
  }
}

extern "C" void upstream_free(void* ctx, void* ptr, size_t size, int device, void* stream) {
  auto* const s = static_cast<Source*>(ctx);
  try {
    Unrecorded unrecorded;
    try {
      segment_gone(static_cast<DeviceIndex>(device), ptr);
      if (!python_over || s->allocator)
        call_free(*s, ptr, size, static_cast<DeviceIndex>(device), static_cast<cudaStream_t>(stream));
    } catch (const std::exception& e) {
      TORCH_WARN("Cistern: a custom allocator failed to free memory: ", e.what());
    } catch (const abi::__forced_unwind&) {
      throw;
    } catch (...) {
      TORCH_WARN("Cistern: a custom allocator failed to free memory");
    }
    s->unref(); // which may call Python too
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) { // warnings are errors here, and the library must not see them
  }
}

extern "C" int upstream_asks(void* ctx, int device, uint64_t missing) {
  auto* const s = static_cast<Source*>(ctx);
  const cistern_pool_options& o = s->spec->wanted.options;
  if (python_over)
    return 0;
  try {
    Unrecorded unrecorded;
    Current current(static_cast<DeviceIndex>(device));
    const AskingScope here(static_cast<DeviceIndex>(device), s->pool);
    return o.on_out_of_memory(o.on_out_of_memory_ctx, device, missing);
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) { // it failed, or there is no such device any more
    return 0;
  }
}

// What was said of pools, by id: a pool may be used on several devices, each of which makes its own of it.
struct Specs {
  std::mutex mutex;
  struct Entry {
    DeviceIndex home;
    std::shared_ptr<const Spec> spec;
  };
  std::unordered_map<MempoolId_t, Entry, PoolHash> by_id;
};
Specs& specs = *new Specs; // never destroyed: see Adapter

} // namespace

Spec::Spec(const PoolWanted& w) : wanted(w) {
  if (w.options.upstream != nullptr)
    wanted.options.upstream = (upstream = w.options.upstream).c_str();
  if (w.options.spill != nullptr)
    wanted.options.spill = (spill = w.options.spill).c_str();
}

Spec::~Spec() {
  if (wanted.dropped == nullptr || python_over)
    return;
  try {
    wanted.dropped(wanted.token);
  } catch (const abi::__forced_unwind&) {
    stay();
  }
}

void Source::unref() {
  if (refs.fetch_sub(1) == 1)
    delete this;
}

Source* make_source(MempoolId_t pool, Pointer allocator, std::shared_ptr<const Spec> spec,
                    cistern_pool_options* out) {
  if (spec) {
    const cistern_pool_options& w = spec->wanted.options;
    out->flags |= w.flags;
    out->upstream = w.upstream;
    out->limit = w.limit;
    out->spill = w.spill;
  }
  const bool functions = allocator || (spec && spec->wanted.options.alloc != nullptr);
  const bool asks = spec && spec->wanted.options.on_out_of_memory != nullptr;
  if (!functions && !asks)
    return nullptr;
  auto* const s = new Source{pool, std::move(allocator), std::move(spec)};
  if (functions) {
    out->alloc = upstream_alloc;
    out->free = upstream_free;
    out->ctx = s;
  }
  if (asks) {
    out->on_out_of_memory = upstream_asks;
    out->on_out_of_memory_ctx = s;
  }
  return s;
}

namespace {
std::shared_ptr<const Spec>& common = *new std::shared_ptr<const Spec>; // never destroyed: see Adapter
} // namespace

void start_upstream() {
  if (common)
    check(lib.upstream_set(upstream_alloc, upstream_free, new Source{MempoolId_t{0, 0}, nullptr, common})); // never ends
}

void remember_spec(DeviceIndex home, MempoolId_t pool, std::shared_ptr<const Spec> spec) {
  std::lock_guard<std::mutex> lock(specs.mutex);
  specs.by_id[pool] = {home, std::move(spec)};
}

std::shared_ptr<const Spec> spec_of(MempoolId_t pool) {
  std::lock_guard<std::mutex> lock(specs.mutex);
  const auto it = specs.by_id.find(pool);
  return it != specs.by_id.end() ? it->second.spec : nullptr;
}

void forget_spec(DeviceIndex home, MempoolId_t pool) {
  std::shared_ptr<const Spec> gone; // outlives the lock: its end may call Python
  std::lock_guard<std::mutex> lock(specs.mutex);
  const auto it = specs.by_id.find(pool);
  if (it == specs.by_id.end() || it->second.home != home)
    return;
  gone = std::move(it->second.spec);
  specs.by_id.erase(it);
}

bool is_asking(DeviceIndex device, MempoolId_t pool) {
  for (const Asking* a = asking; a != nullptr; a = a->outer)
    if (a->device == device && a->pool == pool)
      return true;
  return false;
}

void forget_custom() { thrown = nullptr; }

void rethrow_custom() {
  if (thrown) {
    std::exception_ptr e = std::move(thrown);
    thrown = nullptr;
    std::rethrow_exception(e);
  }
}

// What the library calls when a device is out of memory and Python's function is registered: ctx is that function. It takes the
// interpreter's lock.
extern "C" __attribute__((visibility("default"))) int cistern_torch_asks(void* ctx, int device, uint64_t missing) {
  try {
    Unrecorded unrecorded;
    return reinterpret_cast<int (*)(void*, int, uint64_t)>(ctx)(nullptr, device, missing);
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) { // no memory for an event of history's
    return 0;
  }
}

// cistern_torch_upstream has all of PyTorch's memory come from functions; of wanted, only alloc, free, ctx and bare count. It is
// called before CUDA starts. It returns 0 where that is too late, or there is no memory.
extern "C" __attribute__((visibility("default"))) int cistern_torch_upstream(const PoolWanted* wanted) {
  try {
    if (adapter == nullptr || adapter->initialized())
      return 0;
    common = std::make_shared<const Spec>(*wanted);
    return 1;
  } catch (...) {
    return 0;
  }
}

// Python ends: what it kept for pools is not called any more.
extern "C" __attribute__((visibility("default"))) void cistern_torch_python_ends(void) { python_over = true; }

} // namespace cistern_torch
