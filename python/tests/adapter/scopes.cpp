// scopes.cpp: whose a scope is, and when captures are announced to the library: what happens between the calls that PyTorch
// makes for a graph, on this thread and on others. It is started with watched.c in the place of libcistern.so.
#include "check.h"

#include <c10/util/Exception.h>

#include <cistern.h>

#include <chrono>
#include <future>

namespace {

std::function<int(bool ends, void* stream)> watch; // what a test does in the middle of a call of the library
std::atomic<int> begins{0}, ends{0}, warnings{0};

extern "C" int watched(int ended, void* stream) {
  (ended ? ends : begins)++;
  return watch ? watch(ended != 0, stream) : 0;
}

struct Warnings final : c10::WarningHandler {
  void process(const c10::Warning& w) override {
    warnings++;
    printf("warning: %s\n", w.msg().c_str());
  }
} handler;

template <class F>
void on_another_thread(F f) {
  std::thread(f).join();
}

bool is_of(Pool id, void* p) {
  for (const auto& s : cca::snapshot(id).segments) {
    size_t at = s.address;
    for (const auto& b : s.blocks) {
      if (reinterpret_cast<void*>(at) == p && b.allocated)
        return true;
      at += b.size;
    }
  }
  return false;
}

bool next_is_of(Pool id) {
  void* p = cca::raw_alloc(MiB);
  const bool is = is_of(id, p);
  cca::raw_delete(p);
  return is;
}

void begin_thread(Pool id) { cca::beginAllocateToPool(0, id, this_thread()); }
void end_thread(Pool id) {
  cca::endAllocateToPool(0, id);
  cca::releasePool(0, id);
}

// A CUDA graph as PyTorch makes one: capture_begin and capture_end, which need the stream current, and reset.
struct Graph {
  Pool id;
  cudaStream_t stream;
  std::shared_ptr<bool> alive = std::make_shared<bool>(true);
  Graph(Pool id, cudaStream_t stream) : id(id), stream(stream) {}
  void announce() {
    cca::beginAllocateToPool(0, id, [alive = alive, stream = stream](cudaStream_t s) {
      CHECK(*alive); // the filter of a graph points to it
      return s == stream && captured(s);
    });
  }
  void capture_begin() {
    announce();
    test_capture(stream, 1);
  }
  void capture_end() {
    test_capture(stream, 0);
    cca::endAllocateToPool(0, id);
    *alive = false;
  }
  void reset() { cca::releasePool(0, id); }
};

// The scope of a thread and that of a graph, both of one pool, in all orders.
void owners() {
  const Pool id{0, 1};
  const auto stream = some_stream();
  cca::createOrIncrefPool(0, id);
  c10::cuda::CUDAStreamGuard guard(stream);
  { // the graph inside
    Graph g(id, stream);
    begin_thread(id);
    g.capture_begin();
    CHECK(next_is_of(id));
    g.capture_end();
    CHECK(next_is_of(id));
    end_thread(id);
    CHECK(!next_is_of(id));
    g.reset();
  }
  { // the graph around
    Graph g(id, stream);
    g.capture_begin();
    begin_thread(id);
    CHECK(next_is_of(id));
    end_thread(id);
    CHECK(next_is_of(id));
    g.capture_end();
    CHECK(!next_is_of(id));
    g.reset();
  }
  { // crossed
    Graph g(id, stream);
    g.capture_begin();
    begin_thread(id);
    g.capture_end();
    CHECK(next_is_of(id));
    end_thread(id);
    CHECK(!next_is_of(id));
    begin_thread(id);
    Graph h(id, stream);
    h.capture_begin();
    end_thread(id);
    CHECK(next_is_of(id));
    h.capture_end();
    CHECK(!next_is_of(id));
    g.reset();
    h.reset();
  }
  { // another thread's
    begin_thread(id);
    Graph g(id, stream);
    on_another_thread([&] {
      c10::cuda::CUDAStreamGuard same(stream);
      g.capture_begin();
      CHECK(next_is_of(id));
      g.capture_end();
      CHECK(!next_is_of(id));
    });
    CHECK(next_is_of(id));
    on_another_thread([&] {
      begin_thread(id);
      CHECK(next_is_of(id));
      end_thread(id);
      CHECK(!next_is_of(id));
    });
    CHECK(next_is_of(id));
    end_thread(id);
    CHECK(!next_is_of(id));
    g.reset();
  }
  // A scope that a thread opened and another closes, as PyTorch's own lets one.
  begin_thread(id);
  on_another_thread([&] { end_thread(id); });
  CHECK(!next_is_of(id));
  THROWS(c10::Error, "not currently recording", cca::endAllocateToPool(0, id));
  CHECK(cca::getPoolUseCount(0, id) == 1);
  cca::releasePool(0, id);
  CHECK(begins == ends);
}

// An allocation between the announcement of a capture and its beginning leaves the announcement alone.
void announcements() {
  const auto stream = some_stream(), other = some_stream();
  c10::cuda::CUDAStreamGuard guard(stream);
  begins = ends = 0;
  Graph g({2, 0}, stream);
  g.announce();
  CHECK(begins == 1);
  on_another_thread([&] {
    c10::cuda::CUDAStreamGuard elsewhere(other);
    cca::raw_delete(cca::raw_alloc(MiB));
    begin_thread({0, 2});
    cca::raw_delete(cca::raw_alloc(MiB));
    end_thread({0, 2});
  });
  CHECK(begins == 1 && ends == 0);
  test_capture(stream.stream(), 1);
  CHECK(next_is_of(g.id));
  on_another_thread([&] {
    c10::cuda::CUDAStreamGuard elsewhere(other);
    cca::raw_delete(cca::raw_alloc(MiB));
  });
  CHECK(begins == 1 && ends == 0);
  g.capture_end();
  CHECK(begins == 1 && ends == 1);
  g.reset();

  // One whose capture was seen and whose end is not announced, as where it fails, any thread ends.
  begins = ends = 0;
  Graph failed({3, 0}, stream);
  failed.capture_begin();
  CHECK(next_is_of(failed.id));
  test_capture(stream.stream(), 0);
  on_another_thread([&] {
    c10::cuda::CUDAStreamGuard elsewhere(other);
    CHECK(!next_is_of(failed.id));
  });
  CHECK(begins == 1 && ends == 1);
  cca::endAllocateToPool(0, failed.id);
  failed.reset();
  CHECK(ends == 1);

  // One that never began ends for the thread that made it, and for the stream.
  for (const bool mine : {true, false}) {
    begins = ends = 0;
    Graph never({4, 0}, stream);
    never.announce();
    auto use = [&](cudaStream_t s) {
      c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromExternal(s, 0));
      CHECK(!next_is_of(never.id));
    };
    if (mine)
      use(other);
    else
      on_another_thread([&] { use(stream); });
    CHECK(begins == 1 && ends == 1);
    cca::endAllocateToPool(0, never.id);
    never.reset();
  }

