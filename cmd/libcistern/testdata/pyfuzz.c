/* An interpreter made of noise: memory in which any word may be a pointer to anywhere, an address that is not there, a
 * number, or a type where an object has one. pystack.c must not fault in it, however it is asked, and must give an
 * interpreter up that is not what its version says. */
#define _GNU_SOURCE
#include "../pystack.c"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct { char bytes[512]; } types[5]; /* code, str, bytes, frame, type */
static const char *type_names[] = {"PyCode_Type", "PyUnicode_Type", "PyBytes_Type", "PyFrame_Type", "PyType_Type"};
static uint64_t table[100];
static uint32_t hex;
static const char *words;
static int references, asked_words; /* Py_NewRef is there; how often the words were asked for */
static void *thread_now;
static uint64_t seed;

static uint64_t chance(void) {
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return seed * 0x2545f4914f6cdd1du;
}

static void *the_thread(void) { return thread_now; }
static const char *the_version(void) { return asked_words++, words; }

static int no(void) { return 0; }

static void *lookup(const char *name, void *missing) {
  if (missing != NULL && strcmp(name, missing) == 0)
    return NULL;
  for (int i = 0; i < 5; i++)
    if (strcmp(name, type_names[i]) == 0)
      return &types[i];
  if (strcmp(name, "Py_Version") == 0)
    return hex == 0 ? NULL : &hex;
  if (strcmp(name, "Py_NewRef") == 0)
    return references ? (void *)the_version : NULL;
  if (strcmp(name, "Py_GetVersion") == 0)
    return (void *)the_version;
  if (strcmp(name, "_PyRuntime") == 0)
    return table;
  if (strcmp(name, hex >> 16 < 0x030d ? "_Py_IsFinalizing" : "Py_IsFinalizing") == 0)
    return (void *)no;
  return strcmp(name, "PyGILState_GetThisThreadState") == 0 ? (void *)the_thread : NULL;
}

static int failures;

static void expect(const char *what, int got, int want) {
  if (got != want)
    printf("%s: %s, want %s\n", what, pystack_why(got), pystack_why(want)), failures++;
}

static void sound(void) {
  memset(types, 0, sizeof types);
  for (int i = 0; i < 5; i++) {
    *(uint64_t *)(types[i].bytes + 8) = (uintptr_t)&types[4];
    *(uint64_t *)(types[i].bytes + 168) = 1 << 12;
  }
  *(const char **)(types[0].bytes + 24) = "code";
  memset(table, 0, sizeof table);
  memcpy(table, "xdebugpy", 8);
  table[1] = 0x030d0000;
  table[23] = 72, table[29] = 8, table[30] = 0, table[31] = 56, table[33] = 70, table[35] = 112, table[37] = 128, table[38] = 136, table[39] = 68, table[43] = 200;
  hex = 0x030d00f0;
  references = 1;
  words = "3.13.0 (main)";
}

static struct pystack p;
static struct pystack_learned learned;

static int find(void *ctx) {
  memset(&learned, 0, sizeof learned);
  return pystack_find(&p, &learned, lookup, ctx);
}

