/* node: what the broker of a node rests on, measured on a real GPU with several processes: physical memory that is made and
 * passed on without a context, that outlives its exporter, that becomes free when its process releases it or is killed, and
 * what the driver's management library attributes to whom. It prints one figure a line. It needs no CUDA toolkit:
 *
 *     cc -O2 node.c -ldl && ./a.out [DESCRIPTORS]
 *
 * DESCRIPTORS is how many chunks of 2 MiB are exported at once (40000; fewer where memory or the limit of open files is
 * smaller). The first process never touches CUDA: every role is a child of its own, as a child of fork cannot use CUDA that
 * its parent has initialised. */
#include "node.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

/* ---- processes ---- */

/* What the processes of a measurement have in common. */
struct shared {
  _Atomic double at, amount, value[8];
  _Atomic int step;
};
static struct shared *shared;

struct child {
  pid_t pid;
  int socket;
};

static int mine; /* a child's end of its socket */

static struct child start(void (*role)(void)) {
  int pair[2];
  fflush(stdout);
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    close(pair[0]);
    mine = pair[1];
    role();
    fflush(stdout);
    _exit(0);
  }
  close(pair[1]);
  return (struct child){pid, pair[0]};
}

static void finish(struct child c, int sig) {
  int status;
  if (sig) kill(c.pid, sig);
  CHECK(waitpid(c.pid, &status, 0) == c.pid);
  close(c.socket);
  if (!sig && status != 0) result("a process failed", "status %d", status);
}

static void tell(int socket) { CHECK(send(socket, "x", 1, MSG_NOSIGNAL) == 1); }

static int hear(int socket) {
  char b;
  return recv(socket, &b, 1, 0) == 1;
}

enum { BATCH = 200 }; /* the kernel allows 253 descriptors in a message */

static void pass(int socket, const int *fds, int n) {
  char b = 'f', control[CMSG_SPACE(sizeof(int) * BATCH)];
  struct iovec v = {&b, 1};
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = CMSG_SPACE(sizeof(int) * n)};
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int) * n);
  memcpy(CMSG_DATA(c), fds, sizeof(int) * n);
  CHECK(sendmsg(socket, &m, MSG_NOSIGNAL) == 1);
}

static int take(int socket, int *fds) {
  char b, control[CMSG_SPACE(sizeof(int) * BATCH)];
  struct iovec v = {&b, 1};
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  CHECK(recvmsg(socket, &m, MSG_CMSG_CLOEXEC) == 1);
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  CHECK(c != NULL);
  int n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  memcpy(fds, CMSG_DATA(c), sizeof(int) * n);
  return n;
}

/* ---- the management library ---- */

struct process_info {
  unsigned pid;
  unsigned long long used;
  unsigned gi, ci;
};

/* attributed prints what the management library says of the device: bytes in use and the processes with memory. It runs in a
 * child, for the parent stays without drivers. */
static const char *asked;
static pid_t ours[2];

static void attributed_role(void) {
  void *l = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (l == NULL) {
    result(asked, "not measured: no libnvidia-ml.so.1");
    return;
  }
  void *device;
  struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
  } memory = {.version = sizeof memory | 2u << 24};
  struct process_info list[64];
  unsigned n = 64;
  int (*start_up)(void) = symbol(l, "nvmlInit_v2");
  int (*handle)(unsigned, void **) = symbol(l, "nvmlDeviceGetHandleByIndex_v2");
  int (*info)(void *, void *) = symbol(l, "nvmlDeviceGetMemoryInfo_v2");
  int (*running)(void *, unsigned *, struct process_info *) = symbol(l, "nvmlDeviceGetComputeRunningProcesses_v3");
  MUST(start_up());
  MUST(handle(0, &device));
  MUST(info(device, &memory));
  MUST(running(device, &n, list));
  char text[400] = "";
  for (unsigned i = 0; i < n; i++) {
    const char *who = list[i].pid == (unsigned)ours[0] ? " (exporter)" : list[i].pid == (unsigned)ours[1] ? " (importer)" : "";
    snprintf(text + strlen(text), sizeof text - strlen(text), ", pid %u%s %llu MiB", list[i].pid, who, list[i].used / MIB);
  }
  result(asked, "%llu MiB in use, %u processes%s", memory.used / MIB, n, text);
}

