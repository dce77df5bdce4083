//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"encoding/json"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

//export coreGetStats
func coreGetStats(d C.int, out *C.cistern_stats) (code C.int) {
	defer caught(&code)
	l, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	if dev == nil { // nothing was ever asked of it
		out.limit = C.uint64_t(l.Options().Limit)
		return C.CISTERN_OK
	}
	s := dev.Views.Stats()
	out.allocations = groupedOf(s.Allocations)
	out.active = groupedOf(s.Active)
	out.inactive = groupedOf(s.Inactive)
	out.segments = groupedOf(s.Segments)
	out.requested = groupedOf(s.Requested)
	out.allocated = groupedOf(s.Allocated)
	out.active_bytes = groupedOf(s.ActiveBytes)
	out.inactive_bytes = groupedOf(s.InactiveBytes)
	out.reserved = groupedOf(s.Reserved)
	out.limit = C.uint64_t(dev.Limit())
	out.spare_bytes = C.uint64_t(s.SpareBytes)
	out.address_bytes = C.uint64_t(s.AddressBytes)
	out.remaps = C.int64_t(s.Remaps)
	out.device_allocs = C.int64_t(s.DeviceAllocs)
	out.device_frees = C.int64_t(s.DeviceFrees)
	out.retries = C.int64_t(s.Retries)
	out.ooms = C.int64_t(s.OOMs)
	out.by_fit = C.int64_t(s.ByFit)
	out.by_collect = C.int64_t(s.ByCollect)
	out.by_remap = C.int64_t(s.ByRemap)
	out.by_grow = C.int64_t(s.ByGrow)
	out.by_lend = C.int64_t(s.ByLend)
	out.by_callback = C.int64_t(s.ByCallback)
	out.stream_syncs = C.int64_t(s.StreamSyncs)
	out.by_spill = C.int64_t(s.BySpill)
	out.paused = valueOf(s.Paused.All)
	out.borrows = C.int64_t(s.Borrows)
	out.by_node = C.int64_t(s.ByNode)
	out.imported_bytes = C.uint64_t(s.ImportedBytes)
	return C.CISTERN_OK
}

func groupedOf(g memory.Grouped) C.cistern_grouped {
	return C.cistern_grouped{all: valueOf(g.All), small: valueOf(g.Small), large: valueOf(g.Large)}
}

func valueOf(v memory.Value) C.cistern_value {
	return C.cistern_value{current: C.int64_t(v.Current), peak: C.int64_t(v.Peak), added: C.int64_t(v.Added),
		removed: C.int64_t(v.Removed)}
}

// The JSON has the names of cistern_stats.
type (
	valueJSON struct {
		Current int64 `json:"current"`
		Peak    int64 `json:"peak"`
		Added   int64 `json:"added"`
		Removed int64 `json:"removed"`
	}
	groupedJSON struct {
		All   valueJSON `json:"all"`
		Small valueJSON `json:"small"`
		Large valueJSON `json:"large"`
	}
	deviceJSON struct {
		Device        int         `json:"device"`
		Name          string      `json:"name"`
		Allocations   groupedJSON `json:"allocations"`
		Active        groupedJSON `json:"active"`
		Inactive      groupedJSON `json:"inactive"`
		Segments      groupedJSON `json:"segments"`
		Requested     groupedJSON `json:"requested"`
		Allocated     groupedJSON `json:"allocated"`
		ActiveBytes   groupedJSON `json:"active_bytes"`
		InactiveBytes groupedJSON `json:"inactive_bytes"`
		Reserved      groupedJSON `json:"reserved"`
		Limit         uint64      `json:"limit"`
		SpareBytes    uint64      `json:"spare_bytes"`
		AddressBytes  uint64      `json:"address_bytes"`
		Remaps        int64       `json:"remaps"`
		DeviceAllocs  int64       `json:"device_allocs"`
		DeviceFrees   int64       `json:"device_frees"`
		Retries       int64       `json:"retries"`
		OOMs          int64       `json:"ooms"`
		ByFit         int64       `json:"by_fit"`
		ByCollect     int64       `json:"by_collect"`
		ByRemap       int64       `json:"by_remap"`
		ByGrow        int64       `json:"by_grow"`
		ByLend        int64       `json:"by_lend"`
		ByCallback    int64       `json:"by_callback"`
		StreamSyncs   int64       `json:"stream_syncs"`
		BySpill       int64       `json:"by_spill"`
		Paused        valueJSON   `json:"paused"`
		Borrows       int64       `json:"borrows"`
		ByNode        int64       `json:"by_node"`
		ImportedBytes uint64      `json:"imported_bytes"`
		Tags          []tagJSON   `json:"tags"`
		Libraries     []useJSON   `json:"libraries"`
		Pools         []poolJSON  `json:"pools"`
	}
	// tagJSON is what the live allocations under one tag add up to.
	tagJSON struct {
		Name        string `json:"name"`
		Allocations int64  `json:"allocations"`
		Requested   uint64 `json:"requested"`
		Allocated   uint64 `json:"allocated"`
	}
	// useJSON is what the live allocations of one library add up to.
	useJSON struct {
		Library   string `json:"library"`
		Blocks    int64  `json:"blocks"`
		Requested uint64 `json:"requested"`
		Allocated uint64 `json:"allocated"`
	}
	// poolJSON is cistern_pool_stats.
	poolJSON struct {
		Pool         [2]uint64 `json:"pool"`
		Upstream     string    `json:"upstream"`
		Reserved     uint64    `json:"reserved"`
		PeakReserved uint64    `json:"peak_reserved"`
		Requested    uint64    `json:"requested"`
		Allocated    uint64    `json:"allocated"`
		Cached       uint64    `json:"cached"`
		Paused       uint64    `json:"paused"`
		Spilled      uint64    `json:"spilled"`
		Limit        uint64    `json:"limit"`
		Blocks       int64     `json:"blocks"`
	}
	statsJSON struct {
		Version  string       `json:"version"`
		Settings string       `json:"settings"`
		Devices  []deviceJSON `json:"devices"`
	}
)

