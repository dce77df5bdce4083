/* pools2: whether the driver survives the end of a pool of device 1 after pools of device 0, in the order of calls in which
 * libcuda 580 was seen to die within a larger test. Every combination of the steps on device 0 runs in a process of its own:
 * all of them, each left out, each alone, then all of them with calls that go from thread to thread, as those of a Go program
 * do. It calls nothing but the driver and needs no CUDA toolkit:
 *
 *     cc -O2 -pthread pools2.c -ldl && ./a.out
 *
 * The exit status is 0 when no process died. */
#include "node.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

typedef void *Stream, *Pool;

/* CUmemPoolProps */
struct pool_props {
  int type, handles;
  struct location location;
  void *win32;
  size_t max;
  unsigned short usage;
  unsigned char reserved[54];
};

static int (*cuCtxPopCurrent)(Context *);
static int (*cuCtxEnablePeerAccess)(Context, unsigned);
static int (*cuDeviceCanAccessPeer)(int *, int, int);
static int (*cuStreamCreate)(Stream *, unsigned);
static int (*cuStreamDestroy)(Stream);
static int (*cuStreamSynchronize)(Stream);
static int (*cuMemPoolCreate)(Pool *, const struct pool_props *);
static int (*cuMemPoolDestroy)(Pool);
static int (*cuMemPoolSetAttribute)(Pool, int, void *);
static int (*cuMemPoolTrimTo)(Pool, size_t);
static int (*cuMemPoolSetAccess)(Pool, const struct access *, size_t);
static int (*cuMemAllocFromPoolAsync)(Ptr *, size_t, Pool, Stream);
static int (*cuMemFreeAsync)(Ptr, Stream);
static int (*cuMemcpyAsync)(Ptr, Ptr, size_t, Stream);
static int (*cuDeviceGetDefaultMemPool)(Pool *, int);

static void load_pools(void) {
  load();
  void *l = library(getenv("CUDA_LIBRARY") ? getenv("CUDA_LIBRARY") : "libcuda.so.1");
  cuCtxPopCurrent = symbol(l, "cuCtxPopCurrent_v2");
  cuCtxEnablePeerAccess = symbol(l, "cuCtxEnablePeerAccess");
  cuDeviceCanAccessPeer = symbol(l, "cuDeviceCanAccessPeer");
  cuStreamCreate = symbol(l, "cuStreamCreate");
  cuStreamDestroy = symbol(l, "cuStreamDestroy_v2");
  cuStreamSynchronize = symbol(l, "cuStreamSynchronize");
  cuMemPoolCreate = symbol(l, "cuMemPoolCreate");
  cuMemPoolDestroy = symbol(l, "cuMemPoolDestroy");
  cuMemPoolSetAttribute = symbol(l, "cuMemPoolSetAttribute");
  cuMemPoolTrimTo = symbol(l, "cuMemPoolTrimTo");
  cuMemPoolSetAccess = symbol(l, "cuMemPoolSetAccess");
  cuMemAllocFromPoolAsync = symbol(l, "cuMemAllocFromPoolAsync");
  cuMemFreeAsync = symbol(l, "cuMemFreeAsync");
  cuMemcpyAsync = symbol(l, "cuMemcpyAsync");
  cuDeviceGetDefaultMemPool = symbol(l, "cuDeviceGetDefaultMemPool");
}

/* ---- calls, each in the context of its device and, where they wander, on another thread ---- */

static Context contexts[2];
static int wander;

static void in_context(int device, void (*body)(void *), void *arg) {
  Context popped;
  MUST(cuCtxPushCurrent(contexts[device]));
  body(arg);
  MUST(cuCtxPopCurrent(&popped));
}

struct job {
  int device;
  void (*body)(void *);
  void *arg;
};

static void *on_thread(void *arg) {
  struct job *j = arg;
  in_context(j->device, j->body, j->arg);
  return NULL;
}

static void run(int device, void (*body)(void *), void *arg) {
  static int count;
  if (!wander || count++ % 2 == 0) {
    in_context(device, body, arg);
    return;
  }
  pthread_t t;
  struct job j = {device, body, arg};
  CHECK(pthread_create(&t, NULL, on_thread, &j) == 0);
  CHECK(pthread_join(t, NULL) == 0);
}

