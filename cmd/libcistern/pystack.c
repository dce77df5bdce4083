//go:build linux && cgo

/* How CPython keeps its frames differs from version to version: up to 3.10 in objects that lead from one to the next,
 * from 3.11 on in records on a stack of its own, with a record for every entry into the interpreter from C (3.12 and
 * later), which is no frame of a function. From 3.13 on the interpreter says itself where most of its fields are.
 *
 * Until a walk has found all as expected, everything is read through the kernel, which refuses addresses that are not
 * mapped: so a build with other structures is found out and left alone, not crashed in. */
#include "pystack.h"
#include "kernel.h"

#if defined(__x86_64__) || defined(__aarch64__)

typedef uint64_t __attribute__((may_alias)) word;
typedef uint32_t __attribute__((may_alias)) half;
typedef uint16_t __attribute__((may_alias)) quarter;
struct __attribute__((packed, may_alias)) loose { uint64_t w; };

/* Of what every version has alike, on 64 bits. */
enum {
  OB_TYPE = 8,
  OB_SIZE = 16,
  BYTES_DATA = 32,
  STRING_LENGTH = 16,
  STRING_HASH = 24, /* -1 before its first use */
  STRING_STATE = 32,
  TYPE_NAME = 24,
  TYPE_FLAGS = 168,
  TYPE_READY = 1 << 12
};

enum { OWNED_BY_GENERATOR = 1, OWNED_BY_C = 3 }; /* and above */
enum { TRIES = 8, SURE, WRONG }; /* below, the walks so far that found other than expected */
enum { MOST_STEPS = 1 << 14, MOST_TEXT = 1 << 16 };

static int plausible(uint64_t p) { return p >= 65536 && p >> USER_BITS == 0; }

static int sure(const struct pystack *p) { return __atomic_load_n(&p->learned->state, __ATOMIC_RELAXED) == SURE; }

/* fetch reads a number of n bytes at an address, through the kernel unless all is known to be as expected. */
static int fetch(int sure, uint64_t at, size_t n, uint64_t *out) {
  *out = 0;
  if (!plausible(at) || (at & (n - 1)) != 0)
    return 0;
  if (!sure)
    return read_self((const void *)(uintptr_t)at, out, n);
  const char *m = (const char *)(uintptr_t)at;
  *out = n == 8 ? *(const word *)m : n == 4 ? *(const half *)m : n == 2 ? *(const quarter *)m : (unsigned char)*m;
  return 1;
}

static int get(const struct pystack *p, uint64_t at, size_t n, uint64_t *out) { return fetch(sure(p), at, n, out); }

/* there reports whether n bytes are, as far as both ends tell. */
static int there(int sure, uint64_t at, uint64_t n) {
  uint64_t byte;
  return n == 0 || (fetch(sure, at, 1, &byte) && fetch(sure, at + n - 1, 1, &byte));
}

static int is_a(int sure, uint64_t object, const void *type) {
  uint64_t t;
  return (object & 7) == 0 && fetch(sure, object + OB_TYPE, 8, &t) && t == (uintptr_t)type;
}

static int same(const char *a, const char *b) {
  while (*a != 0 && *a == *b)
    a++, b++;
  return *a == *b;
}

/* Where the fields are, by version; from 3.13 on, where the interpreter says so. */
static void layout_310(struct pystack *p) {
  p->thread_frame = 24, p->frame_back = 24, p->frame_code = 32, p->frame_at = 96, p->frame_line = 100;
  p->code_line = 40, p->code_start = 48, p->code_file = 104, p->code_name = 112, p->code_table = 120;
  p->string_ascii = 48, p->string_wide = 72;
}

static void layout_311(struct pystack *p) {
  p->thread_frame = 56, p->cframe = 8, p->frame_code = 32, p->frame_back = 48, p->frame_at = 56, p->frame_owner = 69;
  p->code_line = 72, p->code_file = 112, p->code_name = 128, p->code_table = 136, p->code_start = 184;
  p->string_ascii = 48, p->string_wide = 72;
}

