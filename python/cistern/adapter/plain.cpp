// plain.cpp: Cistern for PyTorch's pluggable allocator, for where the adapter cannot be compiled.
//
// It needs no PyTorch to compile. The functions have the signatures that torch.cuda.memory.CUDAPluggableAllocator and its
// set_*_fn take. PyTorch does not look whether memory was had, so out of memory is thrown: an exception that PyTorch turns into
// a RuntimeError. libcistern.so is loaded when CUDA starts, never before, so that programs may fork until then.
#include <cistern.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define CISTERN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Stream = void*;
using PoolId = std::pair<unsigned long long, unsigned long long>; // c10::MempoolId_t

struct Library {
#define CISTERN_FUNCTIONS(X) \
  X(init) X(last_error) X(malloc) X(release) X(record_stream) X(segment_base) X(trim) X(set_limit) X(get_limit) X(mem_info)      \
  X(pool_create) X(pool_release) X(alloc) X(capture_begin) X(capture_end) X(library_default)
#define CISTERN_POINTER(name) decltype(&::cistern_##name) name = nullptr;
  CISTERN_FUNCTIONS(CISTERN_POINTER)
#undef CISTERN_POINTER
};
Library lib;
std::string path = "libcistern.so", conf;
bool has_conf = false;

std::string last_words() {
  char words[2048] = "";
  lib.last_error(words, sizeof words);
  return words;
}

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("Cistern: " + what); }

void load() {
  static std::once_flag once; // tried again after an exception
  std::call_once(once, [] {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      fail(why != nullptr ? why : "cannot load " + path);
    }
#define CISTERN_LOOK_UP(fn)                                                            \
  lib.fn = reinterpret_cast<decltype(lib.fn)>(dlsym(handle, "cistern_" #fn));          \
  if (lib.fn == nullptr)                                                               \
    fail(path + " has no cistern_" #fn ": it is of another version of Cistern");
    CISTERN_FUNCTIONS(CISTERN_LOOK_UP)
#undef CISTERN_LOOK_UP
    if (lib.init(has_conf ? conf.c_str() : nullptr) != CISTERN_OK || lib.library_default("torch") != CISTERN_OK)
      fail(last_words());
  });
}

// Pools: PyTorch's graphs use them through three hooks.
struct Pool {
  int device;
  PoolId id;
  int uses;
};
struct Scope {
  int device;
  PoolId id;
  std::function<bool(Stream)> filter;
};
struct Announced {
  int device;
  PoolId id;
  Stream stream;
};
std::mutex pools_mutex;
std::vector<Pool> pools;
std::vector<Scope> scopes; // in the order in which they were opened
std::vector<Announced> captures;
// The stream that the calling thread is about to capture. PyTorch opens the scope of a graph right before it begins the
// capture and does not say of which stream.
thread_local Stream to_be_captured = nullptr;

bool is_capturing(Stream stream) {
  using IsCapturing = int (*)(Stream, int*);
  static const auto ask = [] {
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return cuda != nullptr ? reinterpret_cast<IsCapturing>(dlsym(cuda, "cuStreamIsCapturing")) : nullptr;
  }();
  int status = 0;
  if (ask == nullptr || reinterpret_cast<std::uintptr_t>(stream) <= 1) // the legacy default stream cannot be captured
    return false;
  ask(stream, &status);
  return status != 0;
}

// The pool that the request comes from, if there is a scope for it. The caller holds the mutex.
const Scope* scope_of(int device, Stream stream) {
  for (auto s = scopes.rbegin(); s != scopes.rend(); ++s)
    if (s->device == device && s->filter(stream))
      return &*s;
  return nullptr;
}

// Ends what was announced for captures that are over: those of streams that are not captured, unless their pool's scope is
// open and the capture may be yet to come. An open scope does not count for the stream unless, and for none if all. The
// caller holds the mutex.
void end_captures(Stream unless = nullptr, bool all = false) {
  for (size_t i = 0; i < captures.size();) {
    const Announced a = captures[i];
    const bool open = !all && a.stream != unless && std::any_of(scopes.begin(), scopes.end(), [&](const Scope& s) {
      return s.device == a.device && s.id == a.id;
    });
    if (open || is_capturing(a.stream)) {
      i++;
      continue;
    }
    captures.erase(captures.begin() + static_cast<std::ptrdiff_t>(i));
    lib.capture_end(a.device, a.stream);
  }
}

// The caller holds the mutex.
void announce(int device, PoolId id, Stream stream) {
  const std::uint64_t name[2] = {id.first, id.second};
  if (lib.capture_begin(device, name, stream) != CISTERN_OK)
    fail(last_words());
  captures.push_back({device, id, stream});
}

void* take(std::size_t size, int device, Stream stream) {
  {
    std::unique_lock<std::mutex> lock(pools_mutex);
    if (const Scope* s = scopes.empty() ? nullptr : scope_of(device, stream)) {
      const std::uint64_t id[2] = {s->id.first, s->id.second};
      const bool known = std::any_of(captures.begin(), captures.end(), [&](const Announced& a) { return a.stream == stream; });
      if (!known && is_capturing(stream))
        announce(device, s->id, stream);
      lock.unlock();
      void* p = nullptr;
      return lib.alloc(&p, size, device, stream, id) == CISTERN_OK ? p : nullptr;
    }
    // What a capture that never began, or failed, left behind would send this stream's requests into its pool.
    if (std::any_of(captures.begin(), captures.end(), [&](const Announced& a) { return a.stream == stream; }))
      end_captures(stream);
  }
  return lib.malloc(static_cast<ssize_t>(size), device, stream);
}

} // namespace

// cistern_plain_configure says where libcistern.so is and its settings (NULL: those of CISTERN_CONF), before CUDA starts.
CISTERN_EXPORT void cistern_plain_configure(const char* library, const char* settings) {
  if (library != nullptr)
    path = library;
  has_conf = settings != nullptr;
  conf = has_conf ? settings : "";
}

CISTERN_EXPORT void cistern_plain_init(int) { load(); }

CISTERN_EXPORT void* cistern_plain_malloc(std::size_t size, int device, Stream stream) {
  if (size == 0)
    return nullptr;
  load();
  void* p = take(size, device, stream);
  if (p == nullptr) {
    const int code = lib.last_error(nullptr, 0);
    const std::string words = last_words();
    throw std::runtime_error((code == CISTERN_OUT_OF_MEMORY ? "CUDA out of memory. Cistern: " : "Cistern: ") + words);
  }
  return p;
}

// Destructors call this, so it never throws.
CISTERN_EXPORT void cistern_plain_free(void* ptr, std::size_t, int, Stream) {
  if (ptr != nullptr && lib.release != nullptr)
    lib.release(ptr);
}

CISTERN_EXPORT void cistern_plain_reset() {
  if (lib.trim != nullptr && lib.trim(-1) != CISTERN_OK)
    fail(last_words());
}

CISTERN_EXPORT void cistern_plain_memory_fraction(double fraction, int device) {
  load();
  static std::mutex m;
  static std::vector<std::pair<int, std::uint64_t>> own; // the limits of Cistern's settings
  std::lock_guard<std::mutex> lock(m);
  auto it = std::find_if(own.begin(), own.end(), [&](const auto& o) { return o.first == device; });
  if (it == own.end()) {
    std::uint64_t bytes = 0;
    if (lib.get_limit(device, &bytes) != CISTERN_OK)
      fail(last_words());
    it = own.insert(own.end(), {device, bytes});
  }
  std::uint64_t limit = it->second, unused = 0, total = 0;
  if (fraction < 1) {
    if (lib.mem_info(device, &unused, &total) != CISTERN_OK)
      fail(last_words());
    const auto share = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(fraction * static_cast<double>(total)));
    limit = limit == 0 ? share : std::min(limit, share);
  }
  if (lib.set_limit(device, limit) != CISTERN_OK)
    fail(last_words());
}

