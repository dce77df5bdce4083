package engine

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

// codeOf is the CUDA code within an error.
func codeOf(err error) (cuda.Code, bool) {
	var c cuda.Code
	ok := errors.As(err, &c)
	return c, ok
}
