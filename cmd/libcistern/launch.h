//go:build linux && cgo

/* What the library does beside its host program rather than in it: a line for people, another program. */
#ifndef CISTERN_LAUNCH_H
#define CISTERN_LAUNCH_H

#include <stddef.h>

/* launch_say writes text to standard error, unless that blocks for too long. A pipe without a reader costs the text, and not
 * the process. */
void launch_say(const char *text, size_t n) __attribute__((visibility("hidden")));
/* launch_start starts a program in a session of its own, not as a child, with standard output and error to a
 * descriptor and nothing else of this process's. Returns 0 or an errno. */
int launch_start(char *const args[], char *const env[], int output) __attribute__((visibility("hidden")));
/* The environment, and the file that this library was loaded from. */
char **launch_environment(void) __attribute__((visibility("hidden")));
const char *launch_folder(void) __attribute__((visibility("hidden")));

#endif