  // One that the library refuses leaves nothing behind.
  begins = ends = 0;
  watch = [](bool ended, void*) { return ended ? CISTERN_OK : CISTERN_INVALID; };
  for (int i = 0; i < 2; i++) {
    Graph refused({5, 0}, stream);
    THROWS(c10::Error, "", refused.announce());
    THROWS(c10::Error, "Could not find pool", cca::getPoolUseCount(0, refused.id));
    cca::raw_delete(cca::raw_alloc(MiB));
    THROWS(c10::Error, "not currently recording", cca::endAllocateToPool(0, refused.id));
  }
  watch = nullptr;
  CHECK(begins == 2 && ends == 0);
  Graph works({5, 0}, stream);
  works.capture_begin();
  CHECK(next_is_of(works.id));
  works.capture_end();
  works.reset();
}

// While the library begins a capture, which may wait for the GPU, other threads go on.
void others_go_on() {
  const auto stream = some_stream(), other = some_stream();
  c10::cuda::CUDAStreamGuard guard(stream);
  const Pool id{0, 6};
  cca::createOrIncrefPool(0, id);
  int went_on = 0;
  std::thread beside;
  watch = [&, me = std::this_thread::get_id()](bool, void*) {
    if (went_on < 0 || std::this_thread::get_id() != me)
      return CISTERN_OK; // after a failure the other thread waits for this one
    std::promise<void> done;
    auto over = done.get_future();
    if (beside.joinable())
      beside.join();
    beside = std::thread([&, done = std::move(done)]() mutable {
      c10::cuda::CUDAStreamGuard elsewhere(other);
      cca::raw_delete(cca::raw_alloc(MiB)); // of no pool
      begin_thread(id);
      CHECK(next_is_of(id));
      cca::setUseOnOOM(0, id, true);
      cca::emptyCache(id);
      end_thread(id);
      done.set_value();
    });
    const auto got = over.wait_for(std::chrono::seconds(30)); // that long only where it fails
    went_on = got == std::future_status::ready ? went_on + 1 : -1;
    return CISTERN_OK;
  };
  Graph g({6, 0}, stream);
  g.capture_begin();
  CHECK(went_on == 1);
  CHECK(next_is_of(g.id));
  {
    const auto joins = some_stream();
    test_capture(joins.stream(), 1); // announced at its first request
    begin_thread(id);
    {
      c10::cuda::CUDAStreamGuard on(joins);
      CHECK(next_is_of(id));
    }
    end_thread(id);
    test_capture(joins.stream(), 0);
  }
  CHECK(went_on == 2);
  g.capture_end();
  CHECK(went_on >= 3);
  watch = nullptr;
  beside.join();
  g.reset();
  cca::setUseOnOOM(0, id, false);
  cca::releasePool(0, id);
}