static void layout_312(struct pystack *p) {
  p->thread_frame = 56, p->cframe = 0, p->frame_code = 0, p->frame_back = 8, p->frame_at = 56, p->frame_owner = 70;
  p->code_line = 68, p->code_file = 112, p->code_name = 128, p->code_table = 136, p->code_start = 192;
  p->string_ascii = 40, p->string_wide = 56;
}

/* The table that _PyRuntime begins with: its numbers, by their index. */
struct debug_offsets {
  int free_threaded, current_frame, previous, executable, at, owner, file, qualified, table, line, start;
};

static const struct debug_offsets offsets_313 = {2, 23, 29, 30, 31, 33, 35, 37, 38, 39, 43};
static const struct debug_offsets offsets_314 = {2, 26, 32, 33, 34, 36, 40, 42, 43, 44, 48};

static int layout_from(struct pystack *p, const word *table) {
  const struct debug_offsets *o = p->version == 0x030d ? &offsets_313 : &offsets_314;
  if (table[0] != 0x7970677562656478u || table[1] >> 16 != p->version) /* "xdebugpy" */
    return PYSTACK_LAYOUT;
  if (table[o->free_threaded] != 0)
    return PYSTACK_FREE_THREADED;
  const int from[] = {o->current_frame, o->previous, o->executable, o->at, o->owner, o->file, o->qualified, o->table, o->line, o->start};
  uint16_t *to[] = {&p->thread_frame, &p->frame_back, &p->frame_code, &p->frame_at, &p->frame_owner, &p->code_file, &p->code_name, &p->code_table, &p->code_line, &p->code_start};
  for (size_t i = 0; i < sizeof from / sizeof *from; i++) {
    if (table[from[i]] >= 1024)
      return PYSTACK_LAYOUT;
    *to[i] = (uint16_t)table[from[i]];
  }
  p->string_ascii = 40, p->string_wide = 56;
  return PYSTACK_FOUND;
}

int pystack_find(struct pystack *p, struct pystack_learned *learned, void *(*lookup)(const char *name, void *ctx), void *ctx) {
  p->learned = learned;
  p->version = p->cframe = p->frame_line = p->frame_owner = 0;
  p->thread = (void *(*)(void))(uintptr_t)lookup("PyGILState_GetThisThreadState", ctx);
  void *finalizing = lookup("Py_IsFinalizing", ctx); /* with an underscore before 3.13 */
  p->finalizing = (int (*)(void))(uintptr_t)(finalizing != NULL ? finalizing : lookup("_Py_IsFinalizing", ctx));
  p->code_type = lookup("PyCode_Type", ctx);
  p->string_type = lookup("PyUnicode_Type", ctx);
  p->bytes_type = lookup("PyBytes_Type", ctx);
  p->frame_type = lookup("PyFrame_Type", ctx);
  const void *types = lookup("PyType_Type", ctx), *hex = lookup("Py_Version", ctx), *words = lookup("Py_GetVersion", ctx);
  if (p->thread == NULL || p->code_type == NULL || p->string_type == NULL || p->bytes_type == NULL || p->frame_type == NULL || types == NULL || words == NULL)
    return PYSTACK_MISSING;
  /* A type is ready once the interpreter has run: then all of it is loaded and relocated too, and may be called. */
  const char *code = p->code_type;
  if (!(*(const word *)(code + TYPE_FLAGS) & TYPE_READY))
    return PYSTACK_EARLY;
  /* Py_Version came with 3.11, Py_NewRef as a function with 3.10. The words of Py_GetVersion are not for threads: up to 3.10
   * each call writes them anew, and another thread may read them empty. */
  if (hex != NULL)
    p->version = *(const half *)hex >> 16;
  else if (lookup("Py_NewRef", ctx) != NULL)
    p->version = 0x030a;
  if (p->version < 0x030a || p->version > 0x030e)
    return PYSTACK_VERSION;
  if (p->finalizing == NULL)
    return PYSTACK_LAYOUT;
  if (*(const word *)(code + OB_TYPE) != (uintptr_t)types) { /* every object begins otherwise */
    const char *v = ((const char *(*)(void))(uintptr_t)words)();
    for (; v != NULL && *v != 0; v++)
      if (v[0] == 'f' && v[1] == 'r' && v[2] == 'e' && v[3] == 'e' && v[4] == '-')
        return PYSTACK_FREE_THREADED;
    return PYSTACK_LAYOUT;
  }
  uint64_t name = *(const word *)(code + TYPE_NAME);
  if (!plausible(name) || !same((const char *)(uintptr_t)name, "code"))
    return PYSTACK_LAYOUT;
  switch (p->version) {
  case 0x030a: layout_310(p); break;
  case 0x030b: layout_311(p); break;
  case 0x030c: layout_312(p); break;
  default: {
    const word *table = lookup("_PyRuntime", ctx);
    int r = table == NULL ? PYSTACK_LAYOUT : layout_from(p, table);
    if (r != PYSTACK_FOUND)
      return r;
  }
  }
  p->code_traceable = (uint16_t)(p->code_start - 16);
  return PYSTACK_FOUND;
}

