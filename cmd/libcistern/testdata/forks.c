/* fork: the child gets null and errors at once, whatever it calls; the parent goes on. Also while threads of the parent are
 * within the library, after a raw clone, and in a grandchild. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static atomic_int stop;

static void *churn(void *arg) {
  while (!stop) {
    void *p = cistern_malloc(4096, 0, STREAM((uintptr_t)arg));
    CHECK(p != NULL);
    OK(cistern_release(p));
  }
  return NULL;
}

static int never(void *ctx, int device, uint64_t missing) {
  (void)ctx, (void)device, (void)missing;
  return 0;
}

static void unmapped(void *ctx, int device, void *addr, size_t size) { (void)ctx, (void)device, (void)addr, (void)size; }

static void child(void *inherited) {
  alarm(300); /* a hang ends */
  struct rusage before;
  CHECK(getrusage(RUSAGE_SELF, &before) == 0);
  const uint64_t pool[2] = {1, 1};
  uint64_t bytes, more;
  size_t n;
  void *p = inherited;
  cistern_block b;
  cistern_event e;
  cistern_stats s = {.size = sizeof s};
  cistern_snapshot *snap;
  cistern_library_use use;
  cistern_pool_stats ps = {.size = sizeof ps};
  cistern_pause_report report;
  char handle[CISTERN_HANDLE_MAX];
  CHECK(cistern_malloc(512, 0, NULL) == NULL);
  CHECK_WORDS(CISTERN_FORKED, "child of fork");
  cistern_free(inherited, 0, 0, NULL);
#define GONE(call) FAILS(CISTERN_FORKED, "child of fork", call)
  GONE(cistern_init(NULL));
  CHECK(cistern_device_count() == -1);
  GONE(cistern_alloc(&p, 512, 0, NULL, NULL));
  CHECK(p == NULL);
  GONE(cistern_alloc_with(&p, 512, 0, NULL, NULL));
  CHECK(p == NULL);
  cistern_source source = {.options.size = sizeof source.options};
  CHECK(cistern_source_malloc(&source, 512, 0) == NULL);
  cistern_source_free(&source, inherited, 0);
  CHECK(cistern_library("cupy") == 0);
  CHECK(cistern_library_name(0) == NULL);
  GONE(cistern_library_default("torch"));
  GONE(cistern_library_usage(0, &use, 1, &n));
  GONE(cistern_release(inherited));
  GONE(cistern_release_on(inherited, NULL));
  GONE(cistern_record_stream(inherited, NULL));
  CHECK(cistern_base(inherited, &n) == NULL && n == 0);
  GONE(cistern_segment_base(inherited, &p, &n));
  GONE(cistern_find(inherited, &b));
  GONE(cistern_stream_durable(0, NULL));
  GONE(cistern_trim(-1));
  GONE(cistern_set_limit(0, 0));
  GONE(cistern_get_limit(0, &bytes));
  GONE(cistern_mem_info(0, &bytes, &more));
  GONE(cistern_node_available(0, &bytes));
  GONE(cistern_largest_free(0, NULL, &bytes));
  GONE(cistern_peer(0, 0));
  GONE(cistern_on_out_of_memory(0, never, NULL));
  GONE(cistern_off_out_of_memory(0, never, NULL));
  GONE(cistern_on_unmap(0, unmapped, NULL));
  GONE(cistern_on_map(0, unmapped, NULL));
  GONE(cistern_pool_create(0, pool, NULL));
  GONE(cistern_pool_begin(0, pool, NULL));
  GONE(cistern_pool_end(0, NULL));
  GONE(cistern_capture_begin(0, pool, NULL));
  GONE(cistern_capture_end(0, NULL));
  GONE(cistern_capture_reuse(0, 1));
  GONE(cistern_pool_release(0, pool));
  GONE(cistern_pool_trim(0, pool));
  GONE(cistern_pool_blocks(0, pool, &b, 1, &n));
  GONE(cistern_pool_restore(0, pool, &b, 1));
  GONE(cistern_upstream_check(0, "device"));
  GONE(cistern_pool_set_limit(0, pool, 1));
  GONE(cistern_pool_get_stats(0, pool, &ps));
  GONE(cistern_pause(0, NULL, &report));
  GONE(cistern_resume(0, NULL, &report));
  GONE(cistern_pause_buffers(0, 1));
  GONE(cistern_node_allow_pause(0, NULL));
  GONE(cistern_node_deny_pause(0));
  void *object;
  GONE(cistern_node_build(0, "x", 1, NULL, &object));
  GONE(cistern_node_commit(NULL, NULL));
  GONE(cistern_node_abandon(NULL));
  GONE(cistern_node_open(0, "x", -1, 0, &object));
  GONE(cistern_node_close(NULL));
  GONE(cistern_node_write(NULL, 0, NULL, 0, NULL));
  GONE(cistern_node_read(NULL, 0, NULL, 0, NULL));
  GONE(cistern_node_remove("x", -1, 0));
  CHECK(cistern_node_describe(NULL) == NULL && cistern_last_error(NULL, 0) == CISTERN_FORKED);
  CHECK(cistern_node_objects(NULL, -1) == NULL && cistern_last_error(NULL, 0) == CISTERN_FORKED);
  GONE(cistern_get_stats(0, &s));
  GONE(cistern_reset_peaks(0));
  GONE(cistern_reset_accumulated(0));
  CHECK(cistern_stats_json() == NULL);
  GONE(cistern_tag_push("x"));
  GONE(cistern_tag_pop());
  CHECK(cistern_tag_name(1) == NULL);
  GONE(cistern_snapshot_take(0, NULL, &snap));
  CHECK(snap == NULL);
  cistern_snapshot_free(snap);
  cistern_string_free(NULL);
  GONE(cistern_snapshot_write("/dev/null"));
  GONE(cistern_trace_write("/dev/null"));
  GONE(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
  GONE(cistern_stack_usage(0, NULL, 0, &n));
  GONE(cistern_stack_text(1, NULL, 0));
  GONE(cistern_report("/tmp", 0));
  GONE(cistern_history(0, 5));
  GONE(cistern_history_drain(0, &e, 1, &n, NULL));
  GONE(cistern_share(inherited, handle, sizeof handle));
  GONE(cistern_open("x", 0, &p));
  GONE(cistern_close(inherited));
  CHECK(cistern_version()[0] == '0' || cistern_version()[0] > '0');
  /* At once: it has not waited, and taken little CPU time. What a busy machine, and valgrind, leave of
   * the other says nothing. */
  struct rusage after;
  CHECK(getrusage(RUSAGE_SELF, &after) == 0);
  CHECK(after.ru_nvcsw - before.ru_nvcsw < 10 + after.ru_majflt && clock() < 3 * CLOCKS_PER_SEC);
}