/* ---- the steps on device 0 ---- */

static const size_t G = 2 * MIB;
static Pool pool; /* of device 0, for all steps but the first */
static Stream stream;
static unsigned char bytes[8 << 20];

static Pool create_pool(int device, int handles, size_t max) {
  struct pool_props p = {.type = 1, .handles = handles, .location = {1, device}, .max = max};
  Pool made;
  MUST(cuMemPoolCreate(&made, &p));
  return made;
}

static Ptr from_pool(size_t size, Stream s) {
  Ptr p;
  MUST(cuMemAllocFromPoolAsync(&p, size, pool, s));
  return p;
}

static void begin(void *arg) {
  (void)arg;
  MUST(cuStreamCreate(&stream, 1));
  pool = create_pool(0, 0, 0);
}

static void kinds_of_handles(void *arg) {
  (void)arg;
  const int kinds[] = {0, POSIX_FD, 8 /* CU_MEM_HANDLE_TYPE_FABRIC */};
  for (int i = 0; i < 3; i++) {
    struct pool_props p = {.type = 1, .handles = kinds[i], .location = {1, 0}, .max = 64 * G};
    Pool made;
    if (cuMemPoolCreate(&made, &p) == 0) MUST(cuMemPoolDestroy(made)); /* fabric may not be there */
  }
}

static void attributes(void *arg) {
  (void)arg;
  for (int a = 1; a <= 3; a++)
    for (int v = 0; v < 2; v++) MUST(cuMemPoolSetAttribute(pool, a, &v));
}

static void blocks(void *arg) {
  (void)arg;
  Ptr p = from_pool(3 * G + 100, stream);
  MUST(cuMemcpyAsync(p, (uintptr_t)bytes, 3 * G + 100, stream));
  MUST(cuStreamSynchronize(stream));
  Ptr q = from_pool(8, stream), r = from_pool(8, stream);
  MUST(cuMemFreeAsync(p, stream));
  MUST(cuMemFreeAsync(q, stream));
  MUST(cuMemFreeAsync(r, stream));
  MUST(cuStreamSynchronize(stream));
}

static void threshold(void *arg) {
  (void)arg;
  uint64_t all = UINT64_MAX;
  MUST(cuMemPoolSetAttribute(pool, 4 /* release threshold */, &all));
  MUST(cuMemFreeAsync(from_pool(3 * G + 100, stream), stream));
  MUST(cuStreamSynchronize(stream));
  MUST(cuMemPoolTrimTo(pool, 0));
}

static void too_much(void *arg) {
  Ptr p;
  (void)arg;
  CHECK(cuMemAllocFromPoolAsync(&p, (size_t)1 << 50, pool, stream) == 2);
}

static void other_streams(void *arg) {
  (void)arg;
  Ptr p = from_pool(G, stream);
  MUST(cuStreamSynchronize(stream));
  MUST(cuMemFreeAsync(p, NULL));
  Stream gone;
  MUST(cuStreamCreate(&gone, 1));
  MUST(cuMemFreeAsync(from_pool(G, gone), gone));
  MUST(cuStreamDestroy(gone));
  MUST(cuCtxSynchronize());
}

static void outlived(void *arg) {
  (void)arg;
  Ptr p = from_pool(G, stream);
  MUST(cuMemPoolDestroy(pool));
  MUST(cuMemcpyAsync(p, (uintptr_t)bytes, G, stream));
  MUST(cuMemFreeAsync(p, stream));
  MUST(cuStreamSynchronize(stream));
  pool = NULL;
}

/* As by a program that frees in stream order and does not wait: the copies before it take some milliseconds. */
static void freed_late(void *arg) {
  (void)arg;
  Ptr p;
  Pool own = create_pool(0, 0, 0);
  MUST(cuMemAllocFromPoolAsync(&p, GIB, own, stream));
  for (int i = 0; i < 100; i++) MUST(cuMemcpyAsync(p, p + GIB / 2, GIB / 2, stream));
  MUST(cuMemFreeAsync(p, stream));
  MUST(cuMemPoolDestroy(own));
  MUST(cuStreamSynchronize(stream));
}

