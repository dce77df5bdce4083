package deadline

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A process that is stopped for long while it waits has the time for it all the same.
func TestStoppedMeanwhile(t *testing.T) {
	for _, c := range []struct {
		apart time.Duration // of two looks
		looks int
	}{{time.Hour, 20}, {Step, 20}, {10 * time.Millisecond, 100}} {
		d := Deadline{Limit: time.Second}
		if d.Begun() {
			t.Error("begun before the first look")
		}
		now := time.Now()
		n := 0
		for ; d.Left(now) > 0; n++ {
			now = now.Add(c.apart)
		}
		if n != c.looks || !d.Begun() {
			t.Errorf("over after %d looks that were %v apart; want %d", n, c.apart, c.looks)
		}
	}
}

func TestPoll(t *testing.T) {
	d := Deadline{Limit: time.Hour}
	if calls := 0; !d.Poll(func() bool { calls++; return calls == 3 }) || calls != 3 {
		t.Errorf("%d calls", calls)
	}
	d = Deadline{Limit: time.Millisecond}
	if d.Poll(func() bool { return false }) || d.Left(time.Now()) > 0 {
		t.Error("it ended before its time")
	}
	if (&Deadline{}).Poll(func() bool { return true }) {
		t.Error("the zero value is not over")
	}
}

func TestWithTimeout(t *testing.T) {
	ctx, cancel := WithTimeout(20 * time.Millisecond)
	<-ctx.Done()
	if err := context.Cause(ctx); err != context.DeadlineExceeded || ctx.Spent() >= 20*time.Millisecond {
		t.Errorf("%v after %v", err, ctx.Spent())
	}
	cancel()
	ctx, cancel = WithTimeout(time.Hour)
	cancel()
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestEvent(t *testing.T) {
	var e Event
	if e.IsSet() || e.Wait(time.Millisecond) {
		t.Error("it has happened before Set")
	}
	var over [4]chan bool
	for i := range over {
		over[i] = make(chan bool)
		go func() { over[i] <- e.Wait(time.Hour) }()
	}
	e.Set()
	for i := range over {
		if !<-over[i] {
			t.Error("a wait ended without the event")
		}
	}
	if !e.IsSet() || !e.Wait(0) {
		t.Error("it has not happened after Set")
	}
}