static void wait_for(pid_t pid) {
  int status;
  CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void *forking_thread(void *inherited) {
  pid_t pid = fork();
  if (pid == 0) {
    child(inherited);
    exit(0); /* with the exit handlers of the parent */
  }
  wait_for(pid);
  return NULL;
}

static void at_exit(void) { cistern_free((void *)512, 0, 0, NULL); }

int main(void) {
  atexit(at_exit);
  /* Loaded, but not used yet. */
  pid_t pid = fork();
  if (pid == 0) {
    child((void *)512);
    _exit(0);
  }
  wait_for(pid);

  void *p = cistern_malloc(MIB, 0, NULL);
  CHECK(p != NULL);
  pthread_t t[4];
  for (uintptr_t i = 0; i < 4; i++)
    pthread_create(&t[i], NULL, churn, (void *)i);
  for (int i = 0; i < 25; i++) {
    pid = fork();
    if (pid == 0) {
      child(p);
      if (i % 5 == 0) {
        pid_t grandchild = fork();
        if (grandchild == 0) {
          child(p);
          _exit(0);
        }
        wait_for(grandchild);
      }
      if (i % 2)
        exit(0);
      _exit(0);
    }
    wait_for(pid);
  }
  pthread_t forker;
  pthread_create(&forker, NULL, forking_thread, p);
  pthread_join(forker, NULL);
  /* No handler of pthread_atfork runs here. */
  pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (pid == 0) {
    CHECK(cistern_malloc(512, 0, NULL) == NULL);
    CHECK(cistern_release(p) == CISTERN_FORKED);
    _exit(0);
  }
  wait_for(pid);
  stop = 1;
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], NULL);
  /* The parent has noticed nothing. */
  size_t size;
  CHECK(cistern_base(p, &size) == p && size == MIB);
  OK(cistern_release(p));
  CHECK(stats_of(0).allocations.all.current == 0);
  puts("ok");
  return 0;
}
