// pools.cpp: memory pools and CUDA graphs: which requests come from which pool, and when a capture is announced.
//
// A pool is known here from its first use, and to the library from its first allocation, because the kind of
// memory it holds (upstream.cpp) is set in between. A scope sends those requests into a pool that its filter says yes to, the scope opened
// last first, as PyTorch does.
//
// Captures: the library pins a pool's memory once a stream that allocates from it is captured. It wants to know before the
// capture begins, because then it can wait for work that still uses the pool's memory. PyTorch opens the scope of a graph
// right before it starts the capture, so a filter that does not take the current stream yet is the sign of a capture to come.
// Streams that join the capture later are announced when they first allocate.
#include "upstream.h"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace cistern_torch {

namespace {

struct Pool {
  int uses = 0;
  bool users = false;    // made by create_pool first, that is by torch.cuda.MemPool
  bool made = false;     // the library knows it
  bool captured = false; // a graph may use its memory
  uint32_t flags = 0;    // CISTERN_POOL_
  Pointer allocator;
  Source* source = nullptr;
};

// A scope belongs to a thread, or to a capture.
struct Scope {
  MempoolId_t pool;
  std::function<bool(cudaStream_t)> filter;
  std::thread::id thread; // that opened it
  cudaStream_t stream;    // which was current
  bool capture;           // it was opened for a capture of the stream
  bool within;            // the stream was captured already
};

struct Announced {
  cudaStream_t stream;
  MempoolId_t pool;
  std::thread::id thread; // that will begin the capture
  bool begun;             // the stream was seen captured
  bool busy;              // a thread is in the library with it, without the mutex
};

struct DevicePools {
  std::mutex mutex;
  std::unordered_map<MempoolId_t, Pool, PoolHash> pools;
  std::vector<Scope> scopes; // in the order in which they were opened
  std::vector<Announced> captures; // one for a stream
  std::condition_variable idle;    // one of them is not busy any more
  std::vector<MempoolId_t> use_on_oom;
  bool reuse = false; // the library's setting graph_capture_record_stream_reuse
};
using Lock = std::unique_lock<std::mutex>;

DevicePools* devices = nullptr; // never destroyed: see Adapter

// The device for which PyTorch made each torch.cuda.MemPool. It may be used on others, of which PyTorch tells only the scopes:
// there the pool stays between them, empty of users, until it goes at its home. The mutex comes after a device's.
struct Homes {
  std::mutex mutex;
  std::unordered_map<MempoolId_t, DeviceIndex, PoolHash> of;
};
Homes& homes = *new Homes; // never destroyed: see Adapter

bool has_home(MempoolId_t id) {
  std::lock_guard<std::mutex> lock(homes.mutex);
  return homes.of.count(id) != 0;
}

// leave_home says whether the pool was at home on the device, where it has gone.
bool leave_home(DeviceIndex device, MempoolId_t id) {
  std::lock_guard<std::mutex> lock(homes.mutex);
  const auto it = homes.of.find(id);
  if (it == homes.of.end() || it->second != device)
    return false;
  homes.of.erase(it);
  return true;
}
std::atomic<int> busy{0};       // open scopes and announced captures of all devices

void count(int change) {
  // Two threads may cross here; the later one sets what the sum says then.
  static std::mutex m;
  std::lock_guard<std::mutex> lock(m);
  busy += change;
  set_mode(kScopes, busy > 0);
}

// tell makes the library know the pool: its code. The caller holds the device's mutex.
int tell(DeviceIndex device, MempoolId_t id, Pool& p) {
  if (p.made)
    return CISTERN_OK;
  cistern_pool_options o{};
  o.size = sizeof o;
  o.flags = p.flags;
  Source* const source = make_source(id, p.allocator, spec_of(id), &o);
  const int code = lib.pool_create(device, Ids(id), &o);
  if (code != CISTERN_OK) {
    if (source != nullptr)
      source->unref();
    return code;
  }
  p.source = source;
  p.made = true;
  return CISTERN_OK;
}

void make(DeviceIndex device, MempoolId_t id, Pool& p) { check(tell(device, id, p)); }

// find finds the pool. The caller holds the device's mutex.
Pool& find(DevicePools& d, MempoolId_t id) {
  const auto it = d.pools.find(id);
  TORCH_CHECK(it != d.pools.end(), "Could not find pool of id {", id.first, ", ", id.second, "}");
  return it->second;
}

Announced* announced(DevicePools& d, cudaStream_t stream) {
  const auto it = std::find_if(d.captures.begin(), d.captures.end(), [&](const Announced& a) { return a.stream == stream; });
  return it != d.captures.end() ? &*it : nullptr;
}

void forget(DevicePools& d, cudaStream_t stream) {
  d.captures.erase(d.captures.begin() + (announced(d, stream) - d.captures.data()));
  count(-1);
}

// wait_for waits until no thread is in the library with the stream.
void wait_for(Lock& lock, DevicePools& d, cudaStream_t stream) {
  d.idle.wait(lock, [&] {
    const Announced* a = announced(d, stream);
    return a == nullptr || !a->busy;
  });
}

// announce tells the library of a capture, begun or to come. The lock is let go meanwhile; a thread that waits for the stream
// goes on behind it.
void announce(Lock& lock, DeviceIndex device, DevicePools& d, MempoolId_t id, cudaStream_t stream, bool begun) {
  wait_for(lock, d, stream);
  TORCH_CHECK(announced(d, stream) == nullptr, "the stream is being captured already");
  make(device, id, find(d, id));
  const bool reuse = reuse_in_captures(); // programs change it at run time
  if (reuse != d.reuse)
    check(lib.capture_reuse(device, reuse));
  d.reuse = reuse;
  d.captures.push_back({stream, id, std::this_thread::get_id(), begun, true});
  count(1);
  lock.unlock();
  int code;
  {
    Recorded recorded(nullptr, nullptr);
    code = lib.capture_begin(device, Ids(id), stream);
  }
  lock.lock();
  if (code == CISTERN_OK) {
    announced(d, stream)->busy = false;
    find(d, id).captured = true; // an announcement keeps its pool
  } else {
    forget(d, stream);
  }
  d.idle.notify_all();
  check(code);
}

// join announces the capture that the stream is in, unless that was done.
void join(Lock& lock, DeviceIndex device, DevicePools& d, MempoolId_t id, cudaStream_t stream) {
  wait_for(lock, d, stream);
  if (Announced* a = announced(d, stream))
    a->begun = true;
  else
    announce(lock, device, d, id, stream, true);
}

// take_unused takes the pool out of the list if it is not in use any more. The caller holds the device's mutex, and calls end
// without it.
bool take_unused(DevicePools& d, MempoolId_t id, Pool* out) {
  const auto it = d.pools.find(id);
  if (it == d.pools.end() || it->second.uses > 0 || (!it->second.users && has_home(id)) ||
      std::any_of(d.captures.begin(), d.captures.end(), [&](const Announced& a) { return a.pool == id; }))
    return false;
  *out = std::move(it->second);
  d.pools.erase(it);
  return true;
}

// let_go tells the library that the pool is gone. No pool's lock is held.
void let_go(DeviceIndex device, MempoolId_t id, const Pool& gone) {
  if (!gone.made)
    return;
  {
    // The memory of a torch.cuda.MemPool goes back to the driver with it, that of graphs stays cached for others.
    Recorded recorded(cca::RecordContext::ALL);
    int code = gone.users && !gone.captured ? lib.pool_trim(device, Ids(id)) : CISTERN_OK;
    if (code == CISTERN_OK)
      code = lib.pool_release(device, Ids(id));
    warn(code, "the release of a pool");
  }
  if (gone.source != nullptr)
    gone.source->unref();
}

// end ends a pool that was taken out, and with a torch.cuda.MemPool what it left on other devices. No pool's lock is held.
void end(DeviceIndex device, MempoolId_t id, const Pool& gone) {
  const bool was_home = leave_home(device, id); // first: a scope elsewhere that ends from now on ends the pool there
  if (gone.users)
    forget_spec(device, id);
  let_go(device, id, gone);
  for (int i = 0; was_home && i < device_count; i++) {
    Pool abroad;
    {
      std::lock_guard<std::mutex> lock(devices[i].mutex);
      const auto it = devices[i].pools.find(id);
      if (it == devices[i].pools.end())
        continue;
      it->second.users = true; // as at home
      if (!take_unused(devices[i], id, &abroad))
        continue;
    }
    let_go(static_cast<DeviceIndex>(i), id, abroad);
  }
}

// over says whether the announcement is of a capture that has ended, failed or will not begin. One that was not seen may be
// about to begin: between the two the thread that announced it does not come here, and the stream is not used.
bool over(Announced& a, cudaStream_t used) {
  if (is_capturing(a.stream)) {
    a.begun = true;
    return false;
  }
  return a.begun || a.thread == std::this_thread::get_id() || a.stream == used;
}

// end_captures ends the announcements of captures that are over; used is a stream that the calling thread uses. The lock is released
// meanwhile.
void end_captures(Lock& lock, DeviceIndex device, DevicePools& d, cudaStream_t used = nullptr) {
  for (size_t i = 0; i < d.captures.size();) {
    Announced& a = d.captures[i];
    if (a.busy || !over(a, used)) {
      i++;
      continue;
    }
    a.busy = true;
    const cudaStream_t stream = a.stream;
    const MempoolId_t id = a.pool;
    lock.unlock();
    int code;
    {
      Recorded recorded(nullptr, nullptr);
      code = lib.capture_end(device, stream);
    }
    lock.lock();
    forget(d, stream);
    d.idle.notify_all();
    Pool gone;
    const bool unused = take_unused(d, id, &gone);
    lock.unlock();
    if (unused)
      end(device, id, gone);
    warn(code, "the end of a capture");
    lock.lock();
    i = 0;
  }
}

// scope_to_end finds the scope of the pool that the calling thread ends, of which PyTorch says no more. A graph's ends right
// after its capture, with the stream current. Of several that fit, it is the last that was opened while the stream was in the
// state in which it is now: a scope opened within a capture ends within it.
std::vector<Scope>::iterator scope_to_end(DevicePools& d, MempoolId_t id, cudaStream_t current) {
  const bool captured = is_capturing(current);
  auto found = d.scopes.end();
  int best = -1;
  for (auto s = d.scopes.begin(); s != d.scopes.end(); ++s) {
    if (s->pool != id)
      continue;
    const bool mine = s->capture ? s->stream == current && !captured : s->thread == std::this_thread::get_id();
    const int fits = 2 * mine + (s->within == captured);
    if (fits >= best) {
      best = fits;
      found = s;
    }
  }
  return found;
}

DevicePools& of(DeviceIndex device) {
  check_device(device);
  return devices[device];
}

} // namespace

