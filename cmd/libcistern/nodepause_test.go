//go:build linux && cgo

package main

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// command pauses or resumes clients with a label.
func (n *node) command(resume bool, label string) []protocol.PauseResult {
	n.t.Helper()
	c, err := control.Dial(n.socket)
	if err != nil {
		n.t.Fatal(err)
	}
	defer c.Close()
	f := c.Pause
	if resume {
		f = c.Resume
	}
	all, err := f(label, time.Minute)
	if err != nil {
		n.t.Fatal(err)
	}
	return all
}

// one is the result of the only client with a label.
func (n *node) one(resume bool, label string) protocol.PauseResult {
	n.t.Helper()
	all := n.command(resume, label)
	if len(all) != 1 {
		n.t.Fatalf("%+v", all)
	}
	return all[0]
}

const (
	keepHost = "allow 0 0"
	keepNone = "allow 2 0"
)

// TestNodePause: the node pauses what a process allows, so that another one's request is met that would fail, and the process has
// its memory again when it ends the consent, or when the node resumes it.
func TestNodePause(t *testing.T) {
	n := newNode(t, broker.Options{})
	trainer, engine := n.process(",node_label:trainer"), n.process(",node_label:engine")
	trainer.must("alloc 1 700")
	if r := n.one(false, "trainer"); !r.Denied || r.Bytes != 0 || !strings.Contains(r.Error, "does not allow it now") || r.PID != trainer.pid() {
		t.Errorf("without consent: %+v", r)
	}
	if r := engine.do("alloc 1 600"); r.code == 0 {
		t.Fatal("memory in use was taken")
	}
	for round, keep := range []string{keepHost, keepNone} {
		trainer.must(keep)
		if r := trainer.do(keep); r.code == 0 || !strings.Contains(r.words, "allowed already") {
			t.Errorf("%+v", r)
		}
		if r := n.one(false, "train*"); r.Error != "" || r.Bytes != 700<<20 {
			t.Errorf("%+v", r)
		}
		if r := n.one(false, "trainer"); r.Error != "" || r.Bytes != 0 {
			t.Errorf("a second time: %+v", r)
		}
		engine.must("alloc 1 600")
		if round == 0 {
			// There is no memory to resume in: all stays paused, whoever asks, until there is.
			if r := n.one(true, "trainer"); r.Error == "" || r.Denied || !strings.Contains(r.Error, "everything stays paused") {
				t.Errorf("%+v", r)
			}
			if r := trainer.do("deny"); r.code == 0 || !strings.Contains(r.words, "out of memory") {
				t.Errorf("%+v", r)
			}
			if r := trainer.do(keep); r.code == 0 || !strings.Contains(r.words, "out of memory") {
				t.Errorf("%+v", r)
			}
			engine.must("free 1")
			engine.must("trim")
			trainer.must("deny")
		} else {
			engine.must("free 1")
			engine.must("trim")
			if r := n.one(true, "trainer"); r.Error != "" || r.Bytes != 700<<20 {
				t.Errorf("%+v", r)
			}
			if r := n.one(true, "trainer"); r.Error != "" || r.Bytes != 0 {
				t.Errorf("a second time: %+v", r)
			}
			trainer.must("deny")
		}
		if s := trainer.must("stats"); s[0] < 700 {
			t.Errorf("%v", s)
		}
		if r := n.one(false, "trainer"); !r.Denied {
			t.Errorf("after the consent has ended: %+v", r)
		}
	}
	if all := n.command(false, "nobody"); len(all) != 0 {
		t.Errorf("%+v", all)
	}
}

// TestNodePauseOfATag: a consent may be for a tag, also one that is not known yet.
func TestNodePauseOfATag(t *testing.T) {
	n := newNode(t, broker.Options{})
	p := n.process(",node_label:x")
	p.must("allow 0 1")
	p.must("alloc 1 100")
	if r := n.one(false, "x"); r.Error != "" || r.Bytes != 0 {
		t.Errorf("nothing has the tag: %+v", r)
	}
	p.must("tag 0 1")
	p.must("alloc 2 200")
	p.must("tag 0 0")
	if r := n.one(false, "x"); r.Error != "" || r.Bytes != 200<<20 {
		t.Errorf("%+v", r)
	}
	p.must("deny")
	if s := p.must("stats"); s[0] < 300 {
		t.Errorf("%v", s)
	}
}

