//go:build linux && amd64

package audit

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/internal/rerun"
)

// mostNative is STACK_NATIVE of stacks.c.
const mostNative = 48

// stacksOf runs a program under the audit library, and is its output and the return addresses of each of its calls.
func stacksOf(t *testing.T, lib, program string, args ...string) (out string, stacks [][]uint64) {
	t.Helper()
	r, err := New(Slots, Native)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), "STANDIN="+standin.Build(t), "LD_AUDIT="+lib, Variable+"="+r.Value())
	text, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", filepath.Base(program), err, text)
	}
	known := map[uint64][]uint64{}
	r.Drain(1<<20, true, func(rec *Record) {
		switch rec.Type {
		case RecordStack:
			known[rec.Addr] = append(known[rec.Addr], rec.Words()...)
		case RecordCall:
			stacks = append(stacks, known[rec.Stack()])
		}
	})
	return string(text), stacks
}

// TestNativeStacks: the stacks of calls are those that the C library finds, whatever the frames look like, as the compiler
// makes them with frame pointers and without, in programs at any address and at a fixed one. Where nothing says how to go on
// the program is unharmed, and functions further out are still found.
func TestNativeStacks(t *testing.T) {
	lib, dir := library(t), t.TempDir()
	var libraries []string
	for _, size := range []string{"24", "400", "5000"} {
		file := filepath.Join(dir, "framed"+size+".so")
		compile(t, file, "testdata/framed.c", "-O2", "-shared", "-fPIC", "-DSIZE="+size)
		libraries = append(libraries, file)
	}
	for _, flags := range []string{"-O0", "-O2", "-O2 -fomit-frame-pointer -mavx2", "-O3 -fno-omit-frame-pointer", "-Os", "-O2 -no-pie -fno-pie"} {
		t.Run(flags, func(t *testing.T) {
			program := filepath.Join(t.TempDir(), "frames")
			compile(t, program, "testdata/frames.c", append(strings.Fields(flags), "-rdynamic", "-ldl", "-pthread")...)
			out, stacks := stacksOf(t, lib, program, append(libraries, libraries...)...)
			seen := map[string]int{}
			n := 0
			for s := bufio.NewScanner(strings.NewReader(out)); s.Scan(); n++ {
				f := strings.Fields(s.Text())
				var want []uint64
				for _, w := range f[1:] {
					a, err := strconv.ParseUint(w, 16, 64)
					if err != nil {
						t.Fatal(err)
					}
					want = append(want, a)
				}
				if n >= len(stacks) || len(stacks[n]) == 0 {
					t.Fatalf("call %d, %s, has no stack", n, f[0])
				}
				got := stacks[n][1:] // behind the function that asked
				seen[f[0]]++
				switch f[0] {
				case "signal":
					if len(got) < 2 || len(want) < 2 || !slices.Equal(got[:2], want[:2]) {
						t.Errorf("%s: %s; want to begin with %s", f[0], hex(got), hex(want))
					}
				case "made":
					if len(got) < 1 || got[0] != want[0] || !slices.Contains(got, want[len(want)-1]) && len(want) > 2 {
						t.Errorf("%s: %s; want at least the beginning and the end of %s", f[0], hex(got), hex(want))
					}
				default:
					want = want[:min(len(want), mostNative-1)]
					if !slices.Equal(got, want) {
						t.Errorf("%s: %s; want %s", f[0], hex(got), hex(want))
					}
				}
			}
			if n != len(stacks) || seen["plain"] < 4 || seen["deep"] != 1 || seen["callback"] < 4 || seen["thread"] < 4 || seen["coroutine"] != 1 ||
				seen["library"] != 12 || seen["signal"] != 2 || seen["made"] != 1 {
				t.Errorf("%d calls of %d: %v", n, len(stacks), seen)
			}
		})
	}
}

func compile(t *testing.T, out, source string, flags ...string) {
	t.Helper()
	rerun.OnChange(t, source, "../../audit/*", "../../cmd/libcistern/*.h")
	if text, err := exec.Command("cc", append([]string{"-w", source, "-o", out}, flags...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
}

func hex(addrs []uint64) string {
	var b strings.Builder
	for _, a := range addrs {
		fmt.Fprintf(&b, " %x", a)
	}
	return b.String()
}

// TestUnwindTables: tables with bytes changed lead to nothing outside of them, and to an end. The sanitizers of the
// compiler watch.
func TestUnwindTables(t *testing.T) {
	program := filepath.Join(t.TempDir(), "tables")
	compile(t, program, "testdata/tables.c", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=all",
		"-I../../audit", "-I../../cmd/libcistern", "-ldl")
	out, err := exec.Command(program, "libc.so.6", "20000").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(out))); err != nil || n < 1000 {
		t.Errorf("%s rules were found in the tables: the changed ones are not read far", out)
	}
}

// TestUnwindAgain: what a walk finds does not depend on the thread's walk before it, whatever both have in common.
func TestUnwindAgain(t *testing.T) {
	dir := t.TempDir()
	var libraries []string
	for _, size := range []string{"24", "400", "5000"} {
		file := filepath.Join(dir, "framed"+size+".so")
		compile(t, file, "testdata/framed.c", "-O2", "-shared", "-fPIC", "-DSIZE="+size)
		libraries = append(libraries, file)
	}
	for _, flags := range []string{"-O0", "-O2 -fomit-frame-pointer -mavx2", "-O2 -fno-omit-frame-pointer", "-Os"} {
		program := filepath.Join(dir, "again")
		compile(t, program, "testdata/again.c", append(strings.Fields(flags), "-fno-optimize-sibling-calls", "-I../../audit", "-I../../cmd/libcistern", "-ldl", "-pthread")...)
		out, err := exec.Command(program, append([]string{"100000"}, libraries...)...).CombinedOutput()
		var walks, frames int
		if _, serr := fmt.Sscanf(string(out), "%d walks of %d frames, 0 wrong", &walks, &frames); err != nil || serr != nil || walks < 100000 || frames < 5*walks {
			t.Errorf("%s: %v\n%s", flags, err, out)
		}
		cost, err := exec.Command(program, "cost").Output()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: a walk of 40 frames by rules, and again, ns: %s", flags, cost)
	}
}
