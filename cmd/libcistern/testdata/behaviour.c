/* What cistern.h says of memory, streams, statistics, snapshots and history, over two simulated devices. */
#include "check.h"

#include <sys/syscall.h>

static void memory(void) {
  CHECK(strcmp(cistern_version(), CISTERN_VERSION) == 0);
  CHECK(cistern_device_count() == 2);
  OK(cistern_init(NULL)); /* again, with the same settings */
  OK(cistern_init("driver:sim:8GiBx2"));
  FAILS(CISTERN_INVALID, "in use already", cistern_init("driver:sim:4GiB"));

  char *p = cistern_malloc(3 * MIB + 5, 0, NULL);
  CHECK(p != NULL && (uintptr_t)p % 512 == 0);
  size_t size;
  CHECK(cistern_base(p, &size) == p && size == 3 * MIB + 512);
  CHECK(cistern_base(p, NULL) == p);
  CHECK(cistern_base(p + 512, &size) == NULL && size == 0);

  cistern_block b;
  OK(cistern_find(p, &b));
  CHECK(b.addr == (uintptr_t)p && b.size == 3 * MIB + 512 && b.requested == 3 * MIB + 5 && b.device == 0);
  CHECK(b.state == CISTERN_BLOCK_USED && b.stream == NULL && b.pool[0] == 0 && b.pool[1] == 0 && b.tag == 0);

  void *q = p;
  OK(cistern_alloc(&q, 0, 0, NULL, NULL));
  CHECK(q == NULL);
  CHECK(cistern_malloc(0, 0, NULL) == NULL);
  OK(cistern_alloc(&q, 1, 1, STREAM(60), NULL));
  OK(cistern_find(q, &b));
  CHECK(b.device == 1 && b.size == 512 && b.requested == 1 && b.stream == STREAM(60));
  CHECK((char *)q + 512 <= p || p + 3 * MIB + 512 <= (char *)q);
  OK(cistern_release(q));
  FAILS(CISTERN_INVALID, "a stream of device 1, not of device 0", cistern_alloc(&q, 1, 0, STREAM(60), NULL));
  FAILS(CISTERN_INVALID, "a stream of device 1", cistern_stream_durable(0, STREAM(60)));
  OK(cistern_record_stream(p, STREAM(60))); /* but work of another device may use the memory */

  cistern_free(p, 3 * MIB + 5, 0, NULL);
  CHECK((p = cistern_malloc(4 * MIB, 0, NULL)) != NULL);
  cistern_free(p, 0, 0, NULL);
  CHECK(cistern_malloc(4 * MIB, 0, NULL) == p); /* the same stream: at once */
  cistern_free(p, 0, 0, NULL);
  cistern_free(NULL, 0, 0, NULL);
  OK(cistern_release(NULL));
}

static void streams(void) {
  /* Memory freed on one stream while another was recorded is pending, then comes back. */
  char *p = cistern_malloc(MIB, 0, STREAM(2));
  CHECK(p != NULL);
  OK(cistern_record_stream(p, STREAM(3)));
  OK(cistern_record_stream(NULL, STREAM(3)));
  OK(cistern_release(p));
  cistern_block b;
  FAILS(CISTERN_INVALID, "waits for other streams", cistern_release(p));
  (void)b;
  /* Given back on a stream it comes back behind that one, on its own at once. */
  CHECK((p = cistern_malloc(MIB, 0, STREAM(5))) != NULL);
  OK(cistern_release_on(p, STREAM(6)));
  OK(cistern_release_on(NULL, STREAM(6)));
  FAILS(CISTERN_INVALID, "waits for other streams", cistern_release_on(p, STREAM(6)));
  CHECK(stats_of(0).active.all.current - stats_of(0).allocations.all.current == 1);
  CHECK((p = cistern_malloc(MIB, 0, STREAM(5))) != NULL);
  OK(cistern_release_on(p, STREAM(60))); /* another device's */
  CHECK((p = cistern_malloc(MIB, 0, STREAM(5))) != NULL);
  OK(cistern_release_on(p, STREAM(5)));
  CHECK(cistern_malloc(MIB, 0, STREAM(5)) == p);
  OK(cistern_release_on(p, STREAM(5)));
  OK(cistern_trim(0));
  CHECK(stats_of(0).active.all.current == stats_of(0).allocations.all.current);
  OK(cistern_stream_durable(0, STREAM(4)));
  OK(cistern_stream_durable(0, STREAM(4)));
  for (int i = 0; i < 100; i++) { /* the table of durable streams grows */
    OK(cistern_stream_durable(0, STREAM(100 + i)));
    CHECK((p = cistern_malloc(512, 0, STREAM(100 + i))) != NULL);
    OK(cistern_find(p, &b));
    CHECK(b.stream == STREAM(100 + i));
    OK(cistern_release(p));
  }
  FAILS(CISTERN_INVALID, "every thread", cistern_stream_durable(0, (void *)2));
  /* Handle 1 is handle 0. */
  CHECK((p = cistern_malloc(64 << 10, 1, (void *)1)) != NULL);
  OK(cistern_release(p));
  CHECK(cistern_malloc(64 << 10, 1, NULL) == p);
  OK(cistern_release(p));
  /* The thread's default stream is neither. */
  char *mine = cistern_malloc(64 << 10, 1, (void *)2);
  CHECK(mine != NULL && mine != p);
  OK(cistern_release(mine));
  CHECK(cistern_malloc(64 << 10, 1, (void *)2) == mine);
  OK(cistern_release(mine));
}

