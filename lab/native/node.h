/* The driver as node.c uses it, opened at run time, and what it does with memory. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

/* ---- the driver ---- */

typedef uint64_t Handle, Ptr;
typedef void *Context;

struct location {
  int type, id;
};

/* CUmemAllocationProp */
struct prop {
  int type, handles;
  struct location location;
  void *win32;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

/* CUmemAccessDesc */
struct access {
  struct location location;
  int flags;
};

enum { READ_ONLY = 1, READ_WRITE = 3, POSIX_FD = 1 };

static int (*cuInit)(unsigned);
static int (*cuDeviceGet)(int *, int);
static int (*cuDevicePrimaryCtxRetain)(Context *, int);
static int (*cuDevicePrimaryCtxGetState)(int, unsigned *, int *);
static int (*cuCtxPushCurrent)(Context);
static int (*cuCtxSynchronize)(void);
static int (*cuMemGetInfo)(size_t *, size_t *);
static int (*cuMemCreate)(Handle *, size_t, const struct prop *, unsigned long long);
static int (*cuMemRelease)(Handle);
static int (*cuMemExport)(void *, Handle, int, unsigned long long);
static int (*cuMemImport)(Handle *, void *, int);
static int (*cuMemAddressReserve)(Ptr *, size_t, size_t, Ptr, unsigned long long);
static int (*cuMemAddressFree)(Ptr, size_t);
static int (*cuMemMap)(Ptr, size_t, size_t, Handle, unsigned long long);
static int (*cuMemUnmap)(Ptr, size_t);
static int (*cuMemSetAccess)(Ptr, size_t, const struct access *, size_t);
static int (*cuMemsetD8)(Ptr, unsigned char, size_t);
static int (*cuMemcpyDtoH)(void *, Ptr, size_t);

static void *library(const char *name) {
  void *l = dlopen(name, RTLD_NOW);
  if (l == NULL) {
    fprintf(stderr, "node: %s\n", dlerror());
    exit(2);
  }
  return l;
}

static void *symbol(void *l, const char *name) {
  void *f = dlsym(l, name);
  if (f == NULL) {
    fprintf(stderr, "node: the driver has no %s\n", name);
    exit(2);
  }
  return f;
}

static const char *part = "start"; /* what is being measured, for messages */

static void must(int line, int code, const char *what) {
  if (code == 0) return;
  printf("%-34s FAILED: line %d: %s is error %d\n", part, line, what, code);
  fflush(stdout);
  _exit(1);
}
#define MUST(call) must(__LINE__, call, #call)
#define CHECK(ok) must(__LINE__, (ok) ? 0 : errno ? errno : -1, #ok)

static void result(const char *what, const char *format, ...) {
  va_list args;
  va_start(args, format);
  printf("%-26s %-42s ", part, what);
  vprintf(format, args);
  putchar('\n');
  fflush(stdout);
  va_end(args);
}

static double now(void) { /* us */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void load(void) {
  const char *name = getenv("CUDA_LIBRARY");
  void *l = library(name ? name : "libcuda.so.1");
  cuInit = symbol(l, "cuInit");
  cuDeviceGet = symbol(l, "cuDeviceGet");
  cuDevicePrimaryCtxRetain = symbol(l, "cuDevicePrimaryCtxRetain");
  cuDevicePrimaryCtxGetState = symbol(l, "cuDevicePrimaryCtxGetState");
  cuCtxPushCurrent = symbol(l, "cuCtxPushCurrent_v2");
  cuCtxSynchronize = symbol(l, "cuCtxSynchronize");
  cuMemGetInfo = symbol(l, "cuMemGetInfo_v2");
  cuMemCreate = symbol(l, "cuMemCreate");
  cuMemRelease = symbol(l, "cuMemRelease");
  cuMemExport = symbol(l, "cuMemExportToShareableHandle");
  cuMemImport = symbol(l, "cuMemImportFromShareableHandle");
  cuMemAddressReserve = symbol(l, "cuMemAddressReserve");
  cuMemAddressFree = symbol(l, "cuMemAddressFree");
  cuMemMap = symbol(l, "cuMemMap");
  cuMemUnmap = symbol(l, "cuMemUnmap");
  cuMemSetAccess = symbol(l, "cuMemSetAccess");
  cuMemsetD8 = symbol(l, "cuMemsetD8_v2");
  cuMemcpyDtoH = symbol(l, "cuMemcpyDtoH_v2");
  MUST(cuInit(0));
}

/* init is cuInit, and a current context where one is wanted. */
static void init(int context) {
  load();
  if (!context) return;
  Context c;
  MUST(cuDevicePrimaryCtxRetain(&c, 0));
  MUST(cuCtxPushCurrent(c));
}

static const struct prop exportable = {.type = 1, .handles = POSIX_FD, .location = {1, 0}};
static const struct prop private = {.type = 1, .location = {1, 0}};

static Handle create(size_t size, const struct prop *p) {
  Handle h;
  MUST(cuMemCreate(&h, size, p, 0));
  return h;
}

static Ptr map(Handle h, size_t size, int access) {
  Ptr p;
  struct access a = {{1, 0}, access};
  MUST(cuMemAddressReserve(&p, size, 0, 0, 0));
  MUST(cuMemMap(p, size, 0, h, 0));
  MUST(cuMemSetAccess(p, size, &a, 1));
  return p;
}

static void unmap(Ptr p, size_t size) {
  MUST(cuMemUnmap(p, size));
  MUST(cuMemAddressFree(p, size));
}

/* differing counts the bytes at p that differ from value. */
static size_t differing(Ptr p, size_t size, unsigned char value) {
  static unsigned char block[16 << 20];
  size_t n = 0;
  for (size_t at = 0; at < size; at += sizeof block) {
    size_t some = size - at < sizeof block ? size - at : sizeof block;
    MUST(cuMemcpyDtoH(block, p + at, some));
    for (size_t i = 0; i < some; i++) n += block[i] != value;
  }
  return n;
}
