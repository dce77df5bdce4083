//go:build linux && cgo

package open

import (
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
)

// The binding conforms over the stand-in library, which is what the test of the same name on a GPU is prepared by.
func TestConformanceOfBinding(t *testing.T) {
	d, err := Open("nvidia:" + standin.Build(t))
	must(t, err)
	if d.Name() != "nvidia" {
		t.Errorf("opened %s", d.Name())
	}
	conforms(t, d)
	t.Setenv("STANDIN_DEVICES", "2")
	for _, peers := range []string{"1", "0"} {
		t.Setenv("STANDIN_PEERS", peers)
		d, err := Open("nvidia:" + standin.Build(t))
		must(t, err)
		peersConform(t, d)
	}
}