static void refusals(void) {
  static const char *needed[] = {"PyCode_Type", "PyUnicode_Type", "PyBytes_Type", "PyFrame_Type", "PyType_Type", "Py_GetVersion", "PyGILState_GetThisThreadState"};
  sound();
  expect("sound", find(NULL), PYSTACK_FOUND);
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
    expect(needed[i], find((void *)needed[i]), PYSTACK_MISSING);
  expect("no table", find((void *)"_PyRuntime"), PYSTACK_LAYOUT);
  expect("no way to know that it ends", find((void *)"Py_IsFinalizing"), PYSTACK_LAYOUT);
  table[1] = 0x030e0000;
  expect("another version's table", find(NULL), PYSTACK_LAYOUT);
  sound();
  table[0]++;
  expect("no cookie", find(NULL), PYSTACK_LAYOUT);
  sound();
  table[2] = 1;
  expect("free-threaded", find(NULL), PYSTACK_FREE_THREADED);
  sound();
  table[29] = 4096;
  expect("an offset beyond all", find(NULL), PYSTACK_LAYOUT);
  sound();
  *(uint64_t *)(types[0].bytes + 168) = 0;
  expect("not ready", find(NULL), PYSTACK_EARLY);
  sound();
  *(uint64_t *)(types[0].bytes + 8) = 7;
  expect("other heads", find(NULL), PYSTACK_LAYOUT);
  words = "3.14.0 free-threading build";
  expect("other heads, free-threaded", find(NULL), PYSTACK_FREE_THREADED);
  sound();
  *(const char **)(types[0].bytes + 24) = "cod";
  expect("another type", find(NULL), PYSTACK_LAYOUT);
  static const uint32_t versions[] = {0x02070000, 0x03090000, 0x030f0000, 0x04000000};
  for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
    sound();
    hex = versions[i];
    expect("version", find(NULL), PYSTACK_VERSION);
  }
  sound();
  hex = 0, references = 0;
  expect("before 3.10", find(NULL), PYSTACK_VERSION);
  sound();
  hex = 0, words = "", asked_words = 0; /* as another thread leaves them that asks for them at the same moment */
  expect("3.10", find(NULL), PYSTACK_FOUND);
  if (p.version != 0x030a || asked_words != 0)
    printf("3.10: version %x, its words were asked for %d times\n", p.version, asked_words), failures++;
}

/* whole lays out a thread with three frames in memory: p says where the version has its fields. */
static void put(char *at, uint64_t v) { memcpy(at, &v, 8); }
static void put4(char *at, uint32_t v) { memcpy(at, &v, 4); }

static char *text(char *at, const char *s) {
  put(at + 8, (uintptr_t)&types[1]);
  put(at + 16, strlen(s));
  put4(at + 32, 1 << 2 | 1 << 5 | 1 << 6);
  strcpy(at + p.string_ascii, s);
  return at;
}

static void whole(char *m) {
  char *table = m + 2816, *file = text(m + 2944, "/folder/file.py"), *name = text(m + 3072, "function"), *next = NULL;
  put(table + 8, (uintptr_t)&types[2]);
  put(table + 16, 3);
  memcpy(table + 32, p.version == 0x030a ? "\x10\x03\x00" : "\xef\x06\x80", 3); /* for all of it: three lines further */
  for (int i = 0; i < 3; i++) {
    char *frame = m + 512 + 128 * i, *code = m + 1024 + 512 * i;
    if (next != NULL)
      put(next + p.frame_back, (uintptr_t)frame);
    put(frame + 8, (uintptr_t)&types[3]); /* overwritten where frames are no objects */
    put(frame + p.frame_back, 0);
    put(frame + p.frame_code, (uintptr_t)code);
    if (p.version == 0x030a)
      put4(frame + p.frame_at, 2), put4(frame + p.frame_line, 0);
    else
      put(frame + p.frame_at, (uintptr_t)code + p.code_start + 4), frame[p.frame_owner] = 0;
    put(code + 8, (uintptr_t)&types[0]);
    put(code + 16, 8);
    put(code + p.code_file, (uintptr_t)file);
    put(code + p.code_name, (uintptr_t)name);
    put(code + p.code_table, (uintptr_t)table);
    put4(code + p.code_line, 100);
    next = frame;
  }
  char *first = m + 512;
  if (p.version == 0x030b || p.version == 0x030c) {
    put(m + 128 + p.cframe, (uintptr_t)first);
    first = m + 128;
  }
  put(m + p.thread_frame, (uintptr_t)first);
  thread_now = m;
}

/* damaged changes a word of what is whole, anywhere. */
static void damaged(char *page, long times) {
  static const uint32_t versions[] = {0x030a00f0, 0x030b00f0, 0x030c00f0, 0x030d00f0};
  long less = 0;
  for (long t = -4; t < times; t++) {
    sound();
    hex = versions[t & 3];
    if (find(NULL) != PYSTACK_FOUND)
      abort();
    memset(page, 0, 4096);
    whole(page);
    if (t >= 0) {
      uint64_t bad[] = {0, 7, (uintptr_t)page - 8, (uintptr_t)page + 4088, (uintptr_t)page + 4096, (uintptr_t)page + chance() % 4096, chance(), (uint64_t)-1};
      put(page + chance() % 3328 / 8 * 8, bad[chance() % 8]);
    }
    struct pyframe f[8];
    char file[64], func[64];
    int n = pystack_walk(&p, f, 8);
    for (int i = 0; i < n; i++)
      if (pystack_names(&p, &f[i], file, sizeof file, func, sizeof func) && t < 0 &&
          (f[i].line != 103 || f[i].first_line != 100 || strcmp(file, "/folder/file.py") != 0 || strcmp(func, "function") != 0))
        printf("version %x: %s %s %u\n", hex, file, func, f[i].line), failures++;
    if (t < 0 && n != 3)
      printf("version %x: %d frames, want 3\n", hex, n), failures++;
    less += n < 3;
  }
  printf("%ld damaged, %ld of them refused or cut short\n", times, less);
  if (less == 0)
    printf("damage was not noticed\n"), failures++;
}

