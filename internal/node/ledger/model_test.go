package ledger

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/slow"
)

// The protocol's states for three clients, explored one by one: every order in which they connect, lack memory, ask, give, create, say
// that they are done, use and free what they have, and end, and in which the broker decides, does not wait any longer, and ends and
// begins anew. The ledger is the real one. What the broker's goroutines and the engines do around it is stated here, in steps that are
// atomic there: each message, each decision, and a look at the grants with the creation of memory after it.

const modelClients = 3

// modelClient is a process. Memory is in grains.
type modelClient struct {
	alive, connected bool
	reserved, active int
	allowed          int  // of active: that the broker may pause, at first
	denied           bool // not any more
	denyIn           bool // that is on its way to the broker
	paused           int  // what went, and is to come back
	request          modelRequest
	askIn, doneIn    bool // on their way to the broker
	replyIn          bool // on its way to the client
	got              int  // of the reply
	grant            uint64
	running          bool // the broker decides about its question
	created          bool // the grant's memory
	moves            int  // that it may still use or free memory
}

type modelRequest int8

const (
	notYet   modelRequest = iota
	waiting               // for the broker's answer
	answered              // it may create
	over
)

// modelPart is a part that a victim was asked for.
type modelPart struct {
	part     Part
	asker    int
	answerIn bool // on its way to the broker
	released int
	status   protocol.Status
	late     bool // the broker does not wait for it any more
}

// modelFault is one that the exploration has to find.
type modelFault int8

const (
	noFault      modelFault = iota
	greedyGrowth            // growth does not look at grants
	givesInUse              // victims give what is in use
	keepsGrants             // the end of a request does not end its grant
	askedForEver            // a client that answers too late is asked again at once
	pausesDenied            // victims pause what their owner does not allow any more
	countsAll               // a grant counts all that a pause released
	losesPaused             // a resume takes memory that is not there
)

// model is a state.
type model struct {
	l              *Ledger
	now            time.Duration
	free           int
	clients        [modelClients]modelClient
	parts          []modelPart
	deaths, breaks int // that may still come, of clients and of the broker
	jumps          int // of the clock
	policy         [modelClients]Policy
	needs          [modelClients]int
	fault          modelFault
	expired        bool // a grant was ended by time, so its client may find nothing
	wrong          string
}

func (m *model) clone() *model {
	c := *m
	c.parts = slices.Clone(m.parts)
	l := &Ledger{clients: maps.Clone(m.l.clients), devices: maps.Clone(m.l.devices), grants: maps.Clone(m.l.grants), last: m.l.last}
	for id, x := range l.clients {
		y := *x
		y.slots = slices.Clone(x.slots)
		l.clients[id] = &y
	}
	for id, d := range l.devices {
		y := *d
		y.accounts, y.by = make([]*Account, len(d.accounts)), map[ClientID]*Account{}
		for i, a := range d.accounts {
			z := *a
			y.accounts[i], y.by[a.Client] = &z, &z
		}
		l.devices[id] = &y
	}
	for id, g := range l.grants {
		y := *g
		l.grants[id] = &y
	}
	c.l = l
	return &c
}

// key is the state without what makes no difference: numbers of grants, and times beyond what the rules compare.
func (m *model) key() string {
	var b strings.Builder
	fmt.Fprint(&b, m.free, m.deaths, m.breaks, m.jumps, m.expired)
	for i, c := range m.clients {
		grant := c.grant
		c.grant = 0
		fmt.Fprintf(&b, "|%v", c)
		if g := m.l.grants[grant]; grant != 0 && g != nil {
			fmt.Fprint(&b, "g", g.need/Grain, g.promised/Grain, g.got/Grain)
		}
		if cl := m.l.clients[ClientID(i+1)]; cl != nil {
			a := m.l.devices[0].of(ClientID(i + 1))
			fmt.Fprint(&b, "a", cl.mute, cl.vain > m.now, a.Status.Reserved/Grain, a.Status.Active/Grain, a.Asked/Grain, a.Granted/Grain, a.Hold, a.gaveAt >= 0,
				a.gaveAt >= 0 && m.now-a.gaveAt <= RefaultWindow, a.barren > m.now, a.Refaults,
				"p", a.Pausable/Grain, a.pausing, a.rested > m.now)
		}
	}
	parts := make([]string, 0, len(m.parts))
	for _, p := range m.parts {
		parts = append(parts, fmt.Sprint(p.part.Client, p.part.Pause, p.asker, p.part.Bytes/Grain, p.answerIn, p.released, p.late, p.status.Reserved/Grain, p.status.Active/Grain, m.l.grants[p.part.Grant] != nil))
	}
	slices.Sort(parts)
	return b.String() + strings.Join(parts, "/")
}