static void attributed(const char *what, pid_t exporter, pid_t importer) {
  asked = what, ours[0] = exporter, ours[1] = importer;
  finish(start(attributed_role), 0);
}

/* ---- memory without a context ---- */

static void bare_exporter(void) {
  init(0);
  int fd;
  Handle h = create(512 * MIB, &exportable);
  MUST(cuMemExport(&fd, h, POSIX_FD, 0));
  unsigned flags;
  int active;
  MUST(cuDevicePrimaryCtxGetState(0, &flags, &active));
  result("create and export after cuInit only", "512 MiB; the primary context is %s", active ? "active" : "not active");
  pass(mine, &fd, 1);
  hear(mine);
}

static void without_context(void) {
  part = "no context";
  attributed("before", 0, 0);
  struct child e = start(bare_exporter);
  int fd;
  take(e.socket, &fd);
  attributed("while 512 MiB are exported", e.pid, 0);
  finish(e, SIGKILL);
  attributed("exporter killed, descriptor open", e.pid, 0);
  close(fd);
  usleep(500000);
  attributed("descriptor closed", e.pid, 0);
}

/* ---- an exporter that is killed ---- */

static const unsigned char pattern = 0x5a;

static void writing_exporter(void) {
  init(1);
  int fd;
  Handle h = create(256 * MIB, &exportable);
  Ptr p = map(h, 256 * MIB, READ_WRITE);
  MUST(cuMemsetD8(p, pattern, 256 * MIB));
  MUST(cuCtxSynchronize());
  MUST(cuMemExport(&fd, h, POSIX_FD, 0));
  pass(mine, &fd, 1);
  hear(mine);
}

static Ptr import(int fd, size_t size, int access) {
  Handle h;
  MUST(cuMemImport(&h, (void *)(uintptr_t)fd, POSIX_FD));
  Ptr p = map(h, size, access);
  MUST(cuMemRelease(h));
  return p;
}

static void importer(void) {
  int fd;
  init(1);
  take(mine, &fd);
  Ptr p = import(fd, 256 * MIB, READ_WRITE);
  close(fd);
  tell(mine);
  hear(mine); /* the exporter is dead */
  result("256 MiB through an importer", "%zu bytes differ", differing(p, 256 * MIB, pattern));
  tell(mine);
  hear(mine);
}

static void late_importer(void) {
  int fd;
  init(1);
  take(mine, &fd);
  Ptr p = import(fd, 256 * MIB, READ_WRITE);
  result("256 MiB through a descriptor alone", "%zu bytes differ", differing(p, 256 * MIB, pattern));
}

static void killed(void) {
  part = "exporter killed";
  int fd;
  struct child e = start(writing_exporter), i = start(importer);
  take(e.socket, &fd);
  pass(i.socket, &fd, 1);
  close(fd);
  CHECK(hear(i.socket));
  attributed("both alive", e.pid, i.pid);
  finish(e, SIGKILL);
  sleep(1);
  tell(i.socket);
  CHECK(hear(i.socket));
  attributed("importer alone", e.pid, i.pid);
  finish(i, SIGKILL);

  /* Nobody has the device open but this process, by a descriptor. */
  e = start(writing_exporter);
  take(e.socket, &fd);
  finish(e, SIGKILL);
  sleep(2);
  attributed("descriptor alone", e.pid, 0);
  i = start(late_importer);
  pass(i.socket, &fd, 1);
  finish(i, 0);
  close(fd);
}

/* ---- what it costs ---- */

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static void times(const char *what, double *t, int n) {
  qsort(t, n, sizeof *t, compare);
  result(what, "median %.1f us, p99 %.1f, most %.1f (%d calls)", t[n / 2], t[n * 99 / 100], t[n - 1], n);
}

static size_t chunk;
static int chunks;

