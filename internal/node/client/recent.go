package client

import (
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Recent is the most that was active of a device in the windows of protocol.Status.Peaks, by samples. The zero value is ready.
type Recent struct {
	most [ring]uint64 // of the windows since, by their number modulo ring
	at   int64        // number of the last one
	last uint64       // sample
}

// ring has one window more than the longest of the windows is long, as the one that goes on counts too.
const ring = 1<<(protocol.Windows-1) + 1

// Add notes what is active now; now does not run backwards.
func (r *Recent) Add(now time.Duration, active uint64) {
	at := int64(now / protocol.Window)
	for n := min(at-r.at, ring); n > 0; n-- { // windows without a sample had the last one's
		r.at = at - n + 1
		r.most[r.at%ring] = r.last
	}
	r.last = active
	r.most[r.at%ring] = max(r.most[r.at%ring], active)
}

// Peaks are the peaks as of the last sample.
func (r *Recent) Peaks() (peaks [protocol.Windows]uint64) {
	most, i := uint64(0), 0
	for back := range int64(ring) {
		if r.at-back >= 0 {
			most = max(most, r.most[(r.at-back)%ring])
		}
		if back == 1<<i {
			peaks[i] = most
			i++
		}
	}
	return peaks
}
