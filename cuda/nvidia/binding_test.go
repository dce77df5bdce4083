//go:build linux && cgo

package nvidia_test

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

// binding is the driver over a stand-in library of the test's own, with the log of the calls that reached it.
type binding struct {
	*nvidia.Driver
	t   *testing.T
	log string
}

func open(t *testing.T, missing ...string) *binding {
	t.Helper()
	b := &binding{t: t, log: standin.Log(t)}
	d, err := nvidia.Open(standin.Build(t, missing...))
	if err != nil {
		t.Fatal(err)
	}
	b.Driver = d.(*nvidia.Driver)
	return b
}

// retained is open with the primary context of device 0 retained.
func retained(t *testing.T, missing ...string) *binding {
	t.Helper()
	b := open(t, missing...)
	if err := b.RetainContext(0); err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	callLine = regexp.MustCompile(`^(cu\w+)\((.*)\) = (\d+) in (\w+) mode, context (-?\d+)$`)
	bracket  = map[string]bool{"cuThreadExchangeStreamCaptureMode": true, "cuCtxPushCurrent": true, "cuCtxPopCurrent": true}
	// Calls that no capture forbids, made as the thread is.
	harmless = map[string]bool{"cuInit": true, "cuDeviceGetAttribute": true}
)

// calls runs f and returns the driver calls that it made, one a line: "cuMemCreate(size 2097152, …) = 0, context -1".
// It fails the test if a call was made outside of relaxed capture mode, or if the thread's mode or contexts are not as
// they were before.
func (b *binding) calls(f func()) string {
	b.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := os.Remove(b.log); err != nil && !os.IsNotExist(err) {
		b.t.Fatal(err)
	}
	f()
	text := b.raw()
	var out strings.Builder
	depth, mode := 0, "global"
	for line := range strings.Lines(text) {
		m := callLine.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			b.t.Fatalf("the stand-in wrote %q", line)
		}
		name, args, result := m[1], m[2], m[3]
		switch {
		case name == "cuThreadExchangeStreamCaptureMode":
			mode = m[4]
		case name == "cuCtxPushCurrent" && result == "0":
			depth++
		case name == "cuCtxPopCurrent" && result == "0":
			depth--
		}
		if bracket[name] {
			continue
		}
		if m[4] != "relaxed" && !harmless[name] {
			b.t.Errorf("%s was made in %s capture mode", name, m[4])
		}
		fmt.Fprintf(&out, "%s(%s) = %s, context %s\n", name, args, result, m[5])
	}
	if depth != 0 || mode != "global" {
		b.t.Errorf("the thread is left %d contexts deeper and in %s capture mode:\n%s", depth, mode, text)
	}
	return strings.TrimSuffix(out.String(), "\n")
}

// raw is the log as it stands.
func (b *binding) raw() string {
	b.t.Helper()
	text, err := os.ReadFile(b.log)
	if err != nil && !os.IsNotExist(err) {
		b.t.Fatal(err)
	}
	return string(text)
}

// wants is calls, compared.
func (b *binding) wants(want string, f func()) {
	b.t.Helper()
	if got := b.calls(f); got != want {
		b.t.Errorf("the driver was called\n%s\nwant\n%s", got, want)
	}
}

// must stops the test on an error.
var must = testkit.Must

const (
	chunk = 2 << 20
	dev0  = cuda.Device(0)
)