static void timed_exporter(void) {
  char what[80];
  double *t = calloc(chunks, sizeof *t), *c = calloc(chunks, sizeof *c);
  int *fds = calloc(chunks, sizeof *fds);
  init(0);
  for (int i = 0; i < chunks; i++) {
    double begin = now();
    Handle h = create(chunk, &exportable);
    double made = now();
    MUST(cuMemExport(&fds[i], h, POSIX_FD, 0));
    c[i] = made - begin, t[i] = now() - made;
  }
  snprintf(what, sizeof what, "create %zu MiB", chunk / MIB);
  times(what, c, chunks);
  if (chunks > 2000) {
    times("export, the first 1000", t, 1000);
    times("export, the last 1000", t + chunks - 1000, 1000);
  } else {
    snprintf(what, sizeof what, "export %zu MiB", chunk / MIB);
    times(what, t, chunks);
  }
  double begin = now();
  for (int i = 0; i < chunks; i += BATCH) {
    pass(mine, fds + i, chunks - i < BATCH ? chunks - i : BATCH);
    hear(mine); /* so many descriptors in flight, not more */
  }
  snprintf(what, sizeof what, "pass and import %d descriptors", chunks);
  result(what, "%.1f ms", (now() - begin) / 1e3);
}

static void timed_importer(void) {
  char what[80];
  double *t = calloc(chunks, sizeof *t), *r = calloc(chunks, sizeof *r);
  Handle *h = calloc(chunks, sizeof *h);
  int fds[BATCH], at = 0;
  init(0);
  while (at < chunks) {
    int n = take(mine, fds);
    for (int i = 0; i < n; i++, at++) {
      double begin = now();
      MUST(cuMemImport(&h[at], (void *)(uintptr_t)fds[i], POSIX_FD));
      t[at] = now() - begin;
      close(fds[i]);
    }
    tell(mine);
  }
  for (int i = 0; i < chunks; i++) {
    double begin = now();
    MUST(cuMemRelease(h[i]));
    r[i] = now() - begin;
  }
  snprintf(what, sizeof what, "import %zu MiB", chunk / MIB);
  times(what, t, chunks);
  times("release of an import", r, chunks);
}

static void relay(struct child from, struct child to) {
  int fds[BATCH];
  for (int at = 0; at < chunks;) {
    int n = take(from.socket, fds);
    pass(to.socket, fds, n);
    for (int i = 0; i < n; i++) close(fds[i]);
    CHECK(hear(to.socket));
    tell(from.socket);
    at += n;
  }
}

static void costs(size_t size, int n) {
  part = "cost";
  chunk = size, chunks = n;
  struct child e = start(timed_exporter), i = start(timed_importer);
  relay(e, i);
  finish(i, 0);
  finish(e, 0);
}

/* ---- a write through a read-only mapping ---- */

static void reader(void) {
  int fd;
  init(1);
  take(mine, &fd);
  Ptr p = import(fd, 256 * MIB, READ_ONLY);
  result("read", "%zu bytes differ", differing(p, 256 * MIB, pattern));
  int code = cuMemsetD8(p, 1, 4096), waited = cuCtxSynchronize();
  result("write", "cuMemsetD8 returns %d, cuCtxSynchronize %d", code, waited);
  size_t free, total;
  result("the reader's context afterwards", "cuMemGetInfo returns %d", cuMemGetInfo(&free, &total));
}

static void checking_exporter(void) {
  init(1);
  int fd;
  Handle h = create(256 * MIB, &exportable);
  Ptr p = map(h, 256 * MIB, READ_WRITE);
  MUST(cuMemsetD8(p, pattern, 256 * MIB));
  MUST(cuCtxSynchronize());
  MUST(cuMemExport(&fd, h, POSIX_FD, 0));
  pass(mine, &fd, 1);
  hear(mine);
  result("the exporter's contents", "%zu bytes differ", differing(p, 256 * MIB, pattern));
}

static void read_only(void) {
  part = "read-only mapping";
  int fd;
  struct child e = start(checking_exporter), r = start(reader);
  take(e.socket, &fd);
  pass(r.socket, &fd, 1);
  close(fd);
  int status;
  CHECK(waitpid(r.pid, &status, 0) == r.pid);
  tell(e.socket);
  finish(e, 0);
}

/* ---- until another process can create ---- */

static int mapped; /* whether the holder maps and writes what it holds */

static size_t half_of_all(void) {
  size_t free, total;
  init(1);
  MUST(cuMemGetInfo(&free, &total));
  return total / 2 / GIB * GIB;
}