int pystack_state(const struct pystack *p) { return __atomic_load_n(&p->learned->state, __ATOMIC_RELAXED) == WRONG ? PYSTACK_LAYOUT : PYSTACK_FOUND; }

const char *pystack_why(int found) {
  switch (found) {
  case PYSTACK_FOUND: return "found";
  case PYSTACK_MISSING: return "there is no Python in the process";
  case PYSTACK_EARLY: return "Python is not initialised yet";
  case PYSTACK_VERSION: return "its frames are known from Python 3.10 to 3.14 only";
  case PYSTACK_FREE_THREADED: return "this Python is built without the GIL (free-threaded)";
  default: return "the objects of this Python are not laid out as those of its version are";
  }
}

/* Lines. A table has entries for consecutive pieces of the code; the entry is looked for in which an instruction is. */

struct bytes {
  const unsigned char *at, *end;
};

static uint32_t variable(struct bytes *b) {
  uint32_t n = 0;
  for (int shift = 0; b->at < b->end && shift < 32; shift += 6) {
    unsigned char c = *b->at++;
    n |= (uint32_t)(c & 63) << shift;
    if (!(c & 64))
      break;
  }
  return n;
}

/* further is a line so many further on or back: without overflow, as a damaged table may say anything. */
static int32_t further(int32_t line, struct bytes *b) {
  uint32_t n = variable(b);
  return (int32_t)(n & 1 ? (uint32_t)line - (n >> 1) : (uint32_t)line + (n >> 1));
}

/* From 3.11 on: each entry is for up to eight units of code, and has a code for how it gives its line. */
static uint32_t line_311(struct bytes b, uint32_t unit, uint32_t first) {
  uint32_t from = 0;
  int32_t line = (int32_t)first;
  while (b.at < b.end) {
    unsigned char head = *b.at++;
    int kind = head >> 3 & 15, none = 0;
    if (kind == 15) {
      none = 1;
    } else if (kind == 14 || kind == 13) {
      line = further(line, &b);
    } else if (kind >= 10) {
      line += kind - 10;
    }
    from += (head & 7u) + 1;
    if (unit < from)
      return none || line < 0 ? 0 : (uint32_t)line;
    while (b.at < b.end && !(*b.at & 128)) /* columns */
      b.at++;
  }
  return 0;
}

/* 3.10: pairs of bytes of code and lines further; -128 says that a piece has no line. */
static uint32_t line_310(struct bytes b, uint32_t unit, uint32_t first) {
  uint32_t from = 0, at = unit * 2;
  int32_t line = (int32_t)first;
  for (; b.end - b.at >= 2; b.at += 2) {
    int by = (signed char)b.at[1];
    if (by != -128)
      line = (int32_t)((uint32_t)line + (uint32_t)by);
    from += b.at[0];
    if (at < from)
      return by == -128 || line < 0 ? 0 : (uint32_t)line;
  }
  return 0;
}

