package main

import (
	"context"
	"fmt"
	"github.com/cistern-gpu/cistern/internal/latency"
	"time"

	"github.com/cistern-gpu/cistern/internal/top"
)

// scene is a machine that does not exist, seen by a source that counts what it is asked for: two GPUs, a trainer and a
// server on Cistern, a traced job, another user's process, and one that was stopped.
type scene struct {
	at     time.Time
	looks  int
	step   time.Duration
	wanted []top.Wanted
	change func(n int, l *top.Look)
	closed bool
}

const gib = 1 << 30

func newScene() *scene {
	return &scene{at: time.Date(2026, 3, 1, 18, 5, 10, 0, time.UTC), step: time.Second}
}

func (s *scene) Close() { s.closed = true }

func sceneUUID(n byte) [16]byte { return [16]byte{0x5a, 0xd1, 15: n} }

// Look is the n-th; everything grows a little from one to the next.
func (s *scene) Look(_ context.Context, wanted top.Wanted) top.Look {
	n := uint64(s.looks)
	s.looks++
	s.wanted = append(s.wanted, wanted)
	s.at = s.at.Add(s.step)
	now := s.at
	device := func(ordinal int, gpu byte, reserved, allocated, peak, limit, calls, ooms uint64) top.Device {
		return top.Device{Ordinal: ordinal, UUID: sceneUUID(gpu), Name: "NVIDIA H200", Total: 140 * gib, Reserved: reserved,
			Allocated: allocated, Active: allocated + 64<<20, Cached: reserved - allocated - 64<<20, PeakReserved: peak,
			PeakAllocated: peak - gib, Limit: limit, DriverCalls: calls, Retries: ooms * 2, OOMs: ooms,
			Requests: 1000 * calls, Slow: slowRequests(calls)}
	}
	swell := (n % 7) * gib
	trainer := top.Process{PID: 48213, Start: 900, Name: "python3", Args: []string{"/opt/venv/bin/python3", "train.py", "--lr", "3e-4", "--model", "gpt2-xl"},
		Kind: top.Cistern, Version: "0.5", Conf: "chunk:64MiB,stacks:python", Updated: now.Add(-100 * time.Millisecond), Devices: []top.Device{
			device(0, 0, 62*gib+swell, 50*gib+swell, 71*gib, 80*gib, 1000+12*n, 0), device(1, 1, 20*gib, 19*gib, 24*gib, 0, 500, 0)}}
	server := top.Process{PID: 51177, Start: 950, Name: "VLLM::EngineCore", Args: []string{"VLLM::EngineCore"},
		Kind: top.Cistern, Version: "0.5", Updated: now.Add(-200 * time.Millisecond), Devices: []top.Device{device(0, 1, 90*gib, 84*gib, 96*gib, 100*gib, 40, 3)}}
	traced := top.Process{PID: 733, Start: 20, Name: "rapids-etl", Args: []string{"./rapids-etl", "--in", "s3://bucket/day=1"},
		Kind: top.Traced, Updated: now, Devices: []top.Device{device(0, 0, 6*gib, 6*gib-64<<20, 9*gib, 0, 90*n*n, 0)}}
	stopped := top.Process{PID: 52001, Start: 970, Name: "python3", Args: []string{"python3", "-m", "notebook"},
		Kind: top.Cistern, Version: "0.5", Updated: now.Add(-72 * time.Second), Devices: []top.Device{device(0, 0, 2*gib, gib, 2*gib, 0, 77, 0)}}
	if wanted.Of(trainer.PID) {
		trainer.Devices[0].Details = sceneDetails(0)
		trainer.Devices[1].Details = sceneDetails(1)
	}
	l := top.Look{At: now, Processes: []top.Process{trainer, server, traced, stopped}, Unreadable: 2,
		Programs: map[int]top.Program{60123: {Start: 990, Name: "python", Args: []string{"python", "-c", "import torch"}}},
		Cards: []top.Card{
			{UUID: sceneUUID(0), Index: 0, Name: "NVIDIA H200", Total: 140 * gib, Known: true, Used: 90*gib + swell, Free: 50*gib - swell, Utilization: 87,
				Holders: []top.Holder{{PID: 48213, Bytes: 62*gib + swell + 500<<20, Known: true}, {PID: 733, Bytes: 7 * gib, Known: true},
					{PID: 52001, Bytes: 2*gib + 480<<20, Known: true}, {PID: 60123, Bytes: 17 * gib, Known: true}}},
			{UUID: sceneUUID(1), Index: 1, Name: "NVIDIA H200", Total: 140 * gib, Known: true, Used: 112 * gib, Free: 28 * gib, Utilization: 100,
				Holders: []top.Holder{{PID: 48213, Bytes: 20*gib + 480<<20, Known: true}, {PID: 51177, Bytes: 91 * gib, Known: true}}}}}
	if s.change != nil {
		s.change(int(n), &l)
	}
	return l
}

func sceneDetails(device uint64) *top.Details {
	d := &top.Details{
		Tags:      []top.Use{{Name: "weights", Blocks: 290, Bytes: 24 * gib}, {Name: "optimizer", Blocks: 580, Bytes: (20 - device) * gib}, {Blocks: 12, Bytes: 300 << 20}},
		Libraries: []top.Use{{Name: "torch", Blocks: 860, Bytes: 40 * gib}, {Name: "cupy", Blocks: 22, Bytes: 4 * gib}},
		Pools:     []top.Use{{Name: "default", Blocks: 882, Bytes: 44 * gib}},
	}
	for i := range 30 {
		d.Stacks = append(d.Stacks, top.Use{Name: fmt.Sprintf("forward /srv/jobs/gpt2/model.py:%d\nstep /srv/jobs/gpt2/train.py:90\nmain /srv/jobs/gpt2/train.py:120", 10+i),
			Blocks: int64(i + 1), Bytes: uint64(30-i) << 28})
	}
	return d
}

// slowRequests is what that many requests took which called the driver.
func slowRequests(calls uint64) (h latency.Histogram) {
	for i := range calls {
		h.Add(50 + 10*i)
	}
	return h
}