void pools_init(int n) { devices = new DevicePools[static_cast<size_t>(std::max(n, 1))]; }

// A stream whose capture was invalidated still counts: it is captured until the capture is ended. The legacy default stream
// cannot be captured, and must not be asked.
bool is_capturing(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy)
    return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (C10_CUDA_ERROR_HANDLED(cudaStreamIsCapturing(stream, &status)) != cudaSuccess) {
    C10_CUDA_CLEAR_ERROR();
    return status != cudaStreamCaptureStatusNone;
  }
  return status != cudaStreamCaptureStatusNone;
}

void route(Request* r) {
  DevicePools& d = of(r->device);
  Lock lock(d.mutex);
  for (auto s = d.scopes.rbegin(); s != d.scopes.rend(); ++s) {
    if (!s->filter(r->stream) || is_asking(r->device, s->pool))
      continue;
    r->pooled = true;
    r->pool = s->pool;
    make(r->device, r->pool, find(d, r->pool));
    if (is_capturing(r->stream))
      join(lock, r->device, d, r->pool, r->stream);
    return;
  }
  // What a capture that never began, or failed, left behind would send this stream's requests into its pool.
  if (!d.captures.empty())
    end_captures(lock, r->device, d, r->stream);
}

void Adapter::create_pool(DeviceIndex device, MempoolId_t id, Pointer allocator) {
  DevicePools& d = of(device);
  std::lock_guard<std::mutex> lock(d.mutex);
  const bool other = allocator && allocator.get() != this; // this one under itself would be no other memory
  const auto [it, is_new] = d.pools.try_emplace(id);
  Pool& p = it->second;
  TORCH_CHECK(!other || !p.made, "a pool that is in use cannot be given an allocator");
  p.uses++;
  if (other)
    p.allocator = std::move(allocator);
  if (is_new) {
    p.users = true;
    std::lock_guard<std::mutex> at_home(homes.mutex);
    homes.of.emplace(id, device);
  }
}