// A pool whose last user is the scope of another thread, on a stream that is captured.
void last_user_elsewhere() {
  cca::emptyCache();
  CHECK(reserved() == 0);
  warnings = begins = ends = 0;
  const Pool id{0, 7};
  const auto stream = some_stream();
  cca::createOrIncrefPool(0, id);
  std::promise<void> allocated, released;
  std::thread t([&] {
    c10::WarningUtils::set_warning_handler(&handler); // of this thread
    c10::cuda::CUDAStreamGuard on(stream);
    begin_thread(id);
    test_capture(stream.stream(), 1); // it joins a capture
    CHECK(next_is_of(id));
    allocated.set_value();
    released.get_future().wait();
    CHECK(next_is_of(id));
    end_thread(id);
    CHECK(warnings == 0);
    test_capture(stream.stream(), 0);
    cca::raw_delete(cca::raw_alloc(MiB));
  });
  allocated.get_future().wait();
  cca::releasePool(0, id);
  cca::emptyCache(id);
  released.set_value();
  t.join();
  CHECK(warnings == 0 && begins == 1 && ends == 1);
  THROWS(c10::Error, "Could not find pool", cca::getPoolUseCount(0, id));
  cca::emptyCache();
  CHECK(reserved() == 0);
}

// What throws takes no use.
void uses() {
  const Pool id{0, 8};
  cca::createOrIncrefPool(0, id);
  begin_thread(id);
  CHECK(next_is_of(id));
  end_thread(id);
#if CISTERN_TORCH_CREATE_POOL
  const auto unknown = std::shared_ptr<cca::CUDAAllocator>(reinterpret_cast<cca::CUDAAllocator*>(8), [](cca::CUDAAllocator*) {});
  THROWS(c10::Error, "cannot be given an allocator", cca::createOrIncrefPool(0, id, unknown));
#endif
  CHECK(cca::getPoolUseCount(0, id) == 1);
  cca::releasePool(0, id);
  THROWS(c10::Error, "Could not find pool", cca::getPoolUseCount(0, id));
}

} // namespace

int main(int, char** argv) {
  install(argv);
  void* library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
  *static_cast<int (**)(int, void*)>(dlsym(library, "test_watch")) = watched;
  c10::WarningUtils::set_warning_handler(&handler);
  cca::init(2);
  owners();
  announcements();
  others_go_on();
  last_user_elsewhere();
  uses();
  return done();
}
