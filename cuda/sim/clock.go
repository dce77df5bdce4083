package sim

import "time"

// clock is the host's clock in virtual time, which begins at 0. Protected by Driver.mu.
type clock struct {
	now   time.Duration
	real  bool
	began time.Time     // of the wall clock, where real
	skip  time.Duration // waits that were skipped over, where real
}

func (c *clock) start(real bool) {
	c.real = real
	if real {
		c.began = time.Now()
	}
}

// read is the host's time.
func (c *clock) read() time.Duration {
	if c.real {
		c.now = max(c.now, time.Since(c.began)+c.skip)
	}
	return c.now
}

// reached reports whether the host's time is t or later; the wall clock is read only where that could matter.
func (c *clock) reached(t time.Duration) bool {
	return t <= c.now || c.real && t <= c.read()
}

// advanceTo moves the clock forward to t; it never goes back.
func (c *clock) advanceTo(t time.Duration) {
	if t <= c.read() {
		return
	}
	c.skip += t - c.now
	c.now = t
}

// Now is the host's clock, since New.
func (d *Driver) Now() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.clock.read()
}

// AdvanceTo moves the host's clock to t, if that lies ahead.
func (d *Driver) AdvanceTo(t time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock.advanceTo(t)
}

// Advance moves the host's clock forward by dt.
func (d *Driver) Advance(dt time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock.advanceTo(d.clock.read() + dt)
}

// SetLag changes Options.Lag for work queued from now on.
func (d *Driver) SetLag(lag time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opt.Lag = max(lag, 0)
}

// waitFor is a synchronising call's wait until t. d.mu is held.
func (d *Driver) waitFor(t time.Duration) {
	if now := d.clock.read(); t > now {
		d.waited += t - now
		d.spent += t - now
		d.clock.advanceTo(t)
	}
}
