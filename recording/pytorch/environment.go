package pytorch

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/identity"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
)

// The environment of a run. PyTorch's snapshots do not say it; `cistern record` adds a key to the snapshot's dict, which
// PyTorch's own tools never look up:
//
//	"cistern": {"torch": "2.11.0+cu130", "cuda": "13.0", "driver": "580.65.06",
//	            "devices": {"0": "NVIDIA H100 80GB HBM3"}, "total_memory": {"0": 85017493504},
//	            "host": "gpu17", "pid": 4711, "variables": {"RANK": "3", "WORLD_SIZE": "8"}}
//
// Every entry is optional. What has another type is passed over: it is a remark on the run, and the run can be read
// without it.

// Keys of the environment's dict.
const (
	keyTorch       = "torch"
	keyCUDA        = "cuda"
	keyDriver      = "driver"
	keyDevices     = "devices"
	keyTotalMemory = "total_memory"
	keyHost        = "host"
	keyPID         = "pid"
	keyVariables   = "variables"
)

const maxEnvironment = 16 // entries; `cistern record` writes 8

// setEnvironment takes an entry of the environment's dict.
func (m *machine) setEnvironment(key uint64, v value) (err error) {
	if len(m.environment) >= maxEnvironment {
		return nil
	}
	if m.environment, err = input.Grow(m.b, m.environment, 24); err == nil {
		m.environment = append(m.environment, setting{uint32(key), none, v})
	}
	return err
}

// environmentOf is what the file says of a device and of the program that used it.
func (m *machine) environmentOf(device int) (e recording.Environment) {
	number := strconv.Itoa(device)
	for _, s := range m.environment {
		switch string(m.strs.get(uint64(s.key))) {
		case keyTorch:
			e.PyTorch = m.environmentText(s.v)
		case keyCUDA:
			e.CUDA = m.environmentText(s.v)
		case keyDriver:
			e.Driver = m.environmentText(s.v)
		case keyDevices:
			e.Device = m.environmentText(m.entry(s.v, number))
		case keyTotalMemory:
			if v := m.entry(s.v, number); v.k == kInt {
				e.DeviceTotal = v.u
			}
		}
	}
	return e
}

// identity is the process's place in its job, nil where it is of none.
func (m *machine) identity() *recording.Identity {
	var host string
	var pid int
	var variables value
	for _, s := range m.environment {
		switch string(m.strs.get(uint64(s.key))) {
		case keyHost:
			host = m.environmentText(s.v)
		case keyPID:
			if s.v.k == kInt && s.v.u <= math.MaxInt32 {
				pid = int(s.v.u)
			}
		case keyVariables:
			variables = s.v
		}
	}
	id := identity.Of(func(name string) string { return m.environmentText(m.entry(variables, name)) }, host, pid)
	if !identity.Known(&id) {
		return nil
	}
	return &id
}

// environmentText is a string, "" where v is none.
func (m *machine) environmentText(v value) string {
	if v.k != kStr {
		return ""
	}
	return tables.EnvironmentText(string(m.strs.get(v.u)))
}

// entry is what a dict inside the environment's has under a key, the last of it; None where it is no dict or has no such
// key.
func (m *machine) entry(dict value, key string) (v value) {
	if dict.k != kSubSettings {
		return value{}
	}
	for _, s := range m.settings {
		if s.parent == uint32(dict.u) && string(m.strs.get(uint64(s.key))) == key {
			v = s.v
		}
	}
	return v
}

// environment writes what is known of the run, if anything is.
func (p *pickler) environment(devices []*recording.Trace) {
	var e recording.Environment // what all devices share
	names, totals := map[string]string{}, map[string]uint64{}
	for _, t := range devices {
		x := &t.Environment
		e = recording.Environment{PyTorch: cmp.Or(e.PyTorch, x.PyTorch), CUDA: cmp.Or(e.CUDA, x.CUDA), Driver: cmp.Or(e.Driver, x.Driver)}
		number := strconv.Itoa(t.Device)
		if x.Device != "" {
			names[number] = x.Device
		}
		if x.DeviceTotal > 0 {
			totals[number] = x.DeviceTotal
		}
	}
	if e == (recording.Environment{}) && len(names)+len(totals) == 0 {
		return
	}
	p.str(known[sEnvironment])
	p.byte(opEmptyDict, opMark)
	for _, x := range []struct{ key, value string }{{keyTorch, e.PyTorch}, {keyCUDA, e.CUDA}, {keyDriver, e.Driver}} {
		if x.value != "" {
			p.str(x.key)
			p.str(x.value)
		}
	}
	if len(names) > 0 {
		p.str(keyDevices)
		writeDict(p, names, p.str)
	}
	if len(totals) > 0 {
		p.str(keyTotalMemory)
		writeDict(p, totals, p.uint)
	}
	p.byte(opSetitems)
}

// writeDict writes a dict of strings to what one writes.
func writeDict[V any](p *pickler, dict map[string]V, one func(V)) {
	p.byte(opEmptyDict, opMark)
	for _, key := range slices.Sorted(maps.Keys(dict)) {
		p.str(key)
		one(dict[key])
	}
	p.byte(opSetitems)
}
