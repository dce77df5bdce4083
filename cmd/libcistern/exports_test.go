//go:build linux && cgo

package main

import (
	"debug/elf"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// soname is the name by which linked programs look for the library. Its number stays while testdata/abi holds.
const soname = "libcistern.so.1"

// declarations are the types, constants and functions of cistern.h, each in one form however it is laid out.
func declarations(t *testing.T) (all []string) {
	t.Helper()
	header, err := os.ReadFile("cistern.h")
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(string(header), " ")
	text = regexp.MustCompile(`(?m)^#.*$|^extern "C" \{$|^\}$`).ReplaceAllString(text, "")
	depth, from := 0, 0
	for i, c := range text {
		switch c {
		case '{':
			depth++
		case '}':
			depth--
		case ';':
			if depth == 0 {
				all = append(all, strings.Join(strings.Fields(text[from:i+1]), " "))
				from = i + 1
			}
		}
	}
	if rest := strings.TrimSpace(text[from:]); rest != "" || depth != 0 {
		t.Fatalf("not read from cistern.h: %q", rest)
	}
	slices.Sort(all)
	return all
}

// declared are the functions of cistern.h.
func declared(t *testing.T) (names []string) {
	t.Helper()
	function := regexp.MustCompile(`^[a-z][\w ]*[ *](cistern_\w+)\(`)
	for _, d := range declarations(t) {
		if m := function.FindStringSubmatch(d); m != nil {
			names = append(names, m[1])
		}
	}
	slices.Sort(names)
	return names
}

// TestABI: programs that were built against an earlier header of the same soname still run: what they use is as it was.
func TestABI(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("testdata/abi")
	if err != nil {
		t.Fatal(err)
	}
	header, promised := declarations(t), strings.Split(strings.TrimSpace(string(data)), "\n")
	for _, d := range promised {
		if !slices.Contains(header, d) {
			t.Errorf("gone from cistern.h, or changed, which takes another number in the soname (docs/c-api.md):\n%s", d)
		}
	}
	for _, d := range header {
		if !slices.Contains(promised, d) {
			t.Errorf("new in cistern.h: add it to testdata/abi:\n%s", d)
		}
	}
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
	if name, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(name, []string{soname}) {
		t.Errorf("its name is %v, %v", name, err)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_TLS && p.Memsz > 64 {
			t.Errorf("%d bytes of thread-locals", p.Memsz)
		}
	}
}
