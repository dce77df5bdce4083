package replay

import (
	"testing"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda/sim"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/lab/meter"
	"github.com/cistern-gpu/cistern/recording/open"
)

// TestSameCalls: the measured run makes the calls that the modelled one is charged for, and gives everything back.
func TestSameCalls(t *testing.T) {
	f, err := open.File("../../recording/testdata/detection.pickle.gz")
	if err != nil {
		t.Fatal(err)
	}
	opts, err := cistern.ParseOptions("")
	if err != nil {
		t.Fatal(err)
	}
	drv := sim.New(sim.Options{Check: sim.CheckUse})
	measured, err := run(f.Traces[0], meter.New(drv), 0, opts)
	if err != nil {
		t.Fatal(err)
	}
	drv = sim.New(sim.Options{Check: sim.CheckUse})
	modelled, err := run(f.Traces[0], drv, 0, opts)
	if err != nil {
		t.Fatal(err)
	}
	if len(measured.timed) < 4 {
		t.Errorf("only %v were measured", measured.timed)
	}
	for _, c := range measured.timed {
		if n := modelled.model.Calls[c.Name].Count; int64(n) != c.Count {
			t.Errorf("%s: measured %d times, modelled %d", c.Name, c.Count, n)
		}
	}
	if err := drv.Fault(); err != nil {
		t.Error(err)
	}
	if l := drv.Leaks(); l.Handles != 0 || l.Mappings != 0 || l.Reservations != 0 {
		t.Errorf("left behind: %+v", l)
	}
}
