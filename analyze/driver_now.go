package analyze

import "github.com/cistern-gpu/cistern/recording/driver"

// What a run of the driver's calls amounts to at this moment, while it goes on.

// Requested is what was asked for on the device and not given back.
func (d *DriverDevice) Requested() uint64 { return d.requested }

// Held calls f for all memory that is held now, in no order. f must not keep what it is given.
func (r *DriverRun) Held(f func(h *driver.Holding)) { r.tracker.Held(f) }