void Adapter::set_no_split(DeviceIndex device, MempoolId_t id) {
  DevicePools& d = of(device);
  std::lock_guard<std::mutex> lock(d.mutex);
  Pool& p = find(d, id);
  TORCH_CHECK(!p.made || p.flags & CISTERN_POOL_NO_SPLIT, "no_split must be set before the pool is used");
  p.flags |= CISTERN_POOL_NO_SPLIT;
}

void Adapter::use_pool_on_oom(DeviceIndex device, MempoolId_t id, bool use) {
  if (mode.load() & kForked)
    return; // destructors call this
  DevicePools& d = of(device);
  std::lock_guard<std::mutex> lock(d.mutex);
  auto& list = d.use_on_oom;
  list.erase(std::remove(list.begin(), list.end(), id), list.end());
  if (use)
    list.push_back(id);
}

int Adapter::getPoolUseCount(DeviceIndex device, MempoolId_t id) {
  DevicePools& d = of(device);
  std::lock_guard<std::mutex> lock(d.mutex);
  return find(d, id).uses;
}

std::vector<MempoolId_t> pools_for_oom(DeviceIndex device) {
  DevicePools& d = of(device);
  std::lock_guard<std::mutex> lock(d.mutex);
  std::vector<MempoolId_t> out;
  for (const MempoolId_t& id : d.use_on_oom) {
    const auto it = d.pools.find(id);
    if (it != d.pools.end() && it->second.made)
      out.push_back(id);
  }
  return out;
}