func (m *model) status(i int) protocol.Status {
	c := &m.clients[i]
	return protocol.Status{Reserved: uint64(c.reserved) * Grain, Active: uint64(c.active) * Grain, Allocated: uint64(c.active) * Grain, Cached: uint64(c.reserved-c.active) * Grain}
}

// othersGrants is what of the device the segment shows as granted to others than a client. One that has its own grant leaves alone
// what others have got, and not what they were promised.
func (m *model) othersGrants(i int) int {
	mine, got := uint64(0), uint64(0)
	for id, g := range m.l.grants {
		if id == m.clients[i].grant || g.client == ClientID(i+1) {
			mine += g.got + g.promised
			got += g.got
		}
	}
	granted, released := m.l.Granted(0)
	if m.clients[i].request == answered && got >= uint64(m.needs[i])*Grain {
		return int((released - got) / Grain)
	}
	return int((granted - mine) / Grain)
}

// create is a look at the grants and the creation of memory after it.
func (m *model) create(i int) bool {
	c := &m.clients[i]
	if m.fault == greedyGrowth && m.free < m.needs[i] || m.fault != greedyGrowth && m.free-m.othersGrants(i) < m.needs[i] {
		return false
	}
	m.free -= m.needs[i]
	c.reserved += m.needs[i]
	c.active += m.needs[i]
	return true
}

func sum(a, b uint64) uint64 { return a + b }

// promisedTo reports whether parts of a client's question are not answered.
func (m *model) promisedTo(i int) bool {
	return slices.ContainsFunc(m.parts, func(p modelPart) bool { return p.asker == i && !p.late })
}

// step is one that is possible, by name.
type step struct {
	name string
	take func(m *model)
}

// steps are all that may come next.
func (m *model) steps() (all []step) {
	add := func(name string, i int, take func(m *model, c *modelClient)) {
		all = append(all, step{fmt.Sprint(name, " ", i), func(m *model) { take(m, &m.clients[i]) }})
	}
	for i := range m.clients {
		id := ClientID(i + 1)
		c := &m.clients[i]
		if c.alive {
			m.ofClient(i, c, add)
		}
		m.ofBroker(i, id, c, add)
	}
	for k := range m.parts {
		m.ofPart(k, func(name string, take func(m *model, p *modelPart)) {
			all = append(all, step{fmt.Sprint(name, " ", k), func(m *model) { take(m, &m.parts[k]) }})
		})
	}
	if m.breaks > 0 {
		all = append(all, step{"the broker ends", (*model).restart})
	}
	if m.jumps > 0 {
		all = append(all, step{"time passes", func(m *model) { m.jumps--; m.now += time.Minute }})
	}
	return all
}

// ofClient are the steps of a client that is alive.
func (m *model) ofClient(i int, c *modelClient, add func(string, int, func(*model, *modelClient))) {
	if !c.connected {
		add("connect", i, func(m *model, c *modelClient) {
			c.connected = true
			m.l.Join(m.now, ClientID(i+1), 0, uint64(m.total())*Grain, m.policy[i])
			m.l.Update(ClientID(i+1), 0, m.status(i))
			if !c.denied && c.paused == 0 {
				m.l.Pausable(ClientID(i+1), 0, uint64(c.allowed)*Grain)
			}
		})
	}
	m.ofOwner(i, c, add)
	if c.request == notYet && m.needs[i] > 0 {
		add("request", i, func(m *model, c *modelClient) {
			switch {
			case m.create(i):
				c.request = over
			case c.connected:
				c.request, c.askIn = waiting, true
			default:
				c.request = over // it fails, as without a broker
			}
		})
	}
	if c.request == waiting {
		add("give up", i, func(m *model, c *modelClient) { c.request, c.doneIn, c.replyIn = over, c.connected, false })
	}
	if c.replyIn {
		add("answered", i, func(m *model, c *modelClient) { c.replyIn, c.request = false, answered })
	}
	if c.request == answered {
		add("create", i, func(m *model, c *modelClient) {
			c.created = m.create(i)
			c.request, c.doneIn = over, c.connected && c.grant != 0
		})
	}
	if c.moves > 0 && c.active > c.stays() {
		add("free", i, func(m *model, c *modelClient) { c.moves--; c.active-- })
	}
	if c.moves > 0 && c.active < c.reserved {
		add("use", i, func(m *model, c *modelClient) { c.moves--; c.active++ })
	}
	if m.deaths > 0 {
		add("end", i, func(m *model, c *modelClient) {
			m.deaths--
			m.free += c.reserved
			c.alive, c.reserved, c.active, c.replyIn, c.moves = false, 0, 0, false, 0
			c.allowed, c.denyIn, c.paused = 0, false, 0
		})
	}
}

