//go:build linux && amd64

package audit

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/internal/rerun"
)

// TestAarch64 has a program for the other architecture run under an emulator, with a library, a driver and a C library of
// that architecture. The emulator does not read memory of processes, so that of stacks there is the caller alone.
func TestAarch64(t *testing.T) {
	for _, tool := range []string{"aarch64-linux-gnu-gcc", "qemu-aarch64"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	rerun.OnChange(t, "../../audit/*", "../../scripts/audit.sh", "../../cmd/libcistern/pystack.*", "../../cmd/cistern/testdata/traced.c")
	dir := t.TempDir()
	lib, driver, program := filepath.Join(dir, Library), filepath.Join(dir, "libcuda.so.1"), filepath.Join(dir, "traced")
	sources, err := filepath.Glob("../../cuda/nvidia/standin/testdata/*.c")
	if err != nil || len(sources) == 0 {
		t.Fatal("no stand-in")
	}
	for _, cmd := range []*exec.Cmd{
		exec.Command("../../scripts/audit.sh", lib),
		exec.Command("aarch64-linux-gnu-gcc", append([]string{"-O1", "-w", "-fPIC", "-shared", "-pthread", "-Wl,-Bsymbolic", "-o", driver}, sources...)...),
		exec.Command("aarch64-linux-gnu-gcc", "-O1", "-w", "../../cmd/cistern/testdata/traced.c", "-o", program, "-ldl", "-pthread"),
	} {
		cmd.Env = append(os.Environ(), "CC=aarch64-linux-gnu-gcc")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	for _, c := range []struct {
		how, what string
		calls     int
	}{{"dlsym", "everything", 35}, {"proc", "everything", 35}, {"ptsz", "everything", 35}, {"dlsym", "threads", 2 * 8 * 50}} {
		r, err := New(Slots, Native)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-E", "LD_AUDIT="+lib, program, c.how, c.what, "50")
		cmd.Env = append(os.Environ(), "STANDIN="+driver, Variable+"="+r.Value())
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s %s: %v\n%s", c.how, c.what, err, out)
		}
		var calls, stacks, frames, modules int
		r.Drain(1<<20, true, func(rec *Record) {
			switch rec.Type {
			case RecordCall:
				calls++
				if rec.Caller() == 0 || rec.Stack() == 0 || rec.Device != 0 || rec.TookNS == 0 || rec.TID == 0 {
					t.Errorf("%+v", rec)
				}
			case RecordStack:
				stacks++
				frames = max(frames, int(rec.Size))
			case RecordModule:
				modules++
			case RecordUnknown:
				t.Errorf("not seen: %s", rec.Text())
			}
		})
		if calls != c.calls || stacks == 0 || frames < 1 || modules < 3 || r.Dropped()+r.Lost() != 0 {
			t.Errorf("%s %s: %d calls, want %d; %d stacks of up to %d frames, %d modules", c.how, c.what, calls, c.calls, stacks, frames, modules)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
