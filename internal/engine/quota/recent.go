package quota

import "time"

// Windows is the number of windows of Recent, Window the length of the first; each is twice as long as the one before.
const (
	Windows = 5
	Window  = 250 * time.Millisecond
)

// Recent is the most that was active in the last Window, and in the last 2, 4, … of them. It is as exact as what it is given, and
// at most a window too long. The zero value is ready.
type Recent struct {
	most [ring]uint64 // of the windows since, by their number modulo ring
	at   int64        // number of the last one
}

// ring has one window more than the longest of the windows is long, as the one that goes on counts too.
const ring = 1<<(Windows-1) + 1

// Add notes the most that was active since the last Add, at a time that does not run backwards.
func (r *Recent) Add(now time.Duration, most uint64) {
	at := int64(now / Window)
	r.most[r.at%ring] = max(r.most[r.at%ring], most)
	for n := min(at-r.at, ring); n > 0; n-- {
		r.at = at - n + 1
		r.most[r.at%ring] = most
	}
}

// Peaks are the peaks of the windows as of the last Add.
func (r *Recent) Peaks() (peaks [Windows]uint64) {
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