/* holder takes all but 2 GiB, in chunks. */
static void holder(void) {
  size_t free, total;
  init(1);
  MUST(cuMemGetInfo(&free, &total));
  size_t n = (free - 2 * GIB) / chunk;
  Handle *h = calloc(n, sizeof *h);
  for (size_t i = 0; i < n; i++) {
    h[i] = create(chunk, &private);
    if (mapped) {
      Ptr p = map(h[i], chunk, READ_WRITE);
      MUST(cuMemsetD8(p, pattern, chunk));
    }
  }
  MUST(cuCtxSynchronize());
  tell(mine);
  hear(mine);
}

/* asker tries until it can create half of the GPU. */
static void asker(void) {
  size_t size = half_of_all();
  Handle h;
  tell(mine);
  hear(mine);
  while (cuMemCreate(&h, size, &private, 0) != 0) usleep(100);
  shared->at = now();
  tell(mine);
  hear(mine);
}

static void after_kill(size_t size, int maps) {
  enum { TIMES = 5 };
  double t[TIMES];
  char what[80];
  part = "after SIGKILL";
  chunk = size, mapped = maps;
  for (int i = 0; i < TIMES; i++) {
    struct child h = start(holder), a = start(asker);
    CHECK(hear(h.socket));
    CHECK(hear(a.socket));
    tell(a.socket);
    usleep(20000);
    double begin = now();
    kill(h.pid, SIGKILL);
    CHECK(hear(a.socket));
    t[i] = shared->at - begin;
    finish(a, SIGKILL);
    finish(h, SIGKILL);
  }
  snprintf(what, sizeof what, "holder of all in %zu MiB%s", chunk / MIB, maps ? ", mapped" : "");
  times(what, t, TIMES);
}

/* giver leaves 512 MiB of the GPU, and releases 1 GiB that it had mapped in chunks once it is told to. */
static void giver(void) {
  init(1);
  size_t free, total, n = GIB / chunk;
  MUST(cuMemGetInfo(&free, &total));
  create((free - GIB - 512 * MIB) / (2 * MIB) * (2 * MIB), &private);
  Handle *h = calloc(n, sizeof *h);
  Ptr p;
  struct access a = {{1, 0}, READ_WRITE};
  MUST(cuMemAddressReserve(&p, GIB, 0, 0, 0));
  for (size_t i = 0; i < n; i++) {
    h[i] = create(chunk, &private);
    MUST(cuMemMap(p + i * chunk, chunk, 0, h[i], 0));
  }
  MUST(cuMemSetAccess(p, GIB, &a, 1));
  if (mapped) {
    MUST(cuMemsetD8(p, pattern, GIB));
    MUST(cuCtxSynchronize());
  }
  tell(mine);
  hear(mine);
  double begin = now();
  MUST(cuMemUnmap(p, GIB));
  shared->value[0] = now() - begin;
  for (size_t i = 0; i < n; i++) MUST(cuMemRelease(h[i]));
  shared->value[1] = now() - begin;
  shared->value[2] = now();
  shared->step = 1;
  hear(mine);
}

static size_t wanted; /* the chunks that the getter creates */

/* getter creates 1 GiB once the giver has released it, and counts how often it had to try. */
static void getter(void) {
  size_t n = GIB / wanted;
  Handle *h = calloc(n, sizeof *h);
  Ptr p;
  struct access a = {{1, 0}, READ_WRITE};
  int tries = 0;
  init(1);
  tell(mine);
  hear(mine);
  double begin = now();
  int code = cuMemCreate(h, GIB, &private, 0);
  shared->value[3] = now() - begin;
  if (code == 0) MUST(cuMemRelease(h[0])); /* what was free sufficed: nothing is shown */
  shared->value[4] = code;
  tell(mine);
  while (shared->step == 0) {
  }
  begin = now();
  for (size_t i = 0; i < n; i++, tries++)
    while (cuMemCreate(&h[i], wanted, &private, 0) != 0) tries++;
  shared->value[5] = now() - begin;
  MUST(cuMemAddressReserve(&p, GIB, 0, 0, 0));
  for (size_t i = 0; i < n; i++) MUST(cuMemMap(p + i * wanted, wanted, 0, h[i], 0));
  MUST(cuMemSetAccess(p, GIB, &a, 1));
  shared->value[6] = now() - begin;
  shared->value[7] = tries - (double)n;
  tell(mine);
  hear(mine);
}

