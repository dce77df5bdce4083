//go:build linux && amd64

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestTraceSignals: a program starts with the signals ignored that it would have ignored without being traced.
func TestTraceSignals(t *testing.T) {
	x := newTraced(t)
	const show = "grep Sig[BI] /proc/self/status; yes | head -1"
	for _, trap := range []string{"", "trap '' HUP INT; "} {
		want, err := exec.Command("sh", "-c", trap+show).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, want)
		}
		traced := x.command("trace", "--", "sh", "-c", show+" 2>&1")
		cmd := exec.Command("sh", append([]string{"-c", trap + `exec "$@"`, "sh"}, traced.Args...)...)
		cmd.Env = traced.Env
		if got, err := cmd.Output(); err != nil || string(got) != string(want) {
			t.Errorf("after %q: %v\n%s\nwant\n%s", trap, err, got, want)
		}
	}
}

// TestTraceSignalAtTheEnd: a signal that comes when the program has ended, and was not waited for yet, is not lost: it is
// for the recorder of what the program left behind.
func TestTraceSignalAtTheEnd(t *testing.T) {
	x := &child{cmd: exec.Command("true"), over: make(chan struct{}), stop: make(chan struct{})}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer x.cmd.Wait()
	for end := time.Now().Add(longest); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", x.cmd.Process.Pid))
		if err != nil || time.Now().After(end) {
			t.Fatalf("%s, %v", stat, err)
		}
		if strings.Contains(string(stat), ") Z ") {
			break
		}
	}
	signals := make(chan os.Signal, 2)
	defer x.passSignals(signals)()
	signals <- syscall.SIGUSR1 // says nothing
	signals <- syscall.SIGTERM
	select {
	case <-x.stop:
	case <-time.After(longest):
		t.Error("SIGTERM was lost")
	}
}

// TestTraceThreadStorage: libraries that keep much for each thread, for which the dynamic linker has no space once it audits.
func TestTraceThreadStorage(t *testing.T) {
	x := newTraced(t)
	source := func(name, text string) string {
		file := filepath.Join(x.dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	const keeps = `__thread char keeps_N[SIZE] __attribute__((tls_model("initial-exec"))) = {1};
int sum_N(void) { return keeps_N[0] + keeps_N[SIZE - 1]; }`
	var libraries []string
	for n, size := range map[string]string{"a": "1500", "b": "24000", "c": "70000", "d": "300"} {
		file := source(n+".c", strings.NewReplacer("_N", "_"+n, "SIZE", size).Replace(keeps))
		libraries = append(libraries, x.compile("lib"+n+".so", file, "-shared", "-fPIC"))
	}
	program := x.compile("threads", source("threads.c", `#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <dlfcn.h>
#include <stdlib.h>
int sum_a(void), sum_b(void), sum_c(void), sum_d(void);
static void *all(void *p) { *(int *)p = sum_a() + sum_b() + sum_c() + sum_d(); return p; }
int main(int argc, char **argv, char **env) {
	int sum;
	pthread_t t;
	pthread_create(&t, 0, all, &sum);
	pthread_join(t, 0);
	printf("%d\n", sum);
	for (int i = 0; i < argc; i++) printf("%s|", argv[i]);
	for (; *env; env++) if (!strstr(*env, "AUDIT") && strncmp(*env, "GLIBC_TUNABLES", 14) && strncmp(*env, "glibc.", 6)) printf("%s|", *env);
	void *lib = dlopen(getenv("STANDIN"), RTLD_NOW);
	int (*get)(unsigned long *, size_t) = (int (*)(unsigned long *, size_t))dlsym(lib, "cuMemAlloc_v2");
	unsigned long p;
	get(&p, 1);
	return 6;
}`), append(libraries, "-Wl,-rpath,"+x.dir, "-pthread", "-ldl", "-Wl,--no-as-needed")...)
	args := []string{program, "", "an argument", "*"}
	for _, tunables := range []string{"", "GLIBC_TUNABLES=", "GLIBC_TUNABLES=glibc.malloc.check=0:glibc.malloc.perturb=0",
		"GLIBC_TUNABLES=glibc.rtld.optional_static_tls=600", "GLIBC_TUNABLES=glibc.rtld.optional_static_tls=99999"} {
		vars := []string{"EMPTY="}
		if tunables != "" {
			vars = append(vars, tunables)
		}
		d, stdout, stderr, code := x.run(vars, append([]string{"--"}, args...)...)
		if code != 6 || !strings.HasPrefix(stdout, "4\n"+program+"||an argument|*|") || !strings.Contains(stdout, "|EMPTY=|") ||
			!strings.Contains(stdout, "|STANDIN="+x.standin+"|") {
			t.Errorf("%s: code %d, %s\n%s", tunables, code, stdout, stderr)
		}
		if len(d.Calls) != 1 {
			t.Errorf("%s: %d calls", tunables, len(d.Calls))
		}
	}
}

// TestTraceElsewhere: objects that were linked to addresses of their own do not begin where they are counted from.
func TestTraceElsewhere(t *testing.T) {
	x := newTraced(t)
	file := filepath.Join(x.dir, "elsewhere.c")
	if err := os.WriteFile(file, []byte("int elsewhere(void) { return 1; }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"0x10000000", "0x3000000000", "0x7fff00000000"} {
		library := x.compile("libelsewhere.so", file, "-shared", "-fPIC", "-Wl,-Ttext-segment="+at)
		for _, pie := range []string{"-pie", "-no-pie"} {
			program := x.compile("fixed", "testdata/traced.c", pie, "-Wl,--no-as-needed", library, "-Wl,-rpath,"+x.dir, "-ldl", "-pthread")
			d, _, stderr, code := x.run(nil, "--stacks", "native", "--", program, "dlsym", "everything")
			if code != 0 || len(d.Calls) < 30 {
				t.Errorf("%s, %s: code %d, %d calls\n%s", at, pie, code, len(d.Calls), stderr)
				continue
			}
			for i := range d.Calls {
				if frames := d.StackFrames(d.Calls[i].Stack); len(frames) == 0 || !strings.HasPrefix(frames[0].Func, "everything") {
					t.Fatalf("%s, %s: call %d is by %v", at, pie, i, frames)
				}
			}
		}
	}
}

// TestTraceTitle: programs that write a title over their arguments and their environment, as setproctitle does, which servers
// call before they come to the driver.
func TestTraceTitle(t *testing.T) {
	x := newTraced(t)
	file := filepath.Join(x.dir, "title.c")
	if err := os.WriteFile(file, []byte(`#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv, char **env) {
	char *driver = strdup(getenv("STANDIN")), *end = argv[0];
	for (; *env; env++) end = *env + strlen(*env);
	memset(argv[0], 'x', end - argv[0]);
	void *lib = dlopen(driver, RTLD_NOW);
	int (*get)(unsigned long *, size_t) = (int (*)(unsigned long *, size_t))dlsym(lib, "cuMemAlloc_v2");
	unsigned long p;
	return get == 0 || get(&p, 1) == 0; // the driver is not initialised
}`), 0o600); err != nil {
		t.Fatal(err)
	}
	d, _, stderr, code := x.run(nil, "--", x.compile("title", file, "-ldl"))
	if code != 0 || len(d.Calls) != 1 {
		t.Errorf("code %d, %d calls\n%s", code, len(d.Calls), stderr)
	}
}