// stays is what the program neither uses nor frees, as it let the broker pause it.
func (c *modelClient) stays() int {
	if c.denied || c.paused > 0 {
		return 0
	}
	return c.allowed
}

// ofOwner are the steps of a client that let the broker pause memory: it ends that, and has what was paused again where that fits.
func (m *model) ofOwner(i int, c *modelClient, add func(string, int, func(*model, *modelClient))) {
	if c.allowed > 0 && !c.denied {
		add("deny", i, func(m *model, c *modelClient) { c.denied, c.denyIn = true, c.connected })
	}
	if c.denied && c.paused > 0 && (m.fault == losesPaused || m.free-m.othersGrants(i) >= c.paused) {
		add("resume", i, func(m *model, c *modelClient) {
			m.free -= c.paused
			c.reserved += c.paused
			c.active += c.paused
			c.paused = 0
		})
	}
	if c.denyIn {
		add("denied", i, func(m *model, c *modelClient) {
			c.denyIn = false
			m.l.Pausable(ClientID(i+1), 0, 0)
		})
	}
}

// pause is what a victim does: it pauses all that it allows, or nothing.
func (m *model) pause(i int) (released int) {
	v := &m.clients[i]
	if v.denied && m.fault != pausesDenied || v.paused > 0 {
		return 0
	}
	if v.denied {
		m.wrong = fmt.Sprintf("client %d paused memory that its owner uses", i)
	}
	released = min(v.allowed, v.active)
	v.active -= released
	v.reserved -= released
	v.paused += released
	m.free += released
	return released
}

// ofBroker are the broker's steps about a client.
func (m *model) ofBroker(i int, id ClientID, c *modelClient, add func(string, int, func(*model, *modelClient))) {
	if c.askIn {
		add("ask", i, func(m *model, c *modelClient) {
			c.askIn = false
			c.grant, _, c.running = m.l.Ask(m.now, id, 0, uint64(m.needs[i])*Grain)
		})
	}
	if c.running && !m.promisedTo(i) {
		for _, fresh := range []bool{false, true} { // what status segments say may be old
			add(map[bool]string{false: "decide by old figures", true: "decide"}[fresh], i, func(m *model, c *modelClient) { m.decide(i, fresh) })
		}
	}
	if c.doneIn && !c.askIn {
		add("done", i, func(m *model, c *modelClient) {
			if m.fault != keepsGrants {
				m.l.End(c.grant)
			}
			c.doneIn, c.running, c.grant = false, false, 0
		})
	}
	if c.grant != 0 && !c.running {
		add("the grant is over by time", i, func(m *model, c *modelClient) {
			m.expired = m.expired || m.l.grants[c.grant] != nil && !c.created
			m.l.End(c.grant)
			c.grant = 0
		})
	}
	heard := !c.askIn && !c.doneIn && !c.denyIn && !slices.ContainsFunc(m.parts, func(p modelPart) bool { return p.part.Client == id && p.answerIn })
	if !c.alive && c.connected && heard && !m.promisedTo(i) { // what it sent before is read before its end
		add("leave", i, func(m *model, c *modelClient) {
			m.parts = slices.DeleteFunc(m.parts, func(p modelPart) bool {
				if p.part.Client == id && !p.late {
					m.l.Missed(p.part)
				}
				return p.part.Client == id
			})
			m.l.Leave(id)
			c.connected, c.running, c.grant = false, false, 0
		})
	}
}

