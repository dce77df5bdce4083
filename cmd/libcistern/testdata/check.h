/* What the test programs check with: a failure says where and ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include "cistern.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(cond)                                                                 \
  do {                                                                              \
    if (!(cond)) {                                                                  \
      char why_[512];                                                               \
      int code_ = cistern_last_error(why_, sizeof why_);                            \
      fprintf(stderr, "%s:%d: %s\n  last error %d: %s\n", __FILE__, __LINE__, #cond, code_, why_); \
      _exit(1);                                                                     \
    }                                                                               \
  } while (0)

#define OK(call) CHECK((call) == CISTERN_OK)

/* The call fails with the code, for a reason that contains the words. */
#define FAILS(code, words, call)                     \
  do {                                               \
    CHECK((call) == (code));                         \
    CHECK_WORDS(code, words);                        \
  } while (0)

#define CHECK_WORDS(code, words)                     \
  do {                                               \
    char text_[2048];                                \
    CHECK(cistern_last_error(text_, sizeof text_) == (code)); \
    CHECK(strstr(text_, words) != NULL);             \
    CHECK((strchr(text_, '\n') == NULL) == ((code) != CISTERN_OUT_OF_MEMORY)); \
  } while (0)

#define STREAM(n) ((void *)(uintptr_t)(0x1000 + 16 * (n))) /* the simulated device takes any handle */
#define MIB ((size_t)1 << 20)

__attribute__((unused)) static cistern_stats stats_of(int device) {
  cistern_stats s;
  s.size = sizeof s;
  OK(cistern_get_stats(device, &s));
  return s;
}

__attribute__((unused)) static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

#endif
