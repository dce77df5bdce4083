// upstreams.cpp: pools whose memory comes from an upstream by name or from functions of the program's own, their limits, where
// they go on when out of memory, which function they ask, and what is kept for how long.
#include "check.h"

#include "../../cistern/adapter/upstream.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <set>

namespace {

using cistern_torch::PoolWanted;
using Tell = int(int, unsigned long long, unsigned long long, const PoolWanted*, const char**);
Tell* tell;
std::atomic<int> dropped;

PoolWanted wanted() {
  PoolWanted w{};
  w.options.size = sizeof w.options;
  w.dropped = [](void* token) { dropped += static_cast<int>(reinterpret_cast<intptr_t>(token)); };
  w.token = reinterpret_cast<void*>(1);
  return w;
}

struct Scope {
  Pool id;
  c10::DeviceIndex device;
  explicit Scope(Pool id, c10::DeviceIndex device = 0) : id(id), device(device) {
    cca::beginAllocateToPool(device, id, this_thread());
  }
  ~Scope() {
    cca::endAllocateToPool(device, id);
    cca::releasePool(device, id);
  }
};

// As torch.cuda.MemPool begins and ends, with what cistern.torch.MemPool says in between.
struct MemPool {
  Pool id;
  explicit MemPool(const PoolWanted& w) : id{0, ++last} {
    cca::createOrIncrefPool(0, id);
    const char* words = "";
    const int code = tell(0, id.first, id.second, &w, &words);
    if (code != CISTERN_OK)
      printf("code %d: %s\n", code, words);
    CHECK(code == CISTERN_OK);
  }
  ~MemPool() {
    cca::setUseOnOOM(0, id, false);
    cca::releasePool(0, id);
    cca::emptyCache(id);
  }
  static unsigned long long last;
};
unsigned long long MemPool::last = 0;

size_t segments(Pool id) { return cca::snapshot(id).segments.size(); }

void by_name() {
  for (const char* name : {"device", "virtual", "async", "managed", "pinned", "host_numa", "nccl", "statistics|device"}) {
    PoolWanted w = wanted();
    w.options.upstream = name;
    const int before = dropped;
    void *p, *q;
    {
      MemPool pool(w);
      CHECK(segments(pool.id) == 0);
      {
        Scope scope(pool.id);
        p = cca::raw_alloc(3 * MiB);
        q = cca::raw_alloc(700);
      }
      void* outside = cca::raw_alloc(3 * MiB);
      CHECK(segments(pool.id) >= 1);
      for (const auto& s : cca::snapshot(pool.id).segments)
        CHECK(!s.is_expandable && cca::order(s) > 0 && s.device == 0);
      size_t inside = 0;
      for (const auto& s : cca::snapshot(pool.id).segments)
        inside += s.allocated_size;
      CHECK(inside == 3 * MiB + 1024);
      cca::raw_delete(outside);
      std::thread([&] { cca::raw_delete(q); }).join();
    }
    CHECK(dropped == before + 1); // nothing of the program's is called for it
    cca::raw_delete(p);           // memory outlives the pool
    cca::emptyCache();
    CHECK(reserved() == 0);
  }
}

void bad_words() {
  const Pool id{0, 900};
  const char* words = "";
  const auto refused = [&](PoolWanted w, const char* part) {
    const int before = dropped;
    cca::createOrIncrefPool(0, id);
    const int code = tell(0, id.first, id.second, &w, &words);
    if (code == CISTERN_OK || strstr(words, part) == nullptr) {
      failures++;
      printf("code %d, words \"%s\" lack \"%s\"\n", code, words, part);
    }
    CHECK(dropped == before + 1);
    CHECK(strchr(words, '\n') == nullptr);
    cca::releasePool(0, id);
  };
  PoolWanted w = wanted();
  w.options.upstream = "moon";
  refused(w, "moon");
  w.options.upstream = "limiting:bytes=much|device";
  refused(w, "much");
  w = wanted();
  w.options.spill = "nowhere";
  refused(w, "nowhere");
  w = wanted();
  w.options.upstream = "device";
  w.options.flags = CISTERN_POOL_IPC_LEGACY;
  refused(w, "");
  // Of pools that are not there, or in use.
  w = wanted();
  const int before = dropped;
  CHECK(tell(0, 0, 901, &w, &words) == CISTERN_INVALID && strstr(words, "no such pool") != nullptr);
  CHECK(tell(9, 0, 901, &w, &words) != CISTERN_OK);
  CHECK(dropped == before + 2);
  cca::createOrIncrefPool(0, id);
  {
    Scope scope(id);
    cca::raw_delete(cca::raw_alloc(MiB));
    CHECK(tell(0, id.first, id.second, &w, &words) == CISTERN_INVALID && strstr(words, "in use") != nullptr);
  }
  cca::releasePool(0, id);
}

void kinds() {
  for (const unsigned flags : {CISTERN_POOL_IPC_LEGACY, CISTERN_POOL_SINGLE_HANDLE}) {
    PoolWanted w = wanted();
    w.options.flags = flags;
    MemPool pool(w);
    Scope scope(pool.id);
    void *p = cca::raw_alloc(MiB), *q = cca::raw_alloc(MiB);
    const auto segments = cca::snapshot(pool.id).segments;
    CHECK(segments.size() == 1 && !segments[0].is_expandable);
    for (void* x : {p, q}) { // a handle of its memory begins where the segment does
      size_t size = 0;
      CHECK(cca::getBaseAllocation(x, &size) == reinterpret_cast<void*>(segments[0].address) && size == segments[0].total_size);
      CHECK(cca::getBaseAllocation(x, nullptr) == reinterpret_cast<void*>(segments[0].address));
      cca::raw_delete(x);
    }
    THROWS(c10::Error, "invalid device pointer", cca::getBaseAllocation(q, nullptr));
  }
  cca::emptyCache();
  CHECK(reserved() == 0);
}

void limits() {
  PoolWanted w = wanted();
  w.options.limit = 100 * MiB;
  {
    MemPool pool(w);
    Scope scope(pool.id);
    void* p = cca::raw_alloc(60 * MiB);
    OUT_OF_MEMORY(cca::raw_alloc(60 * MiB));
    cca::raw_delete(p);
    p = cca::raw_alloc(80 * MiB); // what the pool caches is given up
    cca::raw_delete(p);
  }
  w.options.spill = "pinned";
  void* spilled;
  {
    MemPool pool(w);
    Scope scope(pool.id);
    void* p = cca::raw_alloc(60 * MiB);
    spilled = cca::raw_alloc(60 * MiB);
    CHECK(spilled != nullptr && stats().num_ooms >= 1);
    cca::raw_delete(p);
  }
  cca::raw_delete(spilled);
  cca::emptyCache();
  CHECK(reserved() == 0);
}

// A pool that is used on a device for which it was not made, of which PyTorch tells only the scopes.
void abroad() {
  PoolWanted w = wanted();
  w.options.upstream = "device";
  w.options.limit = 100 * MiB;
  const int before = dropped;
  void *here, *there, *more;
  Pool id;
  {
    MemPool pool(w);
    id = pool.id;
    {
      Scope scope(pool.id);
      here = cca::raw_alloc(60 * MiB);
    }
    c10::cuda::CUDAGuard other(1);
    {
      Scope scope(pool.id, 1);
      there = cca::raw_alloc(60 * MiB);
      more = cca::raw_alloc(20 * MiB);
      OUT_OF_MEMORY(cca::raw_alloc(60 * MiB)); // a limit of its own
    }
    std::set<int> devices;
    for (const auto& s : cca::snapshot(pool.id).segments)
      devices.insert(s.device);
    CHECK(devices == (std::set<int>{0, 1}));
    cca::raw_delete(more);
    {
      Scope again(pool.id, 1);
      void* p = cca::raw_alloc(20 * MiB);
      CHECK(p == more); // what the pool cached there
      OUT_OF_MEMORY(cca::raw_alloc(60 * MiB));
      cca::raw_delete(p);
    }
    CHECK(stats(1).reserved_bytes[0].current >= static_cast<int64_t>(80 * MiB));
  }
  CHECK(dropped == before + 1);
  CHECK(segments(id) == 2); // the pool is gone, what is out of it is not; what it cached is, on both
  CHECK(stats(1).reserved_bytes[0].current < static_cast<int64_t>(80 * MiB));
  cca::raw_delete(here);
  cca::raw_delete(there);
  cca::emptyCache();
  CHECK(segments(id) == 0 && reserved() == 0 && stats(1).reserved_bytes[0].current == 0);
  void* p;
  {
    MemPool pool(w); // one that goes while it is in use abroad
    id = pool.id;
    c10::cuda::CUDAGuard other(1);
    cca::beginAllocateToPool(1, id, this_thread());
    p = cca::raw_alloc(60 * MiB);
  }
  cca::raw_delete(p);
  cca::endAllocateToPool(1, id);
  CHECK(cca::getPoolUseCount(1, id) == 1);
  cca::releasePool(1, id);
  THROWS(c10::Error, "Could not find pool", cca::getPoolUseCount(1, id));
  cca::emptyCache();
  CHECK(stats(1).reserved_bytes[0].current == 0 && dropped == before + 2);
}

// Functions of the program's own.
struct Own {
  std::set<void*> out;
  std::mutex mutex;
  int allocs = 0, frees = 0, wrong = 0;
  bool empty = false;
  static void* alloc(void* ctx, size_t size, int device, void* stream) {
    auto* o = static_cast<Own*>(ctx);
    std::lock_guard<std::mutex> lock(o->mutex);
    c10::DeviceIndex current = -1;
    CHECK(c10::cuda::GetDevice(&current) == cudaSuccess && current == device);
    (void)stream;
    if (o->empty)
      return nullptr;
    o->allocs++;
    void* p = aligned_alloc(512, (size + 511) / 512 * 512);
    o->out.insert(p);
    return p;
  }
  static void free(void* ctx, void* ptr, size_t, int device, void*) {
    auto* o = static_cast<Own*>(ctx);
    std::lock_guard<std::mutex> lock(o->mutex);
    c10::DeviceIndex current = -1;
    CHECK(c10::cuda::GetDevice(&current) == cudaSuccess && current == device);
    o->frees++;
    o->wrong += o->out.erase(ptr) == 1 ? 0 : 1;
    ::free(ptr);
  }
};

int bare_allocs, bare_frees;
void* bare_alloc(ssize_t size, int device, cudaStream_t) {
  CHECK(size > 0 && device == 0);
  bare_allocs++;
  return aligned_alloc(512, (static_cast<size_t>(size) + 511) / 512 * 512);
}
void bare_free(void* ptr, ssize_t size, int device, cudaStream_t) {
  CHECK(size > 0 && device == 0);
  bare_frees++;
  free(ptr);
}

void functions() {
  Own own;
  PoolWanted w = wanted();
  w.options.alloc = Own::alloc;
  w.options.free = Own::free;
  w.options.ctx = &own;
  const int before = dropped;
  void *first, *second, *other;
  {
    MemPool pool(w);
    {
      Scope scope(pool.id);
      first = cca::raw_alloc(30 * MiB);
      std::thread([&] { // another pool's scope in another thread, at once
        PoolWanted x = wanted();
        MemPool inner(x);
        Scope there(inner.id);
        void* p = cca::raw_alloc(30 * MiB);
        CHECK(own.out.count(p) == 0);
        cca::raw_delete(p);
      }).join();
      own.empty = true;
      OUT_OF_MEMORY(cca::raw_alloc(300 * MiB));
      own.empty = false;
    }
    {
      c10::cuda::CUDAGuard guard(1);
      Scope scope(pool.id, 1); // the same pool on another device
      second = cca::raw_alloc(5 * MiB);
    }
    CHECK(own.out.size() == 2);
    other = cca::raw_alloc(30 * MiB);
    CHECK(own.out.count(other) == 0);
  }
  CHECK(dropped == before + 1); // of the other thread's pool; of this one memory lives
  cca::raw_delete(other);
  cca::raw_delete(first);
  std::thread([&] { cca::raw_delete(second); }).join();
  cca::emptyCache();
  CHECK(own.allocs == 2 && own.frees == 2 && own.wrong == 0);
  CHECK(dropped == before + 2);

  w = wanted();
  w.bare = 1;
  w.options.alloc = reinterpret_cast<decltype(w.options.alloc)>(reinterpret_cast<void*>(&bare_alloc));
  w.options.free = reinterpret_cast<decltype(w.options.free)>(reinterpret_cast<void*>(&bare_free));
  {
    MemPool pool(w);
    Scope scope(pool.id);
    cca::raw_delete(cca::raw_alloc(MiB));
  }
  CHECK(bare_allocs == 1 && bare_frees == 1 && dropped == before + 3);
}

// A callback that frees, allocates, and wants a lock that another thread holds which waits for a call of the allocator: as the
// interpreter's does.
struct Helper {
  std::mutex interpreter;
  void* held = nullptr;
  int asked = 0;
  uint64_t missing = 0;
  Pool pool{0, 0};
  static int ask(void* ctx, int device, uint64_t missing) {
    auto* h = static_cast<Helper*>(ctx);
    std::lock_guard<std::mutex> lock(h->interpreter);
    CHECK(device == 0);
    h->asked++;
    h->missing = missing;
    void* p = cca::raw_alloc(MiB); // not of the pool, whose scope this thread is in
    for (const auto& s : cca::snapshot(h->pool).segments)
      CHECK(!(s.address <= reinterpret_cast<size_t>(p) && reinterpret_cast<size_t>(p) < s.address + s.total_size));
    cca::raw_delete(p);
    if (h->held == nullptr)
      return 0;
    cca::raw_delete(h->held);
    h->held = nullptr;
    return 1;
  }
};

void callbacks(bool recorded) {
  if (recorded)
    cca::recordHistory(true, [] { return std::shared_ptr<c10::GatheredContext>(); }, 1000, cca::RecordContext::NEVER, true, {});
  Helper h;
  PoolWanted w = wanted();
  w.options.limit = 100 * MiB;
  w.options.on_out_of_memory = Helper::ask;
  w.options.on_out_of_memory_ctx = &h;
  const int before = dropped;
  {
    MemPool pool(w);
    h.pool = pool.id;
    std::atomic<bool> stop{false};
    std::thread python([&] { // frees while it holds the interpreter's lock
      while (!stop) {
        std::lock_guard<std::mutex> lock(h.interpreter);
        cca::raw_delete(cca::raw_alloc(MiB));
      }
    });
    {
      Scope scope(pool.id);
      for (int i = 0; i < 50; i++) {
        h.held = cca::raw_alloc(70 * MiB);
        void* p = cca::raw_alloc(70 * MiB);
        CHECK(h.held == nullptr && h.missing > 0);
        OUT_OF_MEMORY(cca::raw_alloc(70 * MiB));
        cca::raw_delete(p);
      }
    }
    CHECK(h.asked >= 100);
    stop = true;
    python.join();
  }
  CHECK(dropped == before + 1);
  if (recorded) {
    size_t ooms = 0, allocs = 0;
    const auto all = cca::snapshot();
    for (const auto& te : all.device_traces[0]) {
      ooms += te.action_ == cca::TraceEntry::OOM;
      allocs += te.action_ == cca::TraceEntry::ALLOC;
    }
    CHECK(ooms > 0 && allocs > 0);
    cca::recordHistory(false, nullptr, 0, cca::RecordContext::NEVER, true, {});
  }
  cca::emptyCache();
  CHECK(reserved() == 0);
}

// A callback that throws has failed; the thread's next requests come from the pool as before.
void callback_throws() {
  PoolWanted w = wanted();
  w.options.limit = 100 * MiB;
  w.options.on_out_of_memory = [](void*, int, uint64_t) -> int { throw std::runtime_error("a callback that fails"); };
  MemPool pool(w);
  Scope scope(pool.id);
  OUT_OF_MEMORY(cca::raw_alloc(200 * MiB));
  void* p = cca::raw_alloc(60 * MiB);
  const auto all = cca::snapshot(pool.id).segments;
  CHECK(all.size() == 1 && all[0].allocated_size == 60 * MiB);
  cca::raw_delete(p);
}

// What the device asks, through the adapter, when Python's function is registered with the library itself.
std::mutex interpreter;
void* cached;
int ask_python(void* ctx, int device, uint64_t) {
  std::lock_guard<std::mutex> lock(interpreter);
  CHECK(ctx == nullptr && device == 0);
  void* const p = cached;
  cached = nullptr;
  cca::raw_delete(p);
  return p != nullptr;
}

void device_asks(const char* library) {
  void* const lib = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  auto* on = reinterpret_cast<decltype(&cistern_on_out_of_memory)>(dlsym(lib, "cistern_on_out_of_memory"));
  auto* off = reinterpret_cast<decltype(&cistern_off_out_of_memory)>(dlsym(lib, "cistern_off_out_of_memory"));
  auto* through = function<int(void*, int, uint64_t)>("cistern_torch_asks");
  CHECK(on(0, through, reinterpret_cast<void*>(&ask_python)) == CISTERN_OK);
  cca::recordHistory(true, [] { return std::shared_ptr<c10::GatheredContext>(); }, 1000, cca::RecordContext::NEVER, true, {});
  std::atomic<bool> stop{false};
  std::thread python([&] {
    while (!stop) {
      std::lock_guard<std::mutex> lock(interpreter);
      cca::raw_delete(cca::raw_alloc(MiB));
    }
  });
  for (int i = 0; i < 50; i++) {
    cached = cca::raw_alloc(5 * GiB);
    cca::raw_delete(cca::raw_alloc(6 * GiB));
    CHECK(cached == nullptr);
  }
  stop = true;
  python.join();
  cca::recordHistory(false, nullptr, 0, cca::RecordContext::NEVER, true, {});
  CHECK(off(0, through, reinterpret_cast<void*>(&ask_python)) == CISTERN_OK);
  cca::emptyCache();
  CHECK(reserved() == 0);
}

void captures() {
  const auto stream = some_stream();
  c10::cuda::CUDAStreamGuard guard(stream);
  PoolWanted w = wanted();
  w.options.upstream = "virtual";
  MemPool pool(w);
  cca::beginAllocateToPool(0, pool.id, captured);
  test_capture(stream.stream(), 1);
  void* p = cca::raw_alloc(20 * MiB);
  test_capture(stream.stream(), 0);
  cca::endAllocateToPool(0, pool.id);
  cca::raw_delete(p);
  cca::emptyCache(pool.id);
  CHECK(segments(pool.id) == 1); // the graph uses it, free or not
  cca::releasePool(0, pool.id);
}

// The interpreter ends a thread that wants its lock after its end, as daemon threads do: up to 3.13 by pthread_exit. Whatever
// function of the program's it is in, the process ends as it would without.
struct Daemon {
  enum Where { alloc, free, pool_asks, device_asks, dropped } where;
  const char* library;
  std::atomic<int> thread{0};
  static Daemon* now;
  static void end() {
    now->thread = static_cast<int>(syscall(SYS_gettid));
    pthread_exit(nullptr);
  }
  static void* run(void*) {
    PoolWanted w = wanted();
    if (now->where == alloc || now->where == free) {
      w.options.alloc = [](void*, size_t size, int, void*) {
        if (now->where == alloc)
          end();
        return aligned_alloc(512, (size + 511) / 512 * 512);
      };
      w.options.free = [](void*, void*, size_t, int, void*) { end(); };
    }
    w.options.limit = 100 * MiB;
    w.options.on_out_of_memory = [](void*, int, uint64_t) -> int { return end(), 0; };
    w.dropped = [](void*) { end(); };
    if (now->where == device_asks) {
      auto* on = reinterpret_cast<decltype(&cistern_on_out_of_memory)>(
          dlsym(dlopen(now->library, RTLD_NOW | RTLD_NOLOAD), "cistern_on_out_of_memory"));
      int (*asks)(void*, int, uint64_t) = [](void*, int, uint64_t) -> int { return end(), 0; };
      on(0, function<int(void*, int, uint64_t)>("cistern_torch_asks"), reinterpret_cast<void*>(asks));
      cca::raw_alloc(100 * GiB);
    }
    MemPool pool(w);
    Scope scope(pool.id);
    cca::raw_delete(cca::raw_alloc(now->where == pool_asks ? 200 * MiB : MiB));
    if (now->where == free)
      cca::emptyCache(pool.id);
    return nullptr;
  }
};
Daemon* Daemon::now;

// The state of a thread as the kernel has it: S where it sleeps, 0 where there is none.
char state(int thread) {
  char line[256] = "";
  if (FILE* f = fopen(("/proc/self/task/" + std::to_string(thread) + "/stat").c_str(), "r")) {
    if (fgets(line, sizeof line, f) == nullptr)
      line[0] = 0;
    fclose(f);
  }
  const char* end = strrchr(line, ')');
  return end != nullptr ? end[2] : 0;
}

void daemon_threads(const char* library) {
  for (const auto where : {Daemon::alloc, Daemon::free, Daemon::pool_asks, Daemon::device_asks, Daemon::dropped}) {
    fflush(stdout);
    const pid_t child = fork(); // before CUDA is started, in a process for each
    if (child == 0) {
      cca::init(2);
      tell = function<Tell>("cistern_torch_pool");
      Daemon daemon{where, library};
      Daemon::now = &daemon;
      pthread_t thread;
      pthread_create(&thread, nullptr, Daemon::run, nullptr);
      while (daemon.thread == 0 || state(daemon.thread) == 'R') // until it has ended, or never will
        std::this_thread::yield();
      function<void()>("cistern_torch_python_ends")();
      void* p = cca::raw_alloc(64 * MiB); // what is left of the program goes on
      cca::snapshot();
      cca::raw_delete(p);
      cca::emptyCache();
      exit(failures != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

// Functions as Python's are: they take the interpreter's lock, which a thread may have that is within the allocator, or waits for it.
struct Interpreted {
  std::recursive_mutex interpreter;
  size_t out = 0, allocs = 0;
  uintptr_t next = uintptr_t{1} << 44;
  std::set<void*> live;
  static void* alloc(void* ctx, size_t size, int device, void*) {
    auto* me = static_cast<Interpreted*>(ctx);
    std::lock_guard<std::recursive_mutex> lock(me->interpreter);
    CHECK(device == 0 || device == 1);
    me->allocs++;
    if (me->out + size > 512 * MiB)
      return nullptr;
    me->out += size;
    void* p = reinterpret_cast<void*>(me->next);
    me->next += (size + 2 * MiB) & ~(2 * MiB - 1);
    me->live.insert(p);
    return p;
  }
  static void free(void* ctx, void* p, size_t size, int, void*) {
    auto* me = static_cast<Interpreted*>(ctx);
    std::lock_guard<std::recursive_mutex> lock(me->interpreter);
    CHECK(me->live.erase(p) == 1);
    me->out -= size;
  }
};

// All of PyTorch's memory is from such functions, in a process of its own. Threads that have the interpreter's lock and threads
// that do not allocate, free, empty the cache and read statistics; none waits for ever for another.
void everywhere() {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    auto& python = *new Interpreted;
    PoolWanted w = wanted();
    w.options.alloc = Interpreted::alloc;
    w.options.free = Interpreted::free;
    w.options.ctx = &python;
    auto* upstream = function<int(const PoolWanted*)>("cistern_torch_upstream");
    CHECK(upstream(&w) == 1);
    cca::init(2);
    CHECK(upstream(&w) == 0); // too late
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
      threads.emplace_back([&python, t] {
        std::vector<void*> mine;
        for (int i = 0; i < 300; i++) {
          std::unique_lock<std::recursive_mutex> lock(python.interpreter, std::defer_lock);
          if ((i + t) % 3 == 0)
            lock.lock();
          try {
            mine.push_back(cca::raw_alloc(static_cast<size_t>(i * 37 + t) % 60 * MiB / 2 + 700));
          } catch (const c10::OutOfMemoryError&) {
          }
          if (mine.size() > 4 || i % 7 == 0) {
            for (void* p : mine)
              cca::raw_delete(p);
            mine.clear();
          }
          if (i % 11 == t)
            cca::emptyCache();
          if (i % 13 == 0)
            cca::snapshot();
        }
        for (void* p : mine)
          cca::raw_delete(p);
      });
    for (auto& t : threads)
      t.join();
    {
      MemPool pool(wanted()); // a pool that says nothing has that memory too
      Scope scope(pool.id);
      const size_t before = python.allocs;
      void* p = cca::raw_alloc(64 * MiB);
      CHECK(python.allocs > before && cca::snapshot(pool.id).segments.size() == 1);
      cca::raw_delete(p);
    }
    cca::emptyCache();
    CHECK(python.out == 0 && python.live.empty() && python.allocs > 0);
    void* p = cca::raw_alloc(64 * MiB);
    function<void()>("cistern_torch_python_ends")();
    OUT_OF_MEMORY(cca::raw_alloc(100 * MiB));
    cca::raw_delete(p);
    cca::emptyCache(); // which calls nothing
    CHECK(python.live.size() == 1);
    exit(failures != 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void end_of_python() {
  Own own;
  PoolWanted w = wanted();
  w.options.alloc = Own::alloc;
  w.options.free = Own::free;
  w.options.ctx = &own;
  const int before = dropped;
  {
    MemPool pool(w);
    Scope scope(pool.id);
    void* p = cca::raw_alloc(MiB);
    function<void()>("cistern_torch_python_ends")();
    cca::raw_delete(p);
    OUT_OF_MEMORY(cca::raw_alloc(100 * MiB));
  }
  CHECK(own.allocs == 1 && own.frees == 0 && dropped == before);
}

} // namespace

int main(int, char** argv) {
  install(argv);
  daemon_threads(argv[2]);
  tell = function<Tell>("cistern_torch_pool");
  everywhere();
  cca::init(2);
  tell = function<Tell>("cistern_torch_pool");
  by_name();
  bad_words();
  kinds();
  limits();
  abroad();
  functions();
  callbacks(false);
  callbacks(true);
  callback_throws();
  device_asks(argv[2]);
  captures();
  end_of_python();
  return done();
}