// decide is one turn of the broker's loop about a question.
func (m *model) decide(i int, fresh bool) {
	c := &m.clients[i]
	if fresh {
		for k := range m.clients {
			if m.clients[k].alive && m.clients[k].connected {
				m.l.Update(ClientID(k+1), 0, m.status(k))
			}
		}
	}
	g, unused := *m.l.grants[c.grant], m.l.Available(m.now, ClientID(i+1), 0)
	d := m.l.Decide(m.now, c.grant)
	if d.Verdict == Take {
		if paused := slices.ContainsFunc(d.Parts, func(p Part) bool { return p.Pause }); paused && unused >= g.need-g.got {
			m.wrong = "memory in use was to be paused, though there is unused memory"
		}
		for _, p := range d.Parts {
			m.parts = append(m.parts, modelPart{part: p, asker: i})
		}
		return
	}
	if d.Verdict == Wait { // its time is over
		m.l.Waited(m.now, c.grant)
	}
	c.running = false
	c.got = int(m.l.Result(c.grant) / Grain)
	if c.got == 0 {
		m.l.End(c.grant)
		c.grant = 0
	}
	c.replyIn = c.alive && c.request == waiting
}

// ofPart are the steps about a part.
func (m *model) ofPart(k int, add func(string, func(*model, *modelPart))) {
	p := &m.parts[k]
	victim := int(p.part.Client) - 1
	drop := func(m *model) { m.parts = slices.Delete(m.parts, k, k+1) }
	if !p.answerIn && m.clients[victim].alive {
		give := func(most int) {
			add(fmt.Sprint("give up to ", most, ", of part"), func(m *model, p *modelPart) {
				v := &m.clients[victim]
				keep := max(v.active, int((p.part.Keep+Grain-1)/Grain))
				if m.fault == givesInUse {
					keep = 0
				}
				p.released = min(most, int(p.part.Bytes/Grain), max(0, v.reserved-keep))
				v.reserved -= p.released
				m.free += p.released
				p.answerIn, p.status = true, m.status(victim)
			})
		}
		if p.part.Pause {
			add("pause, of part", func(m *model, p *modelPart) {
				p.released = m.pause(victim)
				p.answerIn, p.status = true, m.status(victim)
			})
		} else {
			give(m.total())
		}
		give(0) // it cannot, as what it has waits for the GPU, or a capture is under way
	}
	if p.answerIn {
		add("gave, of part", func(m *model, p *modelPart) {
			if p.late {
				m.l.Heard(p.part.Client)
				m.l.Update(p.part.Client, 0, p.status)
			} else {
				m.l.Heard(p.part.Client)
				part := p.part
				if m.fault == countsAll {
					part.Bytes = max(part.Bytes, uint64(p.released)*Grain)
				}
				m.l.Gave(m.now, part, uint64(p.released)*Grain, p.status)
			}
			drop(m)
		})
	}
	if !p.late {
		add("no answer in time, of part", func(m *model, p *modelPart) {
			if p.late = true; m.fault == askedForEver {
				p.part.At = -time.Hour
			}
			m.l.Missed(p.part)
			if !m.clients[victim].alive && !p.answerIn {
				drop(m)
			}
		})
	}
}

// restart ends the broker, and begins it anew: it knows nothing, and all clients are without it.
func (m *model) restart() {
	m.breaks--
	m.l = New()
	m.parts = nil
	for i := range m.clients {
		c := &m.clients[i]
		c.connected, c.askIn, c.doneIn, c.replyIn, c.denyIn, c.running, c.grant = false, false, false, false, false, false, 0
		if c.request == waiting {
			c.request = over // the link is lost: the request goes on without
		}
		m.expired = m.expired || c.request == answered
	}
}

func (m *model) total() int {
	n := m.free
	for _, c := range m.clients {
		n += c.reserved
	}
	return n
}

// check demands what holds in every state.
func (m *model) check(total int) error {
	if m.total() != total || m.free < 0 {
		return fmt.Errorf("%d of %d grains are there, %d free", m.total(), total, m.free)
	}
	if m.wrong != "" {
		return errors.New(m.wrong)
	}
	granted, created := 0, 0
	for i, c := range m.clients {
		if c.active > c.reserved {
			return fmt.Errorf("of client %d %d grains are in use, and %d are left", i, c.active, c.reserved)
		}
		if g := m.l.grants[c.grant]; c.grant != 0 && g != nil {
			if c.created {
				created += int(g.got / Grain)
			} else {
				granted += int(g.got / Grain)
			}
		}
	}
	if granted > m.free {
		return fmt.Errorf("%d grains are granted and not created, and %d are free: some were given twice", granted, m.free)
	}
	for i, c := range m.clients {
		g := m.l.grants[c.grant]
		// What others have created of theirs holds it up until they say so.
		if c.request == answered && c.grant != 0 && g != nil && c.got >= m.needs[i] && m.free-m.othersGrants(i)+created < m.needs[i] {
			return fmt.Errorf("client %d was granted %d grains and cannot create them", i, c.got)
		}
	}
	return nil
}

