package open

import (
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

func TestSimulated(t *testing.T) {
	for spec, want := range map[string]struct {
		devices int
		bytes   uint64
	}{
		"sim": {1, sim.DefaultCapacity}, "sim:80GiB": {1, 80 << 30}, "sim:80GiBx2": {2, 80 << 30}, "sim:1.5 GiBx64": {64, 3 << 29},
		"sim:4194304": {1, 4 << 20},
	} {
		d, err := Open(spec)
		if err != nil {
			t.Errorf("Open(%q): %v", spec, err)
			continue
		}
		n, err := d.DeviceCount()
		if err != nil || n != want.devices || d.Name() != "sim" {
			t.Errorf("Open(%q) is %s with %d devices (%v); want sim with %d", spec, d.Name(), n, err, want.devices)
		}
		info, err := d.DeviceInfo(cuda.Device(n - 1))
		if err != nil || info.TotalBytes != want.bytes {
			t.Errorf("Open(%q): the last device has %d bytes (%v); want %d", spec, info.TotalBytes, err, want.bytes)
		}
	}
}

func TestBadSpec(t *testing.T) {
	for spec, says := range map[string]string{
		"cuda":                       "choose nvidia",
		"Sim":                        "choose nvidia",
		":":                          "choose nvidia",
		"nvidia:":                    "choose nvidia",
		"simx2":                      "choose nvidia",
		"sim:":                       "not a size",
		"sim:lots":                   "not a size",
		"sim:80Gi":                   "not a size",
		"sim:80GiBx0":                "number of devices",
		"sim:80GiBx":                 "number of devices",
		"sim:80GiBx65":               "number of devices",
		"sim:80GiBx2x2":              "number of devices",
		"sim:0":                      "too small",
		"sim:1MiB":                   "too small",
		"sim:80GiB@":                 "absolute path",
		"sim:80GiB@file":             "absolute path",
		"sim:@/tmp/file":             "not a size",
		"sim:80GiB@/nowhere/file":    "shared file /nowhere/file",
		"nvidia:/nowhere/libcuda.so": "CISTERN_CONF=driver:sim",
	} {
		_, err := Open(spec)
		if err == nil {
			t.Errorf("Open(%q): no error", spec)
			continue
		}
		if !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("Open(%q): %v; want one line with %q", spec, err, says)
		}
	}
}