static uint64_t mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9e3779b97f4a7c15u;
  return h ^ h >> 32;
}

/* line is that of a unit of a code object, which may be -1: before the first. */
static int line(const struct pystack *p, uint64_t code, const struct pyframe *f, int64_t unit, uint32_t *out) {
  if (unit < 0) {
    *out = f->first_line;
    return 1;
  }
  uint64_t key = mix(f->id, (uint64_t)unit), *slot = &p->learned->lines[key % PYSTACK_LINES], was = __atomic_load_n(slot, __ATOMIC_RELAXED);
  key &= ~(uint64_t)0xffffff;
  if (was != 0 && (was & ~(uint64_t)0xffffff) == key) {
    *out = (uint32_t)was & 0xffffff;
    return 1;
  }
  uint64_t table, size;
  if (!get(p, code + p->code_table, 8, &table) || !is_a(sure(p), table, p->bytes_type) || !get(p, table + OB_SIZE, 8, &size) || size >> 31 != 0 ||
      !there(sure(p), table + BYTES_DATA, size))
    return 0;
  struct bytes b = {(const unsigned char *)(uintptr_t)(table + BYTES_DATA), NULL};
  b.end = b.at + size;
  *out = p->version == 0x030a ? line_310(b, (uint32_t)unit, f->first_line) : line_311(b, (uint32_t)unit, f->first_line);
  if (*out < 1u << 24)
    __atomic_store_n(slot, key | *out, __ATOMIC_RELAXED);
  return 1;
}

/* Names. */

struct string {
  const unsigned char *data;
  uint64_t length;
  int kind;
};

static int string(const struct pystack *p, int sure, uint64_t object, struct string *s) {
  uint64_t state;
  if (!is_a(sure, object, p->string_type) || !fetch(sure, object + STRING_LENGTH, 8, &s->length) || !fetch(sure, object + STRING_STATE, 4, &state))
    return 0;
  s->kind = (int)(state >> 2 & 7);
  int compact = state >> 5 & 1, ascii = state >> 6 & 1;
  if (!compact || (s->kind != 1 && s->kind != 2 && s->kind != 4) || s->length > MOST_TEXT)
    return 0;
  uint64_t data = object + (ascii ? p->string_ascii : p->string_wide);
  s->data = (const unsigned char *)(uintptr_t)data;
  return there(sure, data, s->length * (uint64_t)s->kind);
}

static uint32_t character(const struct string *s, uint64_t i) {
  uint32_t c = s->kind == 1 ? s->data[i] : s->kind == 2 ? ((const quarter *)s->data)[i] : ((const half *)s->data)[i];
  return c == 0 || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff) ? '?' : c;
}

static size_t width(uint32_t c) { return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }

/* utf8 writes a string, its end or its beginning where there is no room for all. */
static void utf8(const struct string *s, char *out, size_t size, int end) {
  uint64_t from = 0, to = s->length;
  size_t n = 0;
  if (size == 0)
    return;
  if (end) {
    for (from = to; from > 0 && n + width(character(s, from - 1)) < size; from--)
      n += width(character(s, from - 1));
    n = 0;
  }
  for (uint64_t i = from; i < to; i++) {
    uint32_t c = character(s, i);
    size_t w = width(c);
    if (n + w >= size)
      break;
    switch (w) {
    case 1: out[n] = (char)c; break;
    case 2: out[n] = (char)(0xc0 | c >> 6); break;
    case 3: out[n] = (char)(0xe0 | c >> 12); break;
    default: out[n] = (char)(0xf0 | c >> 18); break;
    }
    for (size_t k = 1; k < w; k++)
      out[n + k] = (char)(0x80 | (c >> 6 * (w - 1 - k) & 63));
    n += w;
  }
  out[n] = 0;
}

