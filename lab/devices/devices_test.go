//go:build linux && cgo

package devices

import (
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/cuda/sim"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
)

// The parts over two simulated devices, which judge the order of all uses: contents through copies, and a device that
// breaks.
func TestSimulated(t *testing.T) {
	drv := sim.New(sim.Options{Devices: 2, Capacity: 8 << 30, Handles: sim.Exportable, Check: sim.CheckOrder, Lag: 5 * time.Millisecond})
	large := uint64(1 << 20)
	if testing.Short() { // as under the race detector, which makes the host's part many times slower
		large = 384 << 10
	}
	m, err := newMachine(drv, large)
	if err == nil {
		err = m.run("", t.Output())
	}
	if err != nil {
		t.Error(err)
	}
}

// The same over the stand-in library, by its kernels; it has no broken devices.
func TestStandIn(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	m, err := openMachine("nvidia:"+standin.Build(t), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"peers", "threads"} {
		if err := m.run(part, t.Output()); err != nil {
			t.Error(err)
		}
	}
}

// The check finds what is wrong: memory of one device that the other wrote without being asked to.
func TestFindsWhatIsWrong(t *testing.T) {
	for _, driver := range []string{"sim:8GiBx2", "nvidia:" + standin.Build(t)} {
		t.Setenv("STANDIN_DEVICES", "2")
		m, err := openMachine(driver, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		for dev := range cuda.Device(2) {
			if err := m.RetainContext(dev); err != nil {
				t.Fatal(err)
			}
		}
		s, err := m.StreamCreate(0, false)
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.MemAlloc(0, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Fill(0, s, p, 1<<20, 1); err != nil {
			t.Fatal(err)
		}
		if err := m.Check(0, s, p, 1<<20, 1); err != nil {
			t.Fatal(err)
		}
		if err := m.Wrong(); err != nil {
			t.Errorf("%s: %v", driver, err)
		}
		if err := m.Check(0, s, p, 1<<20, 2); err != nil {
			t.Fatal(err)
		}
		if err := m.Wrong(1); err != nil {
			t.Errorf("%s: %v", driver, err)
		}
		if err := m.Wrong(0); err == nil || !strings.Contains(err.Error(), "device 0") {
			t.Errorf("%s: %v; want what device 0 found", driver, err)
		}
	}
}

func TestOneDevice(t *testing.T) {
	for _, driver := range []string{"sim:1GiB", "nvidia:/nowhere/libcuda.so.1"} {
		if _, err := openMachine(driver, 1<<20); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v; want one line", driver, err)
		}
	}
}
