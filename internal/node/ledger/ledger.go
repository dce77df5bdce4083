// Package ledger is what the broker of a node knows of its clients and their memory, and how it decides. It is arithmetic: it makes
// no system call, and its callers pass it the time. It has no lock; its owner has.
//
// # Accounts
//
// A client has an account for each device that it uses: its policy, its status as it said last, how many bytes it was asked to give
// and has not answered for, and what it gave. What a client says is believed: one that says too little is asked for less, and one
// that says too much is asked in vain (Barren). What it gives is measured by what the asker can create.
//
// # Victims
//
// Unused memory is taken of clients above their high first, then of those of the lowest priority, then of those that have the most
// reserved for their weight; never below a client's floor: its min, and the recent peak of what it had active (Status.Floor). How
// long a peak counts (hold) is learned for each account: it doubles when the client asks soon after it gave, a refault, and halves
// when it does not.
//
// # All or nothing
//
// Nothing is taken for a request that what is unused, and what may be paused, cannot meet. Where the clients have as much reserved,
// the asker waits for it to become unused (Wait); one that waited in vain does not wait again for a while. Memory that was granted
// to others counts against the asker until they say that they have created it, so it waits for that as well.
//
// # Pausing
//
// Memory in use whose owner lets the broker pause it (pausing.go) is the second choice: for what the unused memory of all clients
// lacks, in the same order.
package ledger

