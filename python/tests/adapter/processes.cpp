// processes.cpp: children of fork, and memory that other processes map.
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

namespace {

std::shared_ptr<c10::GatheredContext> gather() { return std::make_shared<c10::GatheredContext>(); }

// Runs f in a child of fork, which must not hang.
template <class F>
void in_child(F f) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    alarm(300);
    f();
    _exit(failures != 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

void forks() {
  // Until CUDA starts, a program may fork, and the child may start CUDA.
  in_child([] {
    cca::init(2);
    cca::raw_delete(cca::raw_alloc(MiB));
  });
  cca::init(2);
  c10::DataPtr d = cca::get()->allocate(MiB);
  void* p = cca::raw_alloc(100);
  for (const bool recorded : {false, true}) {
    if (recorded)
      cca::recordHistory(true, gather, 100, cca::RecordContext::ALL, false, {});
    std::atomic<bool> stop{false};
    std::thread busy([&] { // so that locks are held when it forks
      while (!stop)
        cca::raw_delete(cca::raw_alloc(5000));
    });
    for (int i = 0; i < 20; i++)
      in_child([&] {
        THROWS(c10::Error, "must use the 'spawn' start method", cca::raw_alloc(10));
        cca::raw_delete(p);
        cca::recordStream(d, some_stream());
        d.clear();
        cca::emptyCache();
        cca::setUseOnOOM(0, {0, 1}, false);
        cca::releasePool(0, {0, 1});
        THROWS(c10::Error, "forked", stats());
        CHECK(cca::snapshot().segments.empty());
      });
    stop = true;
    busy.join();
  }
  cca::recordHistory(false, nullptr, 1, cca::RecordContext::NEVER, false, {});
  cca::raw_delete(p);
}

void opened_by_another(int from, int to) {
  cca::init(2);
  char words[600];
  const std::string handle(words, static_cast<size_t>(std::max<ssize_t>(read(from, words, sizeof words), 0)));
  auto p = cca::get()->getIpcDevPtr(handle), q = cca::get()->getIpcDevPtr(handle);
  CHECK(p != nullptr && p == q && p.use_count() == 2); // mapped once
  p.reset();
  CHECK(test_syncs == 0);
  q.reset();
  CHECK(test_syncs == 1); // before it was unmapped
  CHECK(cca::get()->getIpcDevPtr(handle) != nullptr);
  // Memory of PyTorch's own allocator, from cudaMalloc; and what cannot be opened.
  void* const address = reinterpret_cast<void*>(0x7000);
  for (const std::string version : {"\x01", "\x02", "\x03"}) {
    std::string legacy = version + "c";
    legacy.append(reinterpret_cast<const char*>(&address), sizeof address).append(56, '\0');
    CHECK(cca::get()->getIpcDevPtr(legacy).get() == address);
    THROWS(c10::Error, "does not use Cistern", cca::get()->getIpcDevPtr(version + "e" + std::string(64, 'x')));
  }
  THROWS(c10::Error, "Cistern", cca::get()->getIpcDevPtr("rubbish"));
  CHECK(write(to, "!", 1) == 1);
}

} // namespace

int main(int, char** argv) {
  install(argv);
  int there[2], back[2];
  CHECK(pipe(there) == 0 && pipe(back) == 0);
  const pid_t other = fork();
  if (other == 0) {
    alarm(600);
    opened_by_another(there[0], back[1]);
    _exit(failures != 0);
  }
  forks();
  {
    c10::DataPtr d = cca::get()->allocate(5 * MiB);
    const auto handle = cca::get()->shareIpcHandle(d.get());
    CHECK(handle.offset == 0 && cca::get()->shareIpcHandle(d.get()).handle == handle.handle);
    THROWS(c10::Error, "invalid device pointer", cca::get()->shareIpcHandle(reinterpret_cast<void*>(64)));
    CHECK(write(there[1], handle.handle.data(), handle.handle.size()) == ssize_t(handle.handle.size()));
    char answer;
    CHECK(read(back[0], &answer, 1) == 1);
  }
  int status = -1;
  waitpid(other, &status, 0);
  CHECK(status == 0);
  return done();
}