/* sandbox has the kernel answer process_vm_readv with an error from now on, as a container's filter does. */
static void sandbox(int error) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog filter = {sizeof code / sizeof *code, code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    perror("seccomp"), exit(77);
}

int main(int argc, char **argv) {
  long times = argc > 1 ? atol(argv[1]) : 20000;
  seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
  if (argc > 3)
    sandbox(atoi(argv[3]));
  printf("seed %llu\n", (unsigned long long)seed);
  refusals();
  /* Pages with nothing before, between and behind them. */
  enum { PAGE = 4096, PAGES = 9 };
  char *memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (int i = 0; i < PAGES; i += 2)
    mprotect(memory + i * PAGE, PAGE, PROT_NONE);
  long frames = 0, wrong = 0, named = 0;
  static const uint32_t versions[] = {0x030a00f0, 0x030b00f0, 0x030c00f0, 0x030d00f0};
  for (long t = 0; t < times; t++) {
    sound();
    hex = versions[t % 4];
    if (find(NULL) != PYSTACK_FOUND)
      abort();
    for (int round = 0; round < TRIES + 1; round++) {
      for (int i = 1; i < PAGES; i += 2)
        for (int w = 0; w < PAGE / 8; w++) {
          uint64_t *at = (uint64_t *)(memory + i * PAGE) + w;
          switch (chance() % 8) {
          case 0: case 1: *at = (uintptr_t)memory + chance() % (PAGES * PAGE) / 8 * 8; break;
          case 2: case 3: *at = (uintptr_t)&types[chance() % 4]; break;
          case 4: *at = chance() % 64; break;
          case 5: *at = chance() % 300 << 32 | chance() % 300; break;
          case 6: *at = (uintptr_t)at + chance() % 512 / 8 * 8; break;
          default: *at = chance(); break;
          }
        }
      thread_now = memory + PAGE + chance() % 64 * 8;
      struct pyframe f[64];
      int n = pystack_walk(&p, f, 64);
      if (n < 0 || n > 64)
        abort();
      frames += n;
      if (learned.state == SURE) /* noise that happens to look right; what follows would be believed */
        break;
      for (int i = 0; i < n; i++) {
        char file[32], func[5];
        memset(file, 'x', sizeof file), memset(func, 'x', sizeof func);
        named += pystack_names(&p, &f[i], file, sizeof file, func, sizeof func);
        if (memchr(file, 0, sizeof file) == NULL || memchr(func, 0, sizeof func) == NULL)
          abort();
      }
    }
    wrong += pystack_state(&p) == PYSTACK_LAYOUT;
  }
  damaged(memory + PAGE, 20 * times);
  /* What is plainly not there. */
  static const uint64_t nowhere[] = {8, 0x7fffffffe000, 0xffff800000000000u, 0x1000000000001u};
  for (size_t i = 0; i < sizeof nowhere / sizeof *nowhere; i++) {
    sound();
    find(NULL);
    thread_now = (void *)(uintptr_t)nowhere[i];
    struct pyframe f;
    for (int round = 0; round < TRIES; round++)
      if (pystack_walk(&p, &f, 1) != 0)
        abort();
    expect("a thread that is not there", pystack_state(&p), PYSTACK_LAYOUT);
  }
  printf("%ld interpreters, %ld given up, %ld frames\n", times, wrong, frames);
  if (wrong < times / 2)
    printf("too few were given up\n"), failures++;
  if (failures == 0)
    printf("ok\n");
  return failures != 0;
}