int pystack_names(const struct pystack *p, const struct pyframe *f, char *file, size_t file_size, char *func, size_t func_size) {
  uint64_t code = (uintptr_t)f->code, a, b;
  struct string path, name;
  if (file_size > 0)
    *file = 0;
  if (func_size > 0)
    *func = 0;
  /* Seldom asked for: always with care. */
  if (!is_a(0, code, p->code_type) || !fetch(0, code + p->code_file, 8, &a) || !fetch(0, code + p->code_name, 8, &b) || !string(p, 0, a, &path) ||
      !string(p, 0, b, &name))
    return 0;
  utf8(&path, file, file_size, 1);
  utf8(&name, func, func_size, 0);
  return 1;
}

/* digest is a number for some bytes, of many for those at both ends. Its steps do not wait for one another. */
static uint64_t digest(const unsigned char *at, uint64_t n) {
  enum { END = 24 };
  uint64_t sum = n, by = 0x9e3779b97f4a7c15u, part = n <= 2 * END ? n : END, rest = 0;
  for (const unsigned char *from = at;; from = at + n - END) {
    uint64_t i = 0;
    for (; i + 8 <= part; i += 8, by += 0xd1342543de82ef94u)
      sum += ((const struct loose *)(from + i))->w * by;
    for (; i < part; i++)
      rest = rest << 8 | from[i];
    if (part == n || from != at)
      break;
  }
  return sum + rest * 0x9e6c63d0876a9a47u;
}

/* identify fills in what tells a code object from others, those too that will be where it is, and whose parts may be where
 * its own are: its names, its lines and its size. */
static int identify(const struct pystack *p, uint64_t code, struct pyframe *f) {
  uint64_t first, size, file, name, table, length, hash;
  struct string path, text;
  if (!get(p, code + p->code_line, 4, &first) || !get(p, code + OB_SIZE, 8, &size) || !get(p, code + p->code_file, 8, &file) ||
      !get(p, code + p->code_name, 8, &name) || !get(p, code + p->code_table, 8, &table))
    return 0;
  f->code = (const void *)(uintptr_t)code;
  f->first_line = (uint32_t)first;
  uint64_t h = mix(mix(mix(mix(mix(0, code), first), file), name), table);
  if (p->version != 0x030a)
    h = mix(h, size);
  if (!is_a(sure(p), table, p->bytes_type) || !get(p, table + OB_SIZE, 8, &length) || length >> 31 != 0 ||
      !there(sure(p), table + BYTES_DATA, length))
    return 0;
  uint64_t content = digest((const unsigned char *)(uintptr_t)(table + BYTES_DATA), length);
  if (is_a(sure(p), name, p->string_type)) {
    if (!get(p, name + STRING_LENGTH, 8, &length) || !get(p, name + STRING_HASH, 8, &hash))
      return 0;
    content += length * 0xaf251af3b0f025b5u;
    content ^= hash != UINT64_MAX ? hash : string(p, sure(p), name, &text) ? digest(text.data, text.length * (uint64_t)text.kind) * 3 : 0;
  } else if (!sure(p)) {
    return 0; /* else it is of a kind of strings of the program's own */
  }
  h = mix(h, content);
  /* Programs that make code as they run, such as notebooks, tell one piece from the next by the end of the file's name. */
  if (string(p, sure(p), file, &path)) {
    const unsigned char *end = path.data + path.length * (uint64_t)path.kind, *at = end - path.data > 24 ? end - 24 : path.data;
    content = digest(at, (uint64_t)(end - at)) + path.length * 0xaf251af3b0f025b5u;
    h = mix(h, content);
  }
  f->id = h;
  return 1;
}