static void limits(void) {
  uint64_t bytes = 1, free_bytes, total;
  OK(cistern_get_limit(0, &bytes));
  CHECK(bytes == 0);
  OK(cistern_mem_info(0, &free_bytes, &total));
  CHECK(total == (uint64_t)8 << 30 && free_bytes < total);
  OK(cistern_trim(-1));
  CHECK(stats_of(0).reserved.all.current == 0);
  OK(cistern_set_limit(0, 64 * MIB));
  OK(cistern_get_limit(0, &bytes));
  CHECK(bytes == 64 * MIB);

  void *p = cistern_malloc(48 * MIB, 0, NULL);
  CHECK(p != NULL);
  CHECK(cistern_malloc(32 * MIB, 0, NULL) == NULL);
  CHECK_WORDS(CISTERN_OUT_OF_MEMORY, "limit 64.00 MiB");
  cistern_oom o;
  OK(cistern_last_oom(&o));
  CHECK(o.device == 0 && o.requested == 32 * MIB && o.limit == 64 * MIB && o.allocated == 48 * MIB);
  CHECK((int64_t)o.reserved == stats_of(0).reserved.all.current && (o.tried & 8) && o.device_total == total && o.device_free > 0);
  CHECK(stats_of(0).ooms == 1);
  void *q = p;
  CHECK(cistern_alloc(&q, (size_t)1 << 62, 0, NULL, NULL) == CISTERN_OUT_OF_MEMORY && q == NULL);
  CHECK(cistern_alloc(&q, 8 * MIB, 0, NULL, NULL) == CISTERN_OK); /* the next that fits succeeds */
  OK(cistern_release(q));
  OK(cistern_release(p));
  FAILS(CISTERN_INVALID, "not a live allocation", cistern_release(p));
  FAILS(CISTERN_INVALID, "not out of memory", cistern_last_oom(&o));
  OK(cistern_set_limit(0, 0));
}

/* A free block between live ones of another stream serves before a request fails. */
static void lending(void) {
  enum { MOST = 1000 };
  void *live[MOST];
  int n = 0;
  OK(cistern_trim(-1));
  OK(cistern_set_limit(0, 64 * MIB));
  while (n < MOST && (live[n] = cistern_malloc(300 << 10, 0, STREAM(7))) != NULL)
    n++;
  CHECK(n > 150 && n < MOST);
  for (int i = 1; i < n; i += 2)
    OK(cistern_release(live[i]));
  int64_t before = stats_of(0).borrows;
  void *p = cistern_malloc(290 << 10, 0, STREAM(8));
  CHECK(p != NULL && stats_of(0).borrows == before + 1);
  OK(cistern_release(p));
  for (int i = 0; i < n; i += 2)
    OK(cistern_release(live[i]));
  OK(cistern_set_limit(0, 0));
  OK(cistern_trim(-1));
}

/* The sums of a snapshot are the statistics. */
static void sums(int device) {
  cistern_snapshot *s;
  OK(cistern_snapshot_take(device, NULL, &s));
  uint64_t reserved = 0, used = 0, pending = 0, requested = 0, inside = 0;
  int64_t blocks = 0;
  for (size_t i = 0; i < s->num_segments; i++) {
    const cistern_segment *g = &s->segments[i];
    reserved += g->size;
    uint64_t at = g->addr;
    CHECK(g->first_block + g->blocks <= s->num_blocks);
    for (size_t j = g->first_block; j < g->first_block + g->blocks; j++) {
      const cistern_block *b = &s->blocks[j];
      CHECK(b->addr == at && b->device == device && b->stream == g->stream && b->pool[0] == g->pool[0]);
      at += g->addr ? b->size : 0;
      inside += b->size;
      if (b->state == CISTERN_BLOCK_USED) {
        used += b->size;
        requested += b->requested;
        blocks++;
      } else if (b->state == CISTERN_BLOCK_PENDING)
        pending += b->size;
    }
    CHECK(g->addr == 0 || at == g->addr + g->size);
  }
  cistern_stats t = stats_of(device);
  CHECK(reserved == inside && reserved == (uint64_t)t.reserved.all.current);
  CHECK(used == (uint64_t)t.allocated.all.current && requested == (uint64_t)t.requested.all.current);
  CHECK(used + pending == (uint64_t)t.active_bytes.all.current && blocks == t.allocations.all.current);
  CHECK(t.reserved.all.current == t.active_bytes.all.current + t.inactive_bytes.all.current);
  CHECK(t.allocated.all.current == t.allocated.small.current + t.allocated.large.current);
  CHECK(t.allocations.all.current == t.allocations.all.added - t.allocations.all.removed);
  cistern_snapshot_free(s);
}