// checkEnd demands what holds when nothing is on its way.
func (m *model) checkEnd() error {
	for i, c := range m.clients {
		if c.running || c.grant != 0 || c.alive && c.request != over && m.needs[i] > 0 {
			return fmt.Errorf("the question of client %d is open: %+v", i, c)
		}
		a, known := m.l.Account(ClientID(i+1), 0)
		if known != (c.alive && c.connected) {
			return fmt.Errorf("client %d has an account: %v; it is there: %v", i, known, c.alive)
		}
		if known && (a.Asked != 0 || a.Granted != 0 || a.pausing || c.denied && a.Pausable != 0) {
			return fmt.Errorf("the account of client %d keeps %+v", i, a)
		}
		if known {
			m.l.Update(ClientID(i+1), 0, m.status(i))
			if a, _ := m.l.Account(ClientID(i+1), 0); a.Status != m.status(i) {
				return fmt.Errorf("the account of client %d says %+v", i, a.Status)
			}
		}
	}
	if len(m.parts) != 0 || len(m.l.grants) != 0 || sum(m.l.Granted(0)) != 0 {
		return fmt.Errorf("%d parts and %d grants are left", len(m.parts), len(m.l.grants))
	}
	return nil
}

// explorer visits every state once.
type explorer struct {
	total int
	seen  map[string]bool // false while what comes after it is visited
	path  []string
	ends  int
	met   bool // a request was met by other clients
}

// wrong is an error with the steps that lead to it.
func (e *explorer) wrong(err error) error {
	return fmt.Errorf("%w, after\n  %s", err, strings.Join(e.path, "\n  "))
}

var errAgain = errors.New("it comes back to where it was: a question need not end")

func (e *explorer) visit(m *model) error {
	if err := m.check(e.total); err != nil {
		return e.wrong(err)
	}
	key := m.key()
	if done, known := e.seen[key]; known {
		if !done {
			return e.wrong(errAgain)
		}
		return nil
	}
	e.seen[key] = false
	steps := m.steps()
	for _, s := range steps {
		next := m.clone()
		s.take(next)
		e.path = append(e.path, s.name)
		if err := e.visit(next); err != nil {
			return err
		}
		e.path = e.path[:len(e.path)-1]
	}
	if len(steps) == 0 {
		e.ends++
		if err := m.checkEnd(); err != nil {
			return e.wrong(err)
		}
	}
	e.met = e.met || slices.ContainsFunc(m.clients[:], func(c modelClient) bool { return c.created })
	e.seen[key] = true
	return nil
}

// modelCase is where the exploration begins, in grains.
type modelCase struct {
	reserved, active, needs [modelClients]int
	allowed                 [modelClients]int
	min                     [modelClients]int
	free                    int
	deaths, breaks, jumps   int
	moves                   [modelClients]int
	fault                   modelFault
}

func (c *modelCase) explore() (*explorer, error) {
	m := &model{l: New(), free: c.free, deaths: c.deaths, breaks: c.breaks, jumps: c.jumps, needs: c.needs, fault: c.fault}
	e := &explorer{total: c.free, seen: map[string]bool{}}
	for i := range m.clients {
		m.clients[i] = modelClient{alive: true, reserved: c.reserved[i], active: c.active[i], allowed: c.allowed[i], moves: c.moves[i]}
		m.policy[i] = Policy{Min: uint64(c.min[i]) * Grain, Weight: 1}
		e.total += c.reserved[i]
	}
	return e, e.visit(m)
}

func exploreAll(t *testing.T, cases map[string]modelCase) {
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			e, err := c.explore()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d states, %d ends, in %v", len(e.seen), e.ends, time.Since(began).Round(time.Millisecond))
			if !e.met {
				t.Error("no request was met by another client: the model is too small")
			}
		})
	}
}