static void default_pool(void *arg) {
  (void)arg;
  Pool own;
  Ptr p;
  MUST(cuDeviceGetDefaultMemPool(&own, 0));
  MUST(cuMemAllocFromPoolAsync(&p, G, own, (Stream)1));
  MUST(cuMemFreeAsync(p, (Stream)1));
  MUST(cuStreamSynchronize((Stream)1));
}

static const struct {
  const char *name;
  void (*body)(void *);
} steps[] = {
    {"kinds of handles", kinds_of_handles}, {"attributes", attributes},         {"blocks", blocks},
    {"threshold", threshold},               {"too much", too_much},             {"other streams", other_streams},
    {"a free is under way", freed_late},    {"block outlives its pool", outlived}, {"default pool", default_pool},
};
enum { STEPS = sizeof steps / sizeof *steps };

/* ---- the pool of device 1 ---- */

static Stream peer_stream;

static void peer_begin(void *arg) {
  (void)arg;
  MUST(cuStreamCreate(&peer_stream, 1));
  pool = create_pool(1, 0, 0);
  struct access a = {{1, 0}, READ_WRITE};
  MUST(cuMemPoolSetAccess(pool, &a, 1));
}

static void enable_peer(void *other) { MUST(cuCtxEnablePeerAccess(other, 0)); }

static void peer_block(void *p) {
  *(Ptr *)p = from_pool(G, peer_stream);
  MUST(cuStreamSynchronize(peer_stream));
}

static void copy_block(void *p) {
  MUST(cuMemcpyAsync(*(Ptr *)p, (uintptr_t)bytes, G, stream));
  MUST(cuStreamSynchronize(stream));
}

static void peer_end(void *p) {
  MUST(cuMemFreeAsync(*(Ptr *)p, peer_stream));
  MUST(cuStreamSynchronize(peer_stream));
}

static void peer_destroy(void *arg) {
  (void)arg;
  MUST(cuMemPoolDestroy(pool));
}

/* case_of runs the chosen steps, then the pool of device 1. In it libcuda dies, or not. */
static void case_of(unsigned chosen, int wandering) {
  Ptr p;
  load_pools();
  wander = wandering;
  MUST(cuDevicePrimaryCtxRetain(&contexts[0], 0));
  run(0, begin, NULL);
  for (int i = 0; i < STEPS; i++)
    if (chosen & 1u << i) run(0, steps[i].body, NULL);
  MUST(cuDevicePrimaryCtxRetain(&contexts[1], 1));
  run(1, enable_peer, contexts[0]);
  run(0, enable_peer, contexts[1]);
  run(1, peer_begin, NULL);
  run(1, peer_block, &p);
  run(0, copy_block, &p);
  run(1, peer_end, &p);
  run(1, peer_destroy, NULL);
}

static int died; /* how many processes */

static void try(const char *what, const char *step, unsigned chosen, int wandering) {
  int status;
  fflush(stdout);
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    part = step;
    case_of(chosen, wandering);
    _exit(0);
  }
  CHECK(waitpid(pid, &status, 0) == pid);
  printf("%-14s %-26s ", what, step);
  if (WIFSIGNALED(status))
    printf("died of signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
  else
    printf(WEXITSTATUS(status) == 0 ? "lives\n" : "failed with status %d\n", WEXITSTATUS(status));
  died += status != 0;
}

int main(void) {
  const unsigned all = (1u << STEPS) - 1;
  try("no step", "", 0, 0);
  try("all", "", all, 0);
  try("all", "wandering", all, 1);
  for (int i = 0; i < STEPS; i++) try("alone", steps[i].name, 1u << i, 0);
  for (int i = 0; i < STEPS; i++) try("all without", steps[i].name, all & ~(1u << i), 0);
  printf("%d of %d processes died or failed\n", died, 3 + 2 * STEPS);
  return died != 0;
}
