//go:build !linux || !cgo

package nvidia

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

// Open fails: NVIDIA's driver is reached on Linux, in a program built with cgo.
func Open(path string) (cuda.Driver, error) {
	return nil, errors.New("no GPU to use: this program was built without the NVIDIA driver binding (it needs Linux and" +
		" cgo); for a simulated device set CISTERN_CONF=driver:sim")
}
