package open

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
)

// Drivers that CISTERN_CONF opens with one file share its devices' memory. The path may have an x, an @ or a colon.
func TestShared(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gpu:x@2")
	var drivers []cuda.Driver
	for range 2 {
		opts, err := config.Parse("driver:sim:8MiBx2@" + path + ",limit:4MiB")
		must(t, err)
		d, err := Open(opts.Driver)
		must(t, err)
		drivers = append(drivers, d)
	}
	h, err := drivers[0].MemCreate(6<<20, cuda.MemProp{Device: 1})
	must(t, err)
	if _, err := drivers[1].MemCreate(4<<20, cuda.MemProp{Device: 1}); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("memory that another driver has: %v", err)
	}
	must(t, drivers[0].MemRelease(h))
	h, err = drivers[1].MemCreate(8<<20, cuda.MemProp{Device: 1})
	must(t, err)
	must(t, drivers[1].MemRelease(h))
	if _, err = Open("sim:8MiB@" + path); err == nil || !strings.Contains(err.Error(), "another machine") {
		t.Errorf("a file of two devices for one: %v", err)
	}
}