static int frame_310(const struct pystack *p, uint64_t frame, struct pyframe *f) {
  uint64_t code, at, traced;
  if (!is_a(sure(p), frame, p->frame_type) || !get(p, frame + p->frame_code, 8, &code) || !is_a(sure(p), code, p->code_type) ||
      !get(p, frame + p->frame_at, 4, &at) || !get(p, frame + p->frame_line, 4, &traced) || !identify(p, code, f))
    return -1;
  if (traced != 0) {
    f->line = (uint32_t)traced;
    return 1;
  }
  return line(p, code, f, (int32_t)at, &f->line) ? 1 : -1;
}

/* frame_311 is 0 for what is no frame of Python's own. */
static int frame_311(const struct pystack *p, uint64_t frame, struct pyframe *f) {
  uint64_t code, at, owner, first, units;
  if ((frame & 7) != 0 || !get(p, frame + p->frame_owner, 1, &owner))
    return -1;
  if (owner >= OWNED_BY_C)
    return owner > OWNED_BY_C + 1 ? -1 : 0;
  if (!get(p, frame + p->frame_code, 8, &code) || !is_a(sure(p), code & ~(uint64_t)3, p->code_type))
    return -1;
  code &= ~(uint64_t)3; /* counted otherwise, from 3.14 on */
  if (!get(p, frame + p->frame_at, 8, &at) || !get(p, code + p->code_traceable, 4, &first) || !get(p, code + OB_SIZE, 8, &units))
    return -1;
  int64_t unit = (int64_t)(at - (code + p->code_start)) >> 1;
  if (unit < -1 || unit >= (int64_t)units)
    return -1;
  if (owner != OWNED_BY_GENERATOR && unit < (int32_t)first)
    return 0; /* not begun yet */
  return identify(p, code, f) && line(p, code, f, unit, &f->line) ? 1 : -1;
}

int pystack_walk(const struct pystack *p, struct pyframe *out, int cap) {
  /* As Python ends it frees the threads that are still in foreign code, with their frames. */
  if (__atomic_load_n(&p->learned->state, __ATOMIC_RELAXED) == WRONG || p->finalizing() != 0)
    return 0;
  uint64_t thread = (uintptr_t)p->thread(), frame, back;
  if (thread == 0)
    return 0;
  int good = (thread & 7) == 0 && get(p, thread + p->thread_frame, 8, &frame), n = 0, r;
  if (good && (p->version == 0x030b || p->version == 0x030c))
    good = frame == 0 || get(p, frame + p->cframe, 8, &frame);
  for (int steps = 0; good && frame != 0 && n < cap && steps < MOST_STEPS; steps++) {
    r = p->version == 0x030a ? frame_310(p, frame, &out[n]) : frame_311(p, frame, &out[n]);
    if (r > 0)
      n++;
    good = r >= 0 && get(p, frame + p->frame_back, 8, &back);
    frame = back;
  }
  uint32_t tries = __atomic_load_n(&p->learned->state, __ATOMIC_RELAXED);
  if (tries < TRIES) {
    if (!good)
      n = 0;
    if (!good || n > 0) /* without a frame nothing was seen yet */
      __atomic_store_n(&p->learned->state, good ? SURE : tries + 1 == TRIES ? WRONG : tries + 1, __ATOMIC_RELAXED);
  }
  return n;
}

#else

int pystack_find(struct pystack *p, struct pystack_learned *learned, void *(*lookup)(const char *name, void *ctx), void *ctx) {
  (void)p, (void)learned, (void)lookup, (void)ctx;
  return PYSTACK_MISSING;
}
int pystack_walk(const struct pystack *p, struct pyframe *out, int cap) { return (void)p, (void)out, (void)cap, 0; }
int pystack_names(const struct pystack *p, const struct pyframe *f, char *file, size_t file_size, char *func, size_t func_size) {
  (void)p, (void)f, (void)file, (void)file_size, (void)func, (void)func_size;
  return 0;
}
int pystack_state(const struct pystack *p) { return (void)p, PYSTACK_FOUND; }
const char *pystack_why(int found) { return (void)found, "frames of Python are read on x86-64 and on aarch64 only"; }

#endif
