package cistern_test

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
)

// interposed is a driver that calls a function before it makes a call, so that a test decides what other threads of the
// program do between a check of the engine's and the call that the check was for. Calls that the function causes do not
// call it again. Only the calls that a test needs are interposed so far.
type interposed struct {
	cuda.Driver
	before func(call string, dev cuda.Device) // set before the driver is used
	inside atomic.Bool
}

func (i *interposed) at(call string, dev cuda.Device) {
	if i.before != nil && i.inside.CompareAndSwap(false, true) {
		defer i.inside.Store(false)
		i.before(call, dev)
	}
}

func (i *interposed) ContextSynchronize(dev cuda.Device) error {
	i.at("cuCtxSynchronize", dev)
	return i.Driver.ContextSynchronize(dev)
}
