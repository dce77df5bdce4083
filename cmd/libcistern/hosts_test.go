//go:build linux && cgo

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/rerun"
)

// hosts is the program of hostile hosts, testdata/hosts.
func hosts(t *testing.T) string {
	t.Helper()
	sources, err := filepath.Glob("testdata/hosts/*.[ch]")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	rerun.OnChange(t, append(sources, "testdata/check.h")...)
	lib := libraryPath(t)
	return build(t, "bin/hosts", func(out string) error {
		args := []string{"-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-I.", "-pthread", "-o", out}
		for _, s := range sources {
			if strings.HasSuffix(s, ".c") {
				args = append(args, s)
			}
		}
		return quiet(exec.Command(compiler("CC", "cc"), append(args, "-L"+filepath.Dir(lib), "-lcistern", "-Wl,-rpath,"+filepath.Dir(lib), "-ldl")...))
	})
}

// TestHosts: what is legal and hard on a library. CISTERN_HOSTS is how long all scenarios take together, a second each without.
func TestHosts(t *testing.T) {
	t.Parallel()
	p := hosts(t)
	list := run(t, "", nil, p)
	scenarios := strings.Fields(list.out)
	if list.err != nil || len(scenarios) == 0 {
		t.Fatal(list)
	}
	each := time.Second
	if s := os.Getenv("CISTERN_HOSTS"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatalf("CISTERN_HOSTS: %v", err)
		}
		each = d / time.Duration(len(scenarios))
	}
	for _, s := range scenarios {
		t.Run(s, func(t *testing.T) {
			r := run(t, "driver:sim:8GiB", nil, p, s, fmt.Sprint(each.Seconds()))
			if strings.HasPrefix(r.out, "not tried") && os.Getenv("CISTERN_TOOLS_TEST") != "1" {
				t.Skip(r.out)
			}
			if r.err != nil || r.out != "ok\n" {
				t.Errorf("%v\n%s%s", r.err, r.out, r.report)
			}
		})
	}
}

// TestReady: every function of the interface makes its thread ready before it calls Go.
func TestReady(t *testing.T) {
	t.Parallel()
	var text []byte
	for _, name := range []string{"shim.c", "shim_objects.c", "shim_pools.c"} {
		file, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, file...)
	}
	call := regexp.MustCompile(`\bcore[A-Z]\w*\(`)
	ready := regexp.MustCompile(`\bGUARD;|\bREADY;|\bshim_ready\(\)`)
	found := 0
	for _, function := range strings.Split(string(text), "\n}\n") {
		at := call.FindStringIndex(function)
		if at == nil || strings.Contains(function, "void failed(void)") { // behind a call of the same thread
			continue
		}
		found++
		if !ready.MatchString(function[:at[0]]) {
			t.Errorf("a call into Go before GUARD or shim_ready:\n%s", function)
		}
	}
	if found < 50 {
		t.Errorf("found only %d functions that call Go", found)
	}
}

// TestRuntimeSettings: the library was linked with what ready.c and signals.c rely on.
func TestRuntimeSettings(t *testing.T) {
	t.Parallel()
	library, err := os.ReadFile(libraryPath(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"gcshrinkstackoff=1", "asyncpreemptoff=1"} {
		if !bytes.Contains(library, []byte(s)) {
			t.Errorf("the library lacks the setting %s: see the Makefile", s)
		}
	}
}