import (
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// The rules' figures.
const (
	// FirstHold is how long a peak counts for a client that has not given anything yet; LeastHold and MostHold bound what is learned.
	FirstHold = time.Second
	LeastHold = 125 * time.Millisecond
	MostHold  = 1600 * time.Millisecond
	// RefaultWindow is how soon after giving a question of the same client is a refault.
	RefaultWindow = time.Second
	// Barren is how long a client is taken to have nothing after it gave less than it was asked for.
	Barren = time.Second
	// InVain is how long a client that waited and was granted nothing does not wait again.
	InVain = 5 * time.Second
	// PauseRest is how long a client that was paused for others is not paused again: contents were copied for it.
	PauseRest = 5 * time.Second
	// Burst and Rate bound the questions of a client: so many at once, and so many a second.
	Burst = 200
	Rate  = 200
	// Grain is the unit in which memory is asked for; victims are few: each is asked for an eighth of the need at least.
	Grain = 2 << 20
	parts = 8
	// mostTotal is the most memory that a device is believed to have.
	mostTotal = 1 << 48
)

// ClientID and Slot name a client and a device.
type (
	ClientID uint64
	Slot     uint64
)

// Policy is what rules say of a client on a device.
type Policy struct {
	Min      uint64 // reserved bytes that are never asked for
	High     uint64 // above which the client is asked first; 0: none
	Max      uint64 // that the client may reserve; 0: no limit
	Weight   uint32 // of its share; 0 is 1
	Priority int32  // those of higher priority are asked later
	// Decay is how long cache must not have been needed before it is released without a request; 0: it stays.
	Decay time.Duration
}

// Account is a client on a device.
type Account struct {
	Client ClientID
	Slot   Slot
	Policy Policy
	Status protocol.Status
	Hold   time.Duration // how long a peak counts

	Asked    uint64 // bytes that it was asked for and has not answered
	Granted  uint64 // bytes of open grants to it
	Gave     uint64 // bytes that it ever gave
	Got      uint64 // bytes that it was ever granted
	Refaults uint64
	Missed   uint64 // questions that it did not answer

	Pausable uint64        // bytes in use that it lets the broker pause, as it said last
	Pauses   uint64        // how often it paused for others
	pausing  bool          // it was asked to pause and has not answered
	rested   time.Duration // until then it is not paused

	gaveAt time.Duration // of a refault that may come; negative: none
	barren time.Duration // until then

	needed uint64        // the most that was active since from; as Decay saw it
	from   time.Duration // when a period of Policy.Decay began
	looked time.Duration // when Decay looked last; 0: there is no period
}

// client is what is known of one beside its accounts.
type client struct {
	mute   bool // it did not answer; from then on it is not asked, until it says something
	tokens float64
	filled time.Duration // when tokens were counted
	vain   time.Duration // until then it does not wait
	slots  []Slot
}

// Device is one GPU.
type Device struct {
	Total    uint64
	accounts []*Account // in the order in which they joined
	by       map[ClientID]*Account
}

// Ledger is all of that. The zero value has to be made by New.
type Ledger struct {
	clients map[ClientID]*client
	devices map[Slot]*Device
	grants  map[uint64]*Grant
	last    uint64 // grant
}

// New makes an empty ledger.
func New() *Ledger {
	return &Ledger{clients: map[ClientID]*client{}, devices: map[Slot]*Device{}, grants: map[uint64]*Grant{}}
}

// Join gives a client an account on a device, if it has none.
func (l *Ledger) Join(now time.Duration, c ClientID, slot Slot, total uint64, p Policy) {
	cl := l.clients[c]
	if cl == nil {
		cl = &client{tokens: Burst, filled: now, vain: -1}
		l.clients[c] = cl
	}
	d := l.devices[slot]
	if d == nil {
		d = &Device{by: map[ClientID]*Account{}}
		l.devices[slot] = d
	}
	d.Total = max(d.Total, min(total, mostTotal))
	if a := d.of(c); a != nil {
		a.Policy = p
		return
	}
	cl.slots = append(cl.slots, slot)
	a := &Account{Client: c, Slot: slot, Policy: p, Hold: FirstHold, gaveAt: -1}
	d.accounts, d.by[c] = append(d.accounts, a), a
}

// Leave ends a client with its accounts and its grants. Questions to it that are open have to be ended first (Missed).
func (l *Ledger) Leave(c ClientID) {
	cl := l.clients[c]
	if cl == nil {
		return
	}
	for id, g := range l.grants {
		if g.client == c {
			l.End(id)
		}
	}
	for _, slot := range cl.slots {
		d := l.devices[slot]
		d.accounts = slices.DeleteFunc(d.accounts, func(a *Account) bool { return a.Client == c })
		delete(d.by, c)
	}
	delete(l.clients, c)
}

// Forget ends a device that no client has an account on, and reports whether it did.
func (l *Ledger) Forget(slot Slot) bool {
	if d := l.devices[slot]; d != nil && len(d.accounts) > 0 {
		return false
	}
	delete(l.devices, slot)
	return true
}

// of is a client's account.
func (d *Device) of(c ClientID) *Account { return d.by[c] }

// Account is a copy of a client's account on a device.
func (l *Ledger) Account(c ClientID, slot Slot) (Account, bool) {
	if d := l.devices[slot]; d != nil {
		if a := d.of(c); a != nil {
			return *a, true
		}
	}
	return Account{}, false
}

// Accounts are copies of all accounts of a device.
func (l *Ledger) Accounts(slot Slot) (all []Account) {
	if d := l.devices[slot]; d != nil {
		for _, a := range d.accounts {
			all = append(all, *a)
		}
	}
	return all
}

// Total is a device's memory, 0 for one that no client uses.
func (l *Ledger) Total(slot Slot) uint64 {
	if d := l.devices[slot]; d != nil {
		return d.Total
	}
	return 0
}

// Mute reports whether a client is skipped because it did not answer.
func (l *Ledger) Mute(c ClientID) bool { return l.clients[c] != nil && l.clients[c].mute }

// SetPolicy is another policy of a client on a device.
func (l *Ledger) SetPolicy(c ClientID, slot Slot, p Policy) {
	if d := l.devices[slot]; d != nil {
		if a := d.of(c); a != nil {
			a.Policy = p
		}
	}
}

// Update is what a client has now.
func (l *Ledger) Update(c ClientID, slot Slot, s protocol.Status) {
	if d := l.devices[slot]; d != nil {
		if a := d.of(c); a != nil {
			a.Status = d.possible(s)
		}
	}
}

// possible is a status within what the device has: sums of what clients say do not overflow.
func (d *Device) possible(s protocol.Status) protocol.Status {
	s.Reserved = min(s.Reserved, d.Total)
	s.Allocated = min(s.Allocated, mostTotal) // these two need no memory of the device
	s.Paused = min(s.Paused, mostTotal)
	s.Active = min(s.Active, s.Reserved)
	s.Cached = min(s.Cached, s.Reserved)
	s.Pinned = min(s.Pinned, s.Cached)
	for i := range s.Peaks {
		s.Peaks[i] = min(s.Peaks[i], d.Total)
	}
	return s
}

// Heard notes that a client said something: it is asked again.
func (l *Ledger) Heard(c ClientID) {
	if cl := l.clients[c]; cl != nil {
		cl.mute = false
	}
}

// spare is what an account can be asked for now.
func (l *Ledger) spare(now time.Duration, a *Account) uint64 {
	if now < a.barren || l.clients[a.Client].mute {
		return 0
	}
	keep := max(a.Policy.Min, a.Status.Floor(a.Hold))
	return less(min(less(a.Status.Cached, a.Status.Pinned), less(a.Status.Reserved, keep)), a.Asked)
}

// less is a − b, 0 at least.
func less(a, b uint64) uint64 { return a - min(a, b) }

// Available is what other clients would give a client now.
func (l *Ledger) Available(now time.Duration, c ClientID, slot Slot) (n uint64) {
	if d := l.devices[slot]; d != nil {
		for _, a := range d.accounts {
			if a.Client != c {
				n += l.spare(now, a)
			}
		}
	}
	return n
}

// Spare is what a client can be asked for of a device now.
func (l *Ledger) Spare(now time.Duration, c ClientID, slot Slot) uint64 {
	if d := l.devices[slot]; d != nil {
		if a := d.of(c); a != nil {
			return l.spare(now, a)
		}
	}
	return 0
}

// Granted is what of a device is granted, or was asked for on behalf of a grant, and how much of that was released.
func (l *Ledger) Granted(slot Slot) (n, released uint64) {
	for _, g := range l.grants {
		if g.slot == slot {
			n += g.promised + g.got
			released += g.got
		}
	}
	return n, released
}
