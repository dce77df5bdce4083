package cistern

import (
	"reflect"

	"github.com/cistern-gpu/cistern/cuda"
)

// SetStretch makes little memory several stretches, until the function that it returns is called.
func SetStretch(bytes uint64) (restore func()) {
	old := stretch
	stretch = bytes
	return func() { stretch = old }
}

// CountEveryCall calls every function of a driver that fails everywhere, as a device does, and says what each counted as.
func CountEveryCall(driver reflect.Type) map[string]uint64 {
	out := map[string]uint64{}
	for i := range driver.NumMethod() {
		c := &counted{}
		m := reflect.ValueOf(c).MethodByName(driver.Method(i).Name)
		args := make([]reflect.Value, m.Type().NumIn())
		for k := range args {
			args[k] = reflect.Zero(m.Type().In(k))
		}
		func() {
			defer func() { recover() }() // there is no driver
			m.Call(args)
		}()
		out[driver.Method(i).Name] = c.calls.Load()
	}
	return out
}

var _ cuda.Driver = (*counted)(nil)

// Awaits reports whether somebody waits for another thread that is telling of memory.
func Awaits(d *Device) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.told != nil
}

// HoldDevice locks a device as a request does that is on the ladder, until the function that it returns is called.
func HoldDevice(d *Device) (letGo func()) {
	d.mu.Lock()
	return d.mu.Unlock
}

// CaptureBlocked reports whether a capture waits until it can be announced on the device.
func CaptureBlocked(d *Device) bool {
	d.gate.mu.Lock()
	defer d.gate.mu.Unlock()
	return d.gate.blocked > 0
}
