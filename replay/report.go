package replay

import (
	"github.com/cistern-gpu/cistern/recording"
)

// Report is one trace under several policies. Its JSON is part of the command's contract.
type Report struct {
	Path       string           `json:"path"`
	Device     int              `json:"device"`
	Owner      *recording.Owner `json:"process,omitempty"` // of a driver trace with several processes on the device
	Format     string           `json:"format"`
	Events     int              `json:"events"`
	Streams    int              `json:"streams"`
	DurationUS int64            `json:"duration_us"`
	PeakLive   uint64           `json:"peak_live_bytes"`
	Recorded   Recorded         `json:"recorded"`
	Notes      []string         `json:"notes"`
	Results    []*Result        `json:"results"`
	Verify     *Verify          `json:"verify,omitempty"`
	Warning    string           `json:"warning"` // why the replays say nothing of the run, "" where they do
	// Environment is what the run was recorded with.
	Environment recording.Environment `json:"environment,omitzero"`
}

// Reports is what `cistern replay --json` prints.
type Reports struct {
	Traces []*Report `json:"traces"`
}

// Replay runs the policies over a trace, one after the other. With Options.Verify, PyTorch's model with the trace's
// own settings is held against the record: the run of a policy that is just that, or one more that has no Result.
// Options.Record takes what the last policy does. Progress goes from 0 to the number of events for each run.
func Replay(t *recording.Trace, specs []Spec, opt Options) (*Report, error) {
	return NewPlan(t).Replay(specs, opt)
}

// Replay is the function Replay for a plan.
func (p *Plan) Replay(specs []Spec, opt Options) (*Report, error) {
	t := p.Trace
	rep := &Report{Path: t.Path, Device: t.Device, Owner: t.Owner, Format: t.Format, Events: len(t.Events), Streams: len(t.Streams),
		DurationUS: p.DurationUS(), PeakLive: p.PeakLive, Recorded: p.Recorded, Notes: []string{}, Results: []*Result{},
		Environment: t.Environment}
	rep.note(t.Notes...)
	rep.note(p.Notes...)
	record := opt.Record
	opt.Record = nil
	for i, spec := range specs {
		if i == len(specs)-1 {
			opt.Record = record
		}
		r, err := p.Run(spec, opt)
		if err != nil {
			return nil, err
		}
		rep.add(r)
	}
	if opt.Verify && rep.Verify == nil {
		opt.Record = nil
		r, err := p.Run(Spec{Name: "torch"}, opt)
		if err != nil {
			return nil, err
		}
		rep.note(r.Notes...)
		rep.Verify = r.Verify
		if r.Verify == nil {
			rep.note("verify: only a PyTorch snapshot says what its allocator did: nothing was compared")
		}
	}
	for _, r := range rep.Results {
		if r.Policy == "torch" && r.TiesModelled {
			rep.note("torch: segments lie at made-up, rising addresses, so that best-fit ties are modelled")
			break
		}
	}
	return rep, nil
}

func (rep *Report) add(r *Result) {
	rep.Results = append(rep.Results, r)
	rep.note(r.Notes...)
	if rep.Verify == nil {
		rep.Verify = r.Verify
	}
}

// note adds lines that are not there yet.
func (rep *Report) note(lines ...string) {
	for _, s := range lines {
		seen := false
		for _, n := range rep.Notes {
			seen = seen || n == s
		}
		if !seen {
			rep.Notes = append(rep.Notes, s)
		}
	}
}

// OK reports whether a comparison found no difference; true where nothing was compared.
func (v *Verify) OK() bool {
	return v == nil || v.Matched == v.Recorded && v.PlacementsMatched == v.Placements && v.FirstMismatch == nil
}