static void after_release(size_t given, size_t got, int written) {
  enum { TIMES = 20 };
  double t[5][TIMES], retries = 0;
  static const char *const names[5] = {"unmap", "unmap and release", "then create", "then create, map and set access",
                                       "a create that fails"};
  char what[80];
  chunk = given, wanted = got, mapped = written;
  for (int i = 0; i < TIMES; i++) {
    shared->step = 0;
    struct child g = start(getter);
    CHECK(hear(g.socket)); /* its context is there before the giver measures what is free */
    struct child v = start(giver);
    CHECK(hear(v.socket));
    tell(g.socket);
    CHECK(hear(g.socket));
    tell(v.socket);
    CHECK(hear(g.socket));
    t[0][i] = shared->value[0], t[1][i] = shared->value[1], t[2][i] = shared->value[5], t[3][i] = shared->value[6];
    t[4][i] = shared->value[3], retries += shared->value[7];
    if (shared->value[4] == 0) result("create before the release", "did not fail");
    finish(g, SIGKILL);
    finish(v, SIGKILL);
  }
  snprintf(what, sizeof what, "1 GiB%s: %zu for %zu MiB", written ? ", written" : "", given / MIB, got / MIB);
  part = what;
  for (int k = 0; k < 5; k++) times(names[k], t[k], TIMES);
  result("attempts that failed", "%.1f a run", retries / TIMES);
}

/* ---- whether new memory is zero ---- */

static void writer(void) {
  chunk = GIB, mapped = 1;
  holder();
}

static void looker(void) {
  size_t free, total, other = 0, bytes = 0;
  init(1);
  MUST(cuMemGetInfo(&free, &total));
  for (int i = 0; i < 16 && (i + 3) * GIB < free; i++, bytes += GIB)
    other += differing(map(create(GIB, &private), GIB, READ_WRITE), GIB, 0);
  result("after another process wrote all of it", "%zu of %zu bytes are not zero", other, bytes);
}

static void own_looker(void) {
  size_t free, total, other = 0;
  init(1);
  MUST(cuMemGetInfo(&free, &total));
  for (int i = 0; i < 4; i++) {
    Handle h = create(GIB, &private);
    Ptr p = map(h, GIB, READ_WRITE);
    if (i) other += differing(p, GIB, 0);
    MUST(cuMemsetD8(p, pattern, GIB));
    MUST(cuCtxSynchronize());
    unmap(p, GIB);
    MUST(cuMemRelease(h));
  }
  result("after this process wrote and released it", "%zu of %zu bytes are not zero", other, 3 * GIB);
}

static void zeroed(void) {
  part = "new memory";
  struct child w = start(writer);
  CHECK(hear(w.socket));
  finish(w, SIGKILL);
  sleep(1);
  finish(start(looker), 0);
  finish(start(own_looker), 0);
}

/* ---- */

static size_t device_free;

static void ask_free(void) {
  size_t free, total;
  init(1);
  MUST(cuMemGetInfo(&free, &total));
  shared->amount = (double)free;
}

int main(int argc, char **argv) {
  int n = argc > 1 ? atoi(argv[1]) : 40000;
  struct rlimit files;
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  files.rlim_cur = files.rlim_max;
  CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
  finish(start(ask_free), 0);
  device_free = (size_t)shared->amount;

  without_context();
  killed();
  costs(2 * MIB, 1000);
  costs(32 * MIB, 200);
  costs(256 * MIB, 50);
  if ((size_t)n > device_free / 10 * 9 / (2 * MIB)) n = device_free / 10 * 9 / (2 * MIB);
  if ((rlim_t)n + 100 > files.rlim_cur) n = files.rlim_cur - 100;
  if (n > 2000) costs(2 * MIB, n);
  read_only();
  after_kill(GIB, 0);
  after_kill(GIB, 1);
  after_kill(2 * MIB, 1);
  after_release(32 * MIB, 32 * MIB, 0);
  after_release(32 * MIB, 32 * MIB, 1);
  after_release(2 * MIB, 2 * MIB, 1);
  after_release(2 * MIB, GIB, 1);
  after_release(GIB, 2 * MIB, 1);
  zeroed();
  return 0;
}