func groupJSON(g memory.Grouped) groupedJSON {
	return groupedJSON{valueJSON(g.All), valueJSON(g.Small), valueJSON(g.Large)}
}

func tagsOf(dev *engine.Device) []tagJSON {
	out := []tagJSON{}
	for _, u := range dev.Views.TagUsage() {
		if u.Tag != 0 {
			out = append(out, tagJSON{tagText(u.Tag), u.Blocks, u.Requested, u.Allocated})
		}
	}
	return out
}

func librariesOf(dev *engine.Device) []useJSON {
	out := []useJSON{}
	for _, u := range libraryUsage(dev) {
		out = append(out, useJSON{libraryText(uint8(u.library)), int64(u.blocks), uint64(u.requested), uint64(u.allocated)})
	}
	return out
}

func (l *library) poolsOf(dev *engine.Device) []poolJSON {
	out := []poolJSON{}
	seen := map[memory.PoolID]bool{}
	for _, id := range dev.Views.Pools() { // those that were released as well, whose names may be in use again
		p, ok := dev.Pool(id)
		if !ok || seen[id] {
			continue
		}
		seen[id] = true
		s := p.Stats()
		out = append(out, poolJSON{id, l.upstreamOf(dev, p), s.Reserved, s.PeakReserved, s.Requested, s.Allocated, s.Cached, s.Paused,
			s.Spilled, s.Limit, s.Blocks})
	}
	return out
}

//export coreStatsJSON
func coreStatsJSON() (text *C.char) {
	var code C.int
	defer caught(&code)
	l, err := started()
	if err != nil {
		fail(err)
		return nil
	}
	all := statsJSON{Version: cistern.Version, Settings: l.Options().String(), Devices: []deviceJSON{}}
	for i := range l.devices {
		dev, ok := l.Started(cuda.Device(i))
		if !ok {
			continue
		}
		s := dev.Views.Stats()
		all.Devices = append(all.Devices, deviceJSON{
			Device:        i,
			Name:          dev.Info().Name,
			Allocations:   groupJSON(s.Allocations),
			Active:        groupJSON(s.Active),
			Inactive:      groupJSON(s.Inactive),
			Segments:      groupJSON(s.Segments),
			Requested:     groupJSON(s.Requested),
			Allocated:     groupJSON(s.Allocated),
			ActiveBytes:   groupJSON(s.ActiveBytes),
			InactiveBytes: groupJSON(s.InactiveBytes),
			Reserved:      groupJSON(s.Reserved),
			Limit:         dev.Limit(),
			SpareBytes:    s.SpareBytes,
			AddressBytes:  s.AddressBytes,
			Remaps:        s.Remaps,
			DeviceAllocs:  s.DeviceAllocs,
			DeviceFrees:   s.DeviceFrees,
			Retries:       s.Retries,
			OOMs:          s.OOMs,
			ByFit:         s.ByFit,
			ByCollect:     s.ByCollect,
			ByRemap:       s.ByRemap,
			ByGrow:        s.ByGrow,
			ByLend:        s.ByLend,
			ByCallback:    s.ByCallback,
			StreamSyncs:   s.StreamSyncs,
			BySpill:       s.BySpill,
			Paused:        valueJSON(s.Paused.All),
			Borrows:       s.Borrows,
			ByNode:        s.ByNode,
			ImportedBytes: s.ImportedBytes,
			Tags:          tagsOf(dev),
			Libraries:     librariesOf(dev),
			Pools:         l.poolsOf(dev),
		})
	}
	data, err := json.Marshal(&all)
	if err != nil {
		fail(err)
		return nil
	}
	return C.CString(string(data))
}

//export coreResetPeaks
func coreResetPeaks(d C.int) (code C.int) {
	defer caught(&code)
	_, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	if dev != nil {
		dev.Views.ResetPeaks()
	}
	return C.CISTERN_OK
}

//export coreResetAccumulated
func coreResetAccumulated(d C.int) (code C.int) {
	defer caught(&code)
	_, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	if dev != nil {
		dev.Views.ResetAccumulated()
	}
	return C.CISTERN_OK
}
