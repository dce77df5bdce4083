package symbols

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestMappings: names with spaces, files that are gone, what is no file.
func TestMappings(t *testing.T) {
	const text = `55d0c0a00000-55d0c0a02000 r--p 00000000 fe:01 12345                      /opt/a program
55d0c0a02000-55d0c0a09000 r-xp 00002000 fe:01 12345                      /opt/a program
7f0000000000-7f0000001000 r-xp 00000000 00:00 0
7f0000100000-7f0000200000 r-xp 00010000 fe:01 99                         /tmp/lib.so (deleted)
7f0000300000-7f0000301000 r--p 00000000 fe:01 100                        /tmp/data
nonsense
7ffd0000a000-7ffd0000c000 r-xp 00000000 00:00 0                          [vdso]
7ffd0000d000-7ffd0000f000 rw-p 00000000 00:00 0                          [stack]
`
	got := fmt.Sprintf("%x", mappings([]byte(text)))
	want := fmt.Sprintf("%x", []mapping{
		{0x55d0c0a02000, 0x55d0c0a09000, 0x2000, "/opt/a program", 0x55d0c0a00000},
		{0x7f0000100000, 0x7f0000200000, 0x10000, "/tmp/lib.so (deleted)", 0x7f00000f0000},
		{0x7ffd0000a000, 0x7ffd0000c000, 0, "[vdso]", 0x7ffd0000a000},
	})
	if got != want {
		t.Errorf("mappings:\n%s\nwant\n%s", got, want)
	}
	places := named(mappings([]byte(text)), []uint64{0x55d0c0a02010, 0x7f0000100020, 0x7f0000000000, 0x10, 0x55d0c0a09000})
	for i, w := range []Place{{"/opt/a program", "a program+0x2010"}, {"/tmp/lib.so (deleted)", "lib.so+0x10020"},
		{"", "0x7f0000000000"}, {"", "0x10"}, {"", "0x55d0c0a09000"}} {
		if places[i] != w {
			t.Errorf("address %d: %+v, want %+v", i, places[i], w)
		}
	}
}

// TestNames: every function of a program, whole and stripped, by its first and its last byte.
func TestNames(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil || runtime.GOOS != "linux" {
		t.Skip("needs cc on Linux")
	}
	dir := t.TempDir()
	source := filepath.Join(dir, "x.c")
	const text = `static int __attribute__((noinline)) inner(int x) { return x * 3; }
int outer(int x) { return inner(x) + 1; }
extern int also(int) __attribute__((alias("outer")));
static int __attribute__((noinline)) other(int x) { return outer(x) * 5; }
int last(int x) { return other(x) - 2; }
`
	if err := os.WriteFile(source, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, flags := range [][]string{nil, {"-s"}} {
		lib := filepath.Join(dir, "x"+strings.Join(flags, "")+".so")
		if out, err := exec.Command(cc, append(flags, "-O1", "-shared", "-fPIC", "-o", lib, source)...).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		f, err := elf.Open(lib)
		if err != nil {
			t.Fatal(err)
		}
		symbols, err := f.Symbols()
		if len(flags) != 0 {
			symbols, err = f.DynamicSymbols()
		}
		if err != nil {
			t.Fatal(err)
		}
		var code *elf.Prog
		for _, p := range f.Progs {
			if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 {
				code = p
			}
		}
		// As if it were mapped at 1 TiB.
		const base = 1 << 40
		maps := []mapping{{base + code.Vaddr&^4095, base + (code.Vaddr+code.Memsz+4095)&^4095, code.Off &^ 4095, lib, base}}
		seen := 0
		var tables Tables
		for _, s := range symbols {
			if elf.ST_TYPE(s.Info) != elf.STT_FUNC || s.Size == 0 {
				continue
			}
			seen++
			got := named(maps, []uint64{base + s.Value, base + s.Value + s.Size - 1})
			for _, p := range got {
				same := p.Func == s.Name || s.Name == "also" && p.Func == "outer" || s.Name == "outer" && p.Func == "also"
				if p.File != lib || !same {
					t.Errorf("%s%v: %+v", s.Name, flags, got)
				}
			}
			for _, at := range []uint64{s.Value, s.Value + s.Size - 1} {
				if name := tables.Name(lib, at); name != s.Name && !(s.Name == "also" && name == "outer") && !(s.Name == "outer" && name == "also") {
					t.Errorf("%s%v: in its table %s", s.Name, flags, name)
				}
			}
			if stripped := len(flags) != 0; stripped && (s.Name == "inner" || s.Name == "other") {
				t.Errorf("stripped, and %s is there", s.Name)
			}
		}
		if seen < 3 {
			t.Errorf("%d functions in %s", seen, lib)
		}
		f.Close()
	}
	// A file that is not what it was.
	bad := filepath.Join(dir, "bad.so")
	if err := os.WriteFile(bad, []byte("\x7fELF\x02\x01\x01 and no more"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := named([]mapping{{4096, 8192, 0, bad, 4096}}, []uint64{4100}); got[0].Func != "bad.so+0x4" {
		t.Errorf("%+v", got)
	}
	var tables Tables
	for _, file := range []string{bad, filepath.Join(dir, "none.so"), dir} {
		if got, want := tables.Name(file, 16), filepath.Base(file)+"+0x10"; got != want {
			t.Errorf("%s: %s", file, got)
		}
	}
	// A pipe without a writer is not waited for.
	pipe := filepath.Join(dir, "pipe.so")
	if out, err := exec.Command("mkfifo", pipe).CombinedOutput(); err != nil {
		t.Skipf("%v\n%s", err, out)
	}
	if got := tables.Name(pipe, 16); got != "pipe.so+0x10" {
		t.Error(got)
	}
	if got := named([]mapping{{4096, 8192, 0, pipe, 4096}}, []uint64{4100}); got[0].Func != "pipe.so+0x4" {
		t.Errorf("%+v", got)
	}
}

// TestOwn: a function of this program.
func TestOwn(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc/self/maps")
	}
	pc, _, _, _ := runtime.Caller(0)
	got := Own([]uint64{uint64(pc), 1})
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Test programs have no symbols of their own where they were linked without; the file is known all the same.
	if got[0].File != exe || !strings.HasSuffix(got[0].Func, "symbols.TestOwn") && !strings.HasPrefix(got[0].Func, filepath.Base(exe)+"+0x") {
		t.Errorf("%+v, want a function of %s", got[0], exe)
	}
	if got[1] != (Place{"", "0x1"}) {
		t.Errorf("%+v", got[1])
	}
}