CISTERN_EXPORT void* cistern_plain_base(void* ptr, std::size_t* size) {
  load();
  void* base = nullptr;
  if (lib.segment_base(ptr, &base, size) != CISTERN_OK)
    fail(last_words());
  return base;
}

CISTERN_EXPORT void cistern_plain_record_stream(void* ptr, Stream stream) {
  if (ptr != nullptr && lib.record_stream != nullptr && lib.record_stream(ptr, stream) == CISTERN_DRIVER)
    fail(last_words());
}

// cistern_plain_to_be_captured says which stream the calling thread is about to capture (NULL: none any more), so that
// cistern_plain_begin_pool announces it before the capture begins: the library can then wait for the pool's memory.
CISTERN_EXPORT void cistern_plain_to_be_captured(Stream stream) { to_be_captured = stream; }

CISTERN_EXPORT void cistern_plain_begin_pool(int device, PoolId id, std::function<bool(Stream)> filter) {
  load();
  std::lock_guard<std::mutex> lock(pools_mutex);
  end_captures(to_be_captured); // also of a capture of this stream that failed
  auto it = std::find_if(pools.begin(), pools.end(), [&](const Pool& p) { return p.device == device && p.id == id; });
  if (it == pools.end()) {
    const std::uint64_t name[2] = {id.first, id.second};
    if (lib.pool_create(device, name, nullptr) != CISTERN_OK)
      fail(last_words());
    it = pools.insert(pools.end(), {device, id, 0});
  }
  if (reinterpret_cast<std::uintptr_t>(to_be_captured) > 1 && !is_capturing(to_be_captured))
    announce(device, id, to_be_captured);
  it->uses++;
  scopes.push_back({device, id, std::move(filter)});
}

CISTERN_EXPORT void cistern_plain_end_pool(int device, PoolId id) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  for (auto s = scopes.rbegin(); s != scopes.rend(); ++s)
    if (s->device == device && s->id == id) {
      scopes.erase(std::next(s).base());
      break;
    }
  end_captures();
}

CISTERN_EXPORT void cistern_plain_release_pool(int device, PoolId id) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  const auto it = std::find_if(pools.begin(), pools.end(), [&](const Pool& p) { return p.device == device && p.id == id; });
  if (it == pools.end() || --it->uses > 0)
    return;
  end_captures();
  pools.erase(it);
  const std::uint64_t name[2] = {id.first, id.second};
  lib.pool_release(device, name);
}
