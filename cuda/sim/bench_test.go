package sim

import (
	"fmt"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

func benchLevels(b *testing.B, f func(b *testing.B, check CheckLevel)) {
	for _, l := range []CheckLevel{CheckNone, CheckUse, CheckOrder} {
		b.Run([]string{"none", "use", "order"}[l], func(b *testing.B) { f(b, l) })
	}
}

// One cross-stream handover: record, wait on the other stream, query.
func BenchmarkEvents(b *testing.B) {
	benchLevels(b, func(b *testing.B, check CheckLevel) {
		d := New(Options{Check: check})
		s, o := d.NewStreamNonBlocking(0), d.NewStreamNonBlocking(0)
		e := must[cuda.Event](b)(d.EventCreate(0))
		b.ReportAllocs()
		for b.Loop() {
			_ = d.EventRecord(0, e, s)
			_ = d.StreamWaitEvent(0, o, e)
			_, _ = d.EventQuery(0, e)
		}
	})
}

func BenchmarkEventCreateDestroy(b *testing.B) {
	d := New(Options{})
	d.NewStream(0)
	b.ReportAllocs()
	for b.Loop() {
		e, _ := d.EventCreate(0)
		_ = d.EventDestroy(0, e)
	}
}

// Use of one block of 64 KiB in a chunk of 20 MiB that other blocks fill.
func BenchmarkUse(b *testing.B) {
	benchLevels(b, func(b *testing.B, check CheckLevel) {
		d := New(Options{Check: check})
		s := d.NewStream(0)
		p := must[cuda.Ptr](b)(d.AddressReserve(gib, 0, 0))
		for i := range cuda.Ptr(50) {
			chunkAt(b, d, p+i*20*mib, 20*mib)
		}
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			_ = d.Use(0, s, p+cuda.Ptr(i*7919%16000)<<16, 1<<16)
			i++
		}
		if err := d.Fault(); err != nil {
			b.Fatal(err)
		}
	})
}

// Every 512 bytes of a chunk of 1 GiB used in turn, with nothing that the host has seen complete: the worst the order
// checker can meet.
func BenchmarkUseFine(b *testing.B) {
	d := New(Options{Check: CheckOrder})
	s := d.NewStream(0)
	p := must[cuda.Ptr](b)(d.AddressReserve(gib, 0, 0))
	chunkAt(b, d, p, gib)
	i := 0
	for b.Loop() {
		_ = d.Use(0, s, p+cuda.Ptr(i*7919%(gib/512))*512, 512)
		i++
	}
}

func BenchmarkMapUnmap(b *testing.B) {
	for _, size := range []uint64{2 * mib, 64 * mib, gib} {
		b.Run(fmt.Sprintf("%dMiB", size/mib), func(b *testing.B) {
			d := New(Options{Check: CheckUse})
			p := must[cuda.Ptr](b)(d.AddressReserve(gib, 0, 0))
			h := must[cuda.Handle](b)(d.MemCreate(size, cuda.MemProp{}))
			dev := []cuda.Device{0}
			b.ReportAllocs()
			for b.Loop() {
				ok(b, d.MemMap(p, size, h))
				ok(b, d.MemSetAccess(p, size, dev))
				ok(b, d.MemUnmap(p, size))
			}
		})
	}
}

// Four goroutines, each with its own streams and event.
func BenchmarkEventsParallel(b *testing.B) {
	d := New(Options{})
	d.NewStream(0)
	b.SetParallelism(2)
	b.RunParallel(func(pb *testing.PB) {
		s, o := d.NewStreamNonBlocking(0), d.NewStreamNonBlocking(0)
		e, _ := d.EventCreate(0)
		for pb.Next() {
			_ = d.EventRecord(0, e, s)
			_ = d.StreamWaitEvent(0, o, e)
			_, _ = d.EventQuery(0, e)
		}
	})
}
