package resource

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

// OnFailureAdaptor asks a function when the upstream is out of memory, as RMM's failure_callback_resource_adaptor: while
// the function reports that it is worth it, the request is tried again.
type OnFailureAdaptor struct {
	adaptor
	callback func(need uint64) bool
}

// OnFailure makes that adaptor. The callback gets the bytes that were asked for, from the thread that asked; it may
// free what came from this resource. It decides how often to try: while it returns true there is another try. Other
// errors than out of memory are not its business.
func OnFailure(up Resource, callback func(need uint64) bool) *OnFailureAdaptor {
	return &OnFailureAdaptor{adaptor{up}, callback}
}

func (o *OnFailureAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	for {
		p, err := o.up.Alloc(size, align, st)
		if err == nil || !errors.Is(err, cuda.ErrOutOfMemory) || !o.callback(size) {
			return p, err
		}
	}
}

func (o *OnFailureAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	return o.up.Free(p, size, align, st)
}

// Equal: it keeps nothing, so what is equal below is equal here.
func (o *OnFailureAdaptor) Equal(other Resource) bool {
	if x, ok := other.(*OnFailureAdaptor); ok {
		return o == x || o.up.Equal(x.up)
	}
	return false
}
