//go:build linux && cgo

package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern"
)

// declared are the functions of cistern.h.
func declared(t *testing.T) []string {
	t.Helper()
	header, err := os.ReadFile("cistern.h")
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(string(header), "")
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^[a-z][\w ]*[ *](cistern_\w+)\(`).FindAllStringSubmatch(text, -1) {
		names = append(names, m[1])
	}
	slices.Sort(names)
	return names
}

// TestExports: the library shows the functions of the header and nothing else.
func TestExports(t *testing.T) {
	t.Parallel()
	f, err := elf.Open(libraryPath(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var shown []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			shown = append(shown, s.Name)
		}
	}
	slices.Sort(shown)
	want := declared(t)
	if len(want) < 40 {
		t.Fatalf("found only %d functions in the header: %v", len(want), want)
	}
	if !slices.Equal(shown, want) {
		t.Errorf("the library shows\n%v\nthe header declares\n%v", shown, want)
	}
	if f.Section(".symtab") != nil || f.Section(".debug_info") != nil {
		t.Error("the library has symbols that nothing needs")
	}
}

// TestNeeds: the library needs the C library and nothing else, of an age that is common, and little of what dlopen has to
// share out among thread-locals.
func TestNeeds(t *testing.T) {
	t.Parallel()
	f, err := elf.Open(libraryPath(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	libs, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range libs {
		if !slices.Contains([]string{"libc.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, l) {
			t.Errorf("it needs %s", l)
		}
	}
	if name, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(name, []string{"libcistern.so"}) {
		t.Errorf("its name is %v, %v", name, err)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_TLS && p.Memsz > 64 {
			t.Errorf("%d bytes of thread-locals", p.Memsz)
		}
	}
}

// TestInstall: the C program of the documents finds the installed library by pkg-config, and prints what they say.
func TestInstall(t *testing.T) {
	t.Parallel()
	library := libraryPath(t)
	dest := t.TempDir()
	// Not made again: make's own notion of what is new does not matter here.
	cmd := exec.Command("make", "--no-print-directory", "-C", "../..", "-o", "library", "install", "LIBRARY="+library,
		"DESTDIR="+dest, "PREFIX=/opt/cistern")
	if err := quiet(cmd); err != nil {
		t.Fatal(err)
	}
	pc, err := os.ReadFile(filepath.Join(dest, "opt/cistern/lib/pkgconfig/cistern.pc"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"prefix=/opt/cistern\n", "Version: " + cistern.Version + "\n"} {
		if !strings.Contains(string(pc), line) {
			t.Errorf("cistern.pc lacks %q:\n%s", line, pc)
		}
	}
	find := exec.Command(need(t, "pkg-config"), "--cflags", "--libs", "cistern")
	find.Env = append(os.Environ(), "PKG_CONFIG_PATH="+filepath.Join(dest, "opt/cistern/lib/pkgconfig"), "PKG_CONFIG_SYSROOT_DIR="+dest)
	flags, err := find.Output()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/c-api.md")
	if err != nil {
		t.Fatal(err)
	}
	sample := regexp.MustCompile("(?s)```c\n(.*?)```.*?```text\n(.*?)```").FindSubmatch(page)
	if sample == nil {
		t.Fatal("docs/c-api.md has no program, or not what it prints")
	}
	source := filepath.Join(dest, "prog.c")
	if err := os.WriteFile(source, sample[1], 0o644); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dest, "prog")
	if err := quiet(exec.Command(compiler("CC", "cc"), append([]string{source, "-o", program}, strings.Fields(string(flags))...)...)); err != nil {
		t.Fatal(err)
	}
	r := run(t, "", []string{"LD_LIBRARY_PATH=" + filepath.Join(dest, "opt/cistern/lib")}, program)
	if want := string(sample[2]); r.err != nil || r.out != want {
		t.Errorf("%v %s: the program of docs/c-api.md printed\n%s\nbut the page says\n%s", r.err, r.report, r.out, want)
	}
}