static void statistics(void) {
  void *p[100];
  for (int i = 0; i < 100; i++)
    CHECK((p[i] = cistern_malloc(1000 * (i + 1) * (i % 7 ? 1 : 50), 0, STREAM(i % 3))) != NULL);
  for (int i = 0; i < 100; i += 2)
    OK(cistern_release(p[i]));
  for (int i = 1; i < 100; i += 10)
    OK(cistern_record_stream(p[i], STREAM(9)));
  sums(0);
  cistern_stats s = stats_of(0);
  CHECK(s.allocations.all.current == 50 && s.allocations.all.peak >= 100);
  OK(cistern_reset_peaks(0));
  s = stats_of(0);
  CHECK(s.allocations.all.peak == 50 && s.allocated.all.peak == s.allocated.all.current);
  OK(cistern_reset_accumulated(0));
  s = stats_of(0);
  CHECK(s.device_allocs == 0 && s.allocations.all.added - s.allocations.all.removed == 0 && s.allocations.all.current == 50);
  for (int i = 1; i < 100; i += 2)
    OK(cistern_release(p[i]));
  cistern_stats after = stats_of(0);
  CHECK(after.allocations.all.current == 0 && after.allocations.all.removed == 50);
  CHECK(cistern_malloc(0, 0, NULL) == NULL);
  OK(cistern_trim(0));
  CHECK(stats_of(0).reserved.all.current == 0 && stats_of(0).device_frees > 0);

  /* A caller of an older header has a shorter struct, and what lies behind it stays as it was. */
  union {
    cistern_stats s;
    unsigned char bytes[sizeof(cistern_stats)];
  } u;
  memset(&u, 0xee, sizeof u);
  u.s.size = offsetof(cistern_stats, by_fit);
  OK(cistern_get_stats(0, &u.s));
  CHECK(u.s.size == offsetof(cistern_stats, by_fit) && u.s.device_frees == stats_of(0).device_frees);
  for (size_t i = offsetof(cistern_stats, by_fit); i < sizeof u; i++)
    CHECK(u.bytes[i] == 0xee);

  char *json = cistern_stats_json();
  CHECK(json != NULL && json[0] == '{' && strstr(json, "\"device\":1") && strstr(json, "\"stream_syncs\":"));
  cistern_string_free(json);
  cistern_string_free(NULL);
}

static void tags(void) {
  OK(cistern_tag_push("model"));
  void *p = cistern_malloc(5000, 0, NULL);
  OK(cistern_tag_push("optimizer"));
  void *q = cistern_malloc(6000, 0, NULL);
  OK(cistern_tag_pop());
  void *r = cistern_malloc(7000, 0, NULL);
  OK(cistern_tag_pop());
  void *s = cistern_malloc(8000, 0, NULL);
  cistern_block b[4];
  OK(cistern_find(p, &b[0]));
  OK(cistern_find(q, &b[1]));
  OK(cistern_find(r, &b[2]));
  OK(cistern_find(s, &b[3]));
  CHECK(b[0].tag != 0 && b[0].tag == b[2].tag && b[1].tag != b[0].tag && b[3].tag == 0);
  CHECK(strcmp(cistern_tag_name(b[0].tag), "model") == 0 && strcmp(cistern_tag_name(b[1].tag), "optimizer") == 0);
  CHECK(cistern_tag_name(0) == NULL && cistern_tag_name(99) == NULL);
  FAILS(CISTERN_INVALID, "no tag to pop", cistern_tag_pop());
  char *json = cistern_stats_json();
  CHECK(strstr(json, "{\"name\":\"model\",\"allocations\":2,\"requested\":12000,\"allocated\":12288}"));
  cistern_string_free(json);
  for (int i = 0; i < 1000; i++)
    OK(cistern_tag_push("deep"));
  for (int i = 0; i < 1000; i++)
    OK(cistern_tag_pop());
  OK(cistern_release(p));
  OK(cistern_release(q));
  OK(cistern_release(r));
  OK(cistern_release(s));
}

