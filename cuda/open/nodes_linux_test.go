//go:build linux && cgo

package open

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
)

func newCapturingBinding(t *testing.T, driver cuda.Driver, dev cuda.Device, p cuda.Ptr) capturing {
	t.Helper()
	d, ok := driver.(*nvidia.Driver)
	if !ok {
		t.Fatalf("no way to capture with %T", driver)
	}
	return capturing{d, func(s cuda.Stream) error { return d.CaptureBegin(dev, s, nvidia.CaptureRelaxed) },
		func(s cuda.Stream) error {
			graph, err := d.CaptureEnd(dev, s)
			return errors.Join(err, d.GraphDestroy(dev, graph))
		},
		func(s cuda.Stream) error { return d.Memset(dev, p, 1, 512, s) }}
}
