// The worker threads of stress.py: random allocations and frees through PyTorch's C++ interface, on many streams, with
// every block filled and checked by kernels. Called by ctypes; Python compiles the kernels and runs graphs meanwhile.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cmath>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace ca = c10::cuda::CUDACachingAllocator;
using c10::cuda::CUDAStream;

namespace {
using Launch = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

struct Item {
  c10::DataPtr data;
  size_t bytes = 0;
  uint64_t key = 0;
  int stream = 0;
};

struct Run {
  Launch launch;
  void *fill, *check;
  uint64_t *wrong; // on the device
  std::vector<CUDAStream> streams;
  std::mutex mutex;
  std::vector<Item> exchange; // blocks on their way from one thread to another
  std::atomic<int64_t> allocations{0}, frees{0}, checks{0}, crossings{0}, handed{0}, ooms{0}, emptied{0}, pooled{0}, bytes{0};
  std::mutex failureMutex;
  std::string failure;
};

void launch(Run &r, void *kernel, const Item &it, int stream) {
  void *p = it.data.get();
  uint64_t n = it.bytes, key = it.key;
  void *wrong = r.wrong;
  void *args[] = {&p, &n, &key, &wrong};
  unsigned blocks = (unsigned)std::min<uint64_t>(128, n / 8192 + 1);
  int e = r.launch(kernel, blocks, 1, 1, 256, 1, 1, 0, r.streams[stream].stream(), args, nullptr);
  if (e != 0) throw std::runtime_error("cuLaunchKernel: CUresult " + std::to_string(e));
}

void must(cudaError_t e, const char *what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

void work(Run &r, int thread, uint64_t seed, int64_t ops, int64_t live) {
  std::mt19937_64 rng(seed * 1000003 + thread);
  auto below = [&](uint64_t n) { return rng() % n; };
  std::uniform_real_distribution<double> logSize(0, 23);
  std::vector<Item> items;
  cudaEvent_t event;
  must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  c10::MempoolId_t pool{0, 0};
  const auto self = std::this_thread::get_id();
  uint64_t next = ((uint64_t)thread + 1) << 48;

  auto drop = [&](size_t at) {
    Item it = std::move(items[at]);
    items[at] = std::move(items.back());
    items.pop_back();
    launch(r, r.check, it, it.stream);
    r.checks++;
    r.frees++;
  };
  auto leave = [&] {
    if (pool.second) {
      ca::endAllocateToPool(0, pool);
      ca::releasePool(0, pool); // the scope's reference, and the one of its making
      ca::releasePool(0, pool);
      pool = {0, 0};
    }
  };

  for (int64_t i = 0; i < ops;) {
    uint64_t dice = below(1000);
    if (dice < 450 || items.empty()) {
      if ((int64_t)items.size() >= live) {
        drop(below(items.size()));
        continue;
      }
      Item it;
      it.bytes = (size_t)std::exp2(logSize(rng)) + below(64);
      if (below(2000) == 0) it.bytes += 48ull << 20;
      it.key = next++;
      it.stream = (int)below(r.streams.size());
      i++;
      try {
        c10::cuda::CUDAStreamGuard guard(r.streams[it.stream]);
        it.data = ca::get()->allocate(it.bytes);
      } catch (const c10::OutOfMemoryError &) {
        r.ooms++;
        while (items.size() > 8) drop(below(items.size()));
        continue;
      }
      launch(r, r.fill, it, it.stream);
      r.allocations++;
      r.bytes += (int64_t)it.bytes;
      if (pool.second) r.pooled++;
      items.push_back(std::move(it));
    } else if (dice < 850) {
      drop(below(items.size()));
    } else if (dice < 930) {
      // Another stream reads the block, which may be freed at any time after that.
      Item &it = items[below(items.size())];
      int other = (int)below(r.streams.size());
      if (other == it.stream) continue;
      must(cudaEventRecord(event, r.streams[it.stream].stream()), "cudaEventRecord");
      must(cudaStreamWaitEvent(r.streams[other].stream(), event, 0), "cudaStreamWaitEvent");
      launch(r, r.check, it, other);
      ca::recordStream(it.data, r.streams[other]);
      r.checks++;
      r.crossings++;
    } else if (dice < 990) {
      std::lock_guard<std::mutex> l(r.mutex);
      size_t at = below(items.size());
      if (r.exchange.size() < 256) {
        r.exchange.push_back(std::move(items[at]));
        items[at] = std::move(items.back());
        items.pop_back();
      } else {
        std::swap(items[at], r.exchange[below(r.exchange.size())]);
      }
      r.handed++;
    } else if (dice < 999) {
      if (below(60) == 0) {
        if (pool.second) {
          leave();
        } else {
          static std::atomic<uint64_t> number{1};
          pool = {1u << 20, number++}; // no pool of PyTorch's own has such a number
          ca::createOrIncrefPool(0, pool);
          ca::beginAllocateToPool(0, pool, [self](cudaStream_t) { return std::this_thread::get_id() == self; });
        }
      }
    } else if (below(40) == 0) {
      ca::emptyCache();
      r.emptied++;
    }
  }
  leave();
  while (!items.empty()) drop(items.size() - 1);
  cudaEventDestroy(event);
}

Run *run;
} // namespace

extern "C" {
// stress_start prepares; fill and check are CUfunctions of (void *, bytes, key, uint64_t *wrong). The words of a failure, or null.
const char *stress_start(void *fill, void *check, int streams) {
  static std::string words;
  try {
    run = new Run;
    void *lib = dlopen("libcuda.so.1", RTLD_NOW);
    run->launch = lib ? (Launch)dlsym(lib, "cuLaunchKernel") : nullptr;
    if (!run->launch) throw std::runtime_error("no cuLaunchKernel in libcuda.so.1");
    run->fill = fill;
    run->check = check;
    must(cudaMalloc((void **)&run->wrong, 8), "cudaMalloc");
    must(cudaMemset(run->wrong, 0, 8), "cudaMemset");
    for (int i = 0; i < streams; i++) run->streams.push_back(i == 0 ? c10::cuda::getDefaultCUDAStream() : c10::cuda::getStreamFromPool(i % 2 == 0));
    // The check must find what is wrong: a block filled with one key and checked with another.
    Item it;
    it.bytes = 1001;
    it.data = ca::get()->allocate(it.bytes);
    it.key = 1;
    launch(*run, run->fill, it, 0);
    launch(*run, run->check, it, 0);
    uint64_t found = 1;
    must(cudaMemcpy(&found, run->wrong, 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (found != 0) throw std::runtime_error("the check finds faults in a right block");
    it.key = 2;
    launch(*run, run->check, it, 0);
    must(cudaMemcpy(&found, run->wrong, 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (found != 126) throw std::runtime_error("the check finds " + std::to_string(found) + " wrong words in a block of 126");
    must(cudaMemset(run->wrong, 0, 8), "cudaMemset");
    return nullptr;
  } catch (const std::exception &e) {
    words = e.what();
    return words.c_str();
  }
}

// stress_run does ops allocations in each of so many threads. Returns the number of wrong words, -1 after a failure.
int64_t stress_run(uint64_t seed, int threads, int64_t ops, int64_t live) {
  Run &r = *run;
  std::vector<std::thread> all;
  for (int t = 0; t < threads; t++)
    all.emplace_back([&, t] {
      try {
        cudaSetDevice(0);
        work(r, t, seed, ops, live);
      } catch (const std::exception &e) {
        std::lock_guard<std::mutex> l(r.failureMutex);
        r.failure += std::string(e.what()).substr(0, 300) + "; ";
      }
    });
  for (auto &t : all) t.join();
  try {
    for (auto &it : r.exchange) {
      launch(r, r.check, it, it.stream);
      r.checks++;
      r.frees++;
    }
    r.exchange.clear();
  } catch (const std::exception &e) {
    r.failure += e.what();
  }
  cudaError_t e = cudaDeviceSynchronize();
  if (e != cudaSuccess) r.failure += cudaGetErrorString(e);
  uint64_t wrong = 0;
  cudaMemcpy(&wrong, r.wrong, 8, cudaMemcpyDeviceToHost);
  return r.failure.empty() ? (int64_t)wrong : -1;
}

const char *stress_failure() { return run->failure.c_str(); }
int64_t stress_count(int what) {
  Run &r = *run;
  std::atomic<int64_t> *all[] = {&r.allocations, &r.frees, &r.checks, &r.crossings, &r.handed, &r.ooms, &r.emptied, &r.pooled, &r.bytes};
  return *all[what];
}
}