static void history(void) {
  cistern_event e[64];
  size_t n;
  uint64_t lost;
  OK(cistern_history_drain(0, e, 64, &n, &lost));
  CHECK(n == 0 && lost == 0);
  uint64_t hash = 1, want = 14695981039346656037u;
  OK(cistern_history_hash(0, &hash));
  CHECK(hash == 0);
  OK(cistern_history(0, 20));
  OK(cistern_tag_push("traced"));
  void *p = cistern_malloc(5 * MIB, 0, STREAM(5));
  OK(cistern_tag_pop());
  OK(cistern_record_stream(p, STREAM(6)));
  OK(cistern_release(p));
  OK(cistern_history_drain(0, e, 1, &n, NULL)); /* in pieces */
  CHECK(n == 1 && e[0].kind == CISTERN_EVENT_SEGMENT_MAP && e[0].handle != 0 && e[0].stream == STREAM(5));
  OK(cistern_history_drain(0, e, 64, &n, &lost));
  CHECK(lost == 0 && n >= 2);
  size_t i = 0;
  while (i < n && e[i].kind == CISTERN_EVENT_SEGMENT_MAP)
    i++;
  CHECK(i + 1 < n && e[i].kind == CISTERN_EVENT_ALLOC && e[i].addr == (uintptr_t)p && e[i].size == 5 * MIB);
  CHECK(e[i].time_us > (int64_t)1600000000 * 1000000 && strcmp(cistern_tag_name(e[i].tag), "traced") == 0);
  CHECK(e[i + 1].kind == CISTERN_EVENT_FREE_REQUESTED && e[i + 1].addr == (uintptr_t)p);
  OK(cistern_history_hash(0, &hash));
  for (int k = 0; k < 8; k++)
    want = (want ^ ((5 * MIB) >> 8 * k & 0xff)) * 1099511628211u;
  CHECK(hash == want);
  for (i = 0; i < 30; i++)
    cistern_free(cistern_malloc(512, 0, STREAM(5)), 512, 0, NULL);
  OK(cistern_history_drain(0, e, 64, &n, &lost));
  CHECK(n <= 20 && n > 10 && lost > 0);
  OK(cistern_set_limit(0, 32 * MIB));
  CHECK(cistern_malloc(100 * MIB, 0, NULL) == NULL);
  OK(cistern_set_limit(0, 0));
  OK(cistern_history_drain(0, e, 64, &n, &lost));
  CHECK(n > 0 && e[n - 1].kind == CISTERN_EVENT_OOM && e[n - 1].size == 100 * MIB && e[n - 1].addr > 0);
  OK(cistern_trim(0));
  OK(cistern_history(0, 64));
  OK(cistern_release(p = cistern_malloc(12 * MIB, 0, STREAM(5))));
  OK(cistern_trim(0));
  OK(cistern_history_drain(0, e, 64, &n, &lost));
  unsigned kinds = 0;
  for (i = 0; i < n; i++) {
    kinds |= 1u << e[i].kind;
    CHECK(e[i].thread == (uint32_t)syscall(SYS_gettid));
  }
  for (unsigned kind = CISTERN_EVENT_ALLOC; kind <= CISTERN_EVENT_FREE_COMPLETED; kind++)
    CHECK(kinds >> kind & 1);
  CHECK((kinds >> CISTERN_EVENT_SEGMENT_MAP & 1) && (kinds >> CISTERN_EVENT_SEGMENT_UNMAP & 1));
  OK(cistern_history(0, 0));
  OK(cistern_history_drain(0, NULL, 0, &n, NULL));
  CHECK(n == 0);
}

static void peers(void) {
  OK(cistern_peer(0, 0));
  OK(cistern_peer(0, 1));
  OK(cistern_peer(0, 1));
  void *p = cistern_malloc(MIB, 0, NULL);
  CHECK(p != NULL);
  OK(cistern_release(p));
}

int main(int argc, char **argv) {
  (void)argc;
  char words[8];
  CHECK(cistern_last_error(words, sizeof words) == CISTERN_OK && words[0] == 0);
  CHECK(stats_of(1).reserved.all.current == 0); /* of an unused device */
  memory();
  streams();
  sums(0);
  sums(1);
  limits();
  lending();
  statistics();
  tags();
  history();
  peers();
  OK(cistern_history(0, 1000)); /* readers want some */
  void *kept = cistern_malloc(9 * MIB, 0, STREAM(7));
  CHECK(kept != NULL);
  OK(cistern_snapshot_write(argv[1]));
  OK(cistern_snapshot_write(argv[2]));
  puts("ok");
  return 0;
}