bool pool_known(DeviceIndex device, MempoolId_t id) {
  DevicePools& d = devices[device];
  std::lock_guard<std::mutex> lock(d.mutex);
  const auto it = d.pools.find(id);
  return it != d.pools.end() && it->second.made;
}

std::vector<MempoolId_t> pools_known(DeviceIndex device) {
  DevicePools& d = devices[device];
  std::lock_guard<std::mutex> lock(d.mutex);
  std::vector<MempoolId_t> out;
  for (const auto& [id, pool] : d.pools)
    if (pool.made)
      out.push_back(id);
  return out;
}

void Adapter::beginAllocateToPool(DeviceIndex device, MempoolId_t id, std::function<bool(cudaStream_t)> filter) {
  DevicePools& d = of(device);
  touch(device);
  const cudaStream_t current = c10::cuda::getCurrentCUDAStream(device).stream();
  Pointer allocator = active_allocator(id);
  if (allocator.get() == this)
    allocator = nullptr;
  Lock lock(d.mutex);
  end_captures(lock, device, d, current); // also of a capture of this stream that failed
  const bool within = is_capturing(current);
  const bool capture_follows = current != nullptr && current != cudaStreamLegacy && !within && !filter(current);
  Pool& p = d.pools[id];
  p.uses++;
  if (!p.made && !p.allocator)
    p.allocator = allocator;
  try {
    if (capture_follows)
      announce(lock, device, d, id, current, false);
    d.scopes.push_back({id, std::move(filter), std::this_thread::get_id(), current, capture_follows, within});
  } catch (...) {
    d.pools[id].uses--;
    Pool gone;
    const bool unused = take_unused(d, id, &gone);
    lock.unlock();
    if (unused)
      end(device, id, gone);
    throw;
  }
  count(1);
}

void Adapter::endAllocateToPool(DeviceIndex device, MempoolId_t id) {
  DevicePools& d = of(device);
  const cudaStream_t current = c10::cuda::getCurrentCUDAStream(device).stream();
  Lock lock(d.mutex);
  const auto found = scope_to_end(d, id, current);
  TORCH_CHECK(found != d.scopes.end(), "endAllocatePool: not currently recording to mempool_id");
  d.scopes.erase(found);
  count(-1);
  end_captures(lock, device, d, current);
}

void Adapter::releasePool(DeviceIndex device, MempoolId_t id) {
  if (mode.load() & kForked)
    return; // destructors call this
  DevicePools& d = of(device);
  Pool gone;
  {
    Lock lock(d.mutex);
    Pool& p = find(d, id);
    if (--p.uses > 0)
      return;
    end_captures(lock, device, d);
    if (!take_unused(d, id, &gone))
      return; // the end of a capture ends it, or its home
  }
  end(device, id, gone);
}

// The options of a pool that PyTorch does not have: its upstream, its limit, and the function to ask when it is out of
// memory. The pool is as PyTorch just made it, and becomes known to the library here, so that errors are found at once.
// The result is the library's code; *words says what is wrong, valid until the thread asks again.
extern "C" __attribute__((visibility("default"))) int cistern_torch_pool(int device, unsigned long long first,
                                                                         unsigned long long second, const PoolWanted* wanted,
                                                                         const char** words) {
  thread_local std::string answer;
  const MempoolId_t id{first, second};
  int code = CISTERN_INTERNAL;
  try {
    const auto spec = std::make_shared<const Spec>(*wanted); // first: whatever happens, its end is notified
    const auto home = static_cast<DeviceIndex>(device);
    TORCH_CHECK(adapter != nullptr && adapter->initialized(), "CUDA is not started in this process");
    check_device(home);
    touch(home);
    DevicePools& d = devices[device];
    std::lock_guard<std::mutex> lock(d.mutex);
    const auto it = d.pools.find(id);
    if (it == d.pools.end() || it->second.made) {
      code = CISTERN_INVALID;
      answer = it == d.pools.end() ? "there is no such pool" : "the pool is in use already";
    } else if (it->second.allocator && (wanted->options.alloc != nullptr || wanted->options.upstream != nullptr)) {
      code = CISTERN_INVALID;
      answer = "a pool has one upstream: its allocator is given already";
    } else {
      remember_spec(home, id, spec);
      code = tell(home, id, it->second);
      if (code != CISTERN_OK) {
        answer = last_words();
        forget_spec(home, id);
      }
    }
  } catch (const c10::Error& e) {
    answer = e.what_without_backtrace();
  } catch (const std::exception& e) {
    answer = e.what();
  } catch (...) {
    answer = "an unknown exception";
  }
  *words = answer.c_str();
  return code;
}

} // namespace cistern_torch