// TestModel visits every state of three clients on a device.
func TestModel(t *testing.T) {
	exploreAll(t, map[string]modelCase{
		"one asks":                  {reserved: [3]int{2, 1}, active: [3]int{0, 1}, needs: [3]int{2: 2}, moves: [3]int{1, 1}},
		"one asks, one ends":        {reserved: [3]int{1, 1}, needs: [3]int{2: 2}, deaths: 1},
		"one asks, broker ends":     {reserved: [3]int{1, 1}, needs: [3]int{2: 2}, breaks: 1},
		"one asks, time passes":     {reserved: [3]int{2, 1}, active: [3]int{1, 0}, needs: [3]int{2: 2}, jumps: 1, moves: [3]int{1}},
		"one asks, others have min": {reserved: [3]int{2, 1}, min: [3]int{1}, needs: [3]int{2: 2}, free: 1},
		"two ask":                   {reserved: [3]int{2}, needs: [3]int{1: 1, 2: 1}},
		"two ask each other":        {reserved: [3]int{1, 1}, needs: [3]int{1, 1}},
		"one may be paused":         {reserved: [3]int{2, 1}, active: [3]int{2, 1}, allowed: [3]int{2}, needs: [3]int{2: 1}, moves: [3]int{0, 1}},
		"cache, and one paused":     {reserved: [3]int{1, 2}, active: [3]int{1}, allowed: [3]int{1}, needs: [3]int{2: 3}},
	})
}

// TestSlowModel visits more of them.
func TestSlowModel(t *testing.T) {
	slow.Only(t)
	exploreAll(t, map[string]modelCase{
		"two ask, one ends":               {reserved: [3]int{2}, needs: [3]int{1: 1, 2: 2}, deaths: 1},
		"two ask, broker ends":            {reserved: [3]int{2}, needs: [3]int{1: 1, 2: 1}, breaks: 1},
		"two ask each other, time passes": {reserved: [3]int{1, 1}, needs: [3]int{1, 1}, jumps: 1},
		"one may be paused, one ends":     {reserved: [3]int{2, 1}, active: [3]int{2, 0}, allowed: [3]int{2}, needs: [3]int{2: 2}, deaths: 1},
		"one paused, broker ends":         {reserved: [3]int{1, 1}, active: [3]int{1}, allowed: [3]int{1}, needs: [3]int{2: 2}, breaks: 1},
		"one paused, time passes":         {reserved: [3]int{2}, active: [3]int{2}, allowed: [3]int{2}, needs: [3]int{2: 1}, jumps: 1},
		"two want one paused":             {reserved: [3]int{2}, active: [3]int{2}, allowed: [3]int{2}, needs: [3]int{1: 1, 2: 1}},
		"one asks, one and broker end":    {reserved: [3]int{1, 1}, needs: [3]int{2: 2}, deaths: 1, breaks: 1, moves: [3]int{1}},
	})
}

// Faults of the broker, of clients and of the ledger are found.
func TestModelFindsFaults(t *testing.T) {
	for _, c := range []struct {
		fault modelFault
		in    modelCase
		want  string
	}{
		{greedyGrowth, modelCase{reserved: [3]int{2}, needs: [3]int{1: 1, 2: 1}}, "given twice"},
		{givesInUse, modelCase{reserved: [3]int{2}, needs: [3]int{2: 2}, moves: [3]int{1}}, "are in use"},
		{keepsGrants, modelCase{reserved: [3]int{1, 1}, needs: [3]int{2: 2}}, "keeps {"},
		{askedForEver, modelCase{reserved: [3]int{1, 1}, needs: [3]int{2: 2}}, "need not end"},
		{pausesDenied, modelCase{reserved: [3]int{2}, active: [3]int{2}, allowed: [3]int{2}, needs: [3]int{2: 1}}, "its owner uses"},
		{countsAll, modelCase{reserved: [3]int{2}, active: [3]int{2}, allowed: [3]int{2}, needs: [3]int{1: 1, 2: 1}}, "given twice"},
		{losesPaused, modelCase{reserved: [3]int{1}, active: [3]int{1}, allowed: [3]int{1}, needs: [3]int{2: 1}}, "free"},
	} {
		c.in.fault = c.fault
		if _, err := c.in.explore(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("fault %d: %v, want %q", c.fault, err, c.want)
		}
	}
}
