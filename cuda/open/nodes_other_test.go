//go:build !(linux && cgo)

package open

import (
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

func newCapturingBinding(t *testing.T, driver cuda.Driver, _ cuda.Device, _ cuda.Ptr) capturing {
	t.Helper()
	t.Fatalf("no way to capture with %T", driver)
	return capturing{}
}
