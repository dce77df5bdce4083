package broker

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// The log's lines that clients cause are limited, so that none of them can fill a disk: noteBurst at once for the clients of one user,
// and one in noteEvery from then on. allBurst and allEvery are for the clients of all users.
const (
	noteBurst = 20
	noteEvery = 10 * time.Second
	allBurst  = 200
	allEvery  = time.Second
	// mostNoted is how many users are limited each by itself; those beyond share one limit.
	mostNoted = 4096
)

// notes is the log of what clients cause. Its lines are written with no lock of the broker, as the reader of the log may be slow.
type notes struct {
	log *slog.Logger

	mu    sync.Mutex
	all   allowance             // +checklocks:mu
	users map[uint32]*allowance // those that wrote lately; +checklocks:mu
	rest  allowance             // of users beyond mostNoted; +checklocks:mu
}

// allowance is how many lines may be written. The zero value is a full one.
type allowance struct {
	left float64
	at   time.Time
	out  uint64 // lines that were left out since the last one
}

// fill adds what has come since the last time.
func (a *allowance) fill(now time.Time, burst int, every time.Duration) {
	if a.at.IsZero() {
		a.left = float64(burst)
	} else {
		a.left = min(float64(burst), a.left+float64(max(0, now.Sub(a.at)))/float64(every))
	}
	a.at = now
}

func newNotes(log *slog.Logger) *notes { return &notes{log: log, users: map[uint32]*allowance{}} }

// say writes a line about a client of a user, if there is an allowance for it. Levels that the log does not show cost none.
func (n *notes) say(level slog.Level, uid uint32, words string, about ...any) {
	n.sayAt(time.Now(), level, uid, words, about...)
}

func (n *notes) sayAt(now time.Time, level slog.Level, uid uint32, words string, about ...any) {
	if !n.log.Enabled(context.Background(), level) {
		return
	}
	if level >= slog.LevelInfo { // an operator who asks for more gets all of it
		out, ok := n.allow(now, uid)
		if !ok {
			return
		}
		if out > 0 {
			about = append(about, "left_out", out)
		}
	}
	n.log.Log(context.Background(), level, words, about...)
}

// allow takes a line from the allowances, and returns how many were left out before it.
func (n *notes) allow(now time.Time, uid uint32) (out uint64, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	a := n.users[uid]
	switch {
	case a == nil && len(n.users) < mostNoted:
		a = &allowance{}
		n.users[uid] = a
	case a == nil:
		a = &n.rest
	}
	a.fill(now, noteBurst, noteEvery)
	n.all.fill(now, allBurst, allEvery)
	if a.left < 1 || n.all.left < 1 {
		a.out++
		return 0, false
	}
	a.left--
	n.all.left--
	out, a.out = a.out, 0
	return out, true
}

// tell says how many lines were left out of users about whose clients there is nothing to say any more, and forgets those users.
func (n *notes) tell(now time.Time) {
	type left struct {
		uid uint32
		out uint64
	}
	var all []left
	n.mu.Lock()
	for uid, a := range n.users {
		a.fill(now, noteBurst, noteEvery)
		n.all.fill(now, allBurst, allEvery)
		if a.out > 0 && a.left >= 1 && n.all.left >= 1 {
			a.left--
			n.all.left--
			all = append(all, left{uid, a.out})
			a.out = 0
		}
		if a.left >= noteBurst {
			delete(n.users, uid)
		}
	}
	n.mu.Unlock()
	for _, x := range all {
		n.log.Warn("lines about a user's clients were left out", "uid", x.uid, "left_out", x.out)
	}
}