// TestNodePauseIsRefused: what must not be paused is not, with a reason, and nothing is lost.
func TestNodePauseIsRefused(t *testing.T) {
	n := newNode(t, broker.Options{})
	p := n.process(",node_label:x")
	p.must("alloc 1 100")
	p.must(keepHost)
	for _, c := range []struct{ begin, end, why string }{
		{"capture", "captured", "capture"},
		{"watch 0 1", "watch 0 0", "registered a function"},
	} {
		p.must(c.begin)
		if r := n.one(false, "x"); r.Error == "" || r.Denied || !strings.Contains(r.Error, c.why) {
			t.Errorf("%s: %+v", c.begin, r)
		}
		p.must(c.end)
		if s := p.must("stats"); s[0] < 100 {
			t.Errorf("%s: %v", c.begin, s)
		}
	}
	if r := n.one(false, "x"); r.Error != "" || r.Bytes != 100<<20 {
		t.Errorf("%+v", r)
	}
}

// TestNodePauseAndDeath: a process that ends while the node pauses, or a broker that does, costs the others nothing.
func TestNodePauseAndDeath(t *testing.T) {
	n := newNode(t, broker.Options{})
	p := n.process(",node_label:x")
	p.must("alloc 1 100")
	p.must(keepHost)
	p.signal(syscall.SIGSTOP)
	over := make(chan protocol.PauseResult)
	go func() {
		r := protocol.PauseResult{Error: "ended"} // of a client that is gone already
		if all := n.command(false, "x"); len(all) == 1 {
			r = all[0]
		}
		over <- r
	}()
	p.kill() // before it is asked, or while it is
	if r := <-over; !strings.Contains(r.Error, "ended") && !strings.Contains(r.Error, "does not accept") {
		t.Errorf("%+v", r)
	}

	p = n.process(",node_label:x")
	p.must("alloc 1 100")
	p.must(keepHost)
	if r := n.one(false, "x"); r.Error != "" {
		t.Fatalf("%+v", r)
	}
	n.stop()
	p.must("deny") // without the broker
	if s := p.must("stats"); s[0] < 100 {
		t.Errorf("%v", s)
	}
}

// TestNodeAutoPause: a request is met by memory that another process uses, where that lets the broker pause it: not while it must not
// be paused, and not where the process does not answer.
func TestNodeAutoPause(t *testing.T) {
	n := newNode(t, broker.Options{})
	trainer, engine, impatient := n.process(",node_label:trainer"), n.process(",node_label:engine,node_wait:30s"), n.process(",node_label:impatient,node_wait:0s")
	trainer.must("alloc 1 500")
	allowed := func(mib uint64) {
		t.Helper()
		n.until(trainer, "it says what may be paused", func(e protocol.Entry) bool {
			return e.Pausable == mib<<20 && e.Reserved >= mib<<20 // what it has reserved is as old as its status segment
		})
	}
	fails := func(mib int, when string) {
		t.Helper()
		if r := impatient.do("alloc 1 %d", mib); r.code == 0 {
			t.Fatalf("%s: memory in use was taken", when)
		}
	}
	trainer.must(keepHost)
	fails(600, "by command only")
	trainer.must("deny")
	trainer.must("allow 2 0 1")
	allowed(500)
	for _, c := range []struct{ begin, end string }{{"watch 0 1", "watch 0 0"}, {"capture", "captured"}} {
		trainer.must(c.begin)
		fails(600, c.begin)
		trainer.must(c.end)
	}
	child := trainer.must("fork")[0]
	t.Cleanup(func() { _ = syscall.Kill(int(child), syscall.SIGKILL) })
	time.Sleep(time.Second)    // one that could not pause is left alone for so long, and has a child now
	engine.must("alloc 1 400") // the graph's pool keeps 400 MiB
	engine.must("free 1")
	engine.must("trim")
	allowed(0)
	if e := n.entries()[trainer.pid()]; e.Pauses != 1 || e.Paused < 500<<20 || e.Pausable != 0 {
		t.Errorf("%+v", e)
	}
	trainer.must("deny")
	if s := trainer.must("stats"); s[0] < 500 {
		t.Errorf("%v", s)
	}
	fails(400, "after the consent has ended")
	trainer.kill()
	trainer = n.process(",node_label:trainer") // which has not paused yet
	trainer.must("alloc 1 800")
	trainer.must("allow 2 0 1")
	allowed(800)
	trainer.signal(syscall.SIGSTOP)
	r := impatient.do("alloc 1 400")
	trainer.signal(syscall.SIGCONT)
	if r.code == 0 || r.took > 30*time.Second || !strings.Contains(r.words, "did not answer within") {
		t.Errorf("a process that is stopped: %d, %v, %s", r.code, r.took, r.words)
	}
	trainer.must("stats")
}
