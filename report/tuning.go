package report

import (
	"fmt"
	"io"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/units"
)

// WriteTuning writes what a search of settings found: the frontier, the recommendation and the smallest capacities.
func WriteTuning(w io.Writer, tn *analyze.Tuning, s Style) {
	writeTitle(w, s, tn.Path, tn.Device, tn.Owner, tn.Format, tn.Environment)
	limit := "no limit"
	if tn.Capacity > 0 {
		limit = fmt.Sprintf("limit %s (%s)", units.FormatBytes(tn.Capacity), clean(tn.CapacityFrom))
	}
	writeWrapped(w, "  ", fmt.Sprintf("%s over %s; peak live %s; %s; %s tried", plural(tn.Events, "event"),
		microseconds(float64(tn.DurationUS)), units.FormatBytes(tn.PeakLive), limit, plural(len(tn.Choices), "setting")), s)

	fmt.Fprintln(w)
	writeWrapped(w, "  ", s.paint("no other setting tried beats these in memory, driver time and syncs at once", bold), s)
	g := grid{head: []string{"setting", "peak reserved", "ratio", "driver time", "syncs", "retries", "survives"}, textFrom: 6}
	row := func(name string, c *analyze.Choice, mark string) {
		style := green
		if !c.Holds {
			style = red
		}
		if mark != "" {
			name += " (" + mark + ")"
		}
		g.add(name, units.FormatBytes(c.Result.Odds.PeakMost), fmt.Sprintf("%.3f", c.Result.Ratio),
			driverTime(c.Result), number(c.Syncs()), number(c.Result.Retries), s.paint(c.Result.Odds.String(), style))
	}
	ownShown := false
	for i := range tn.Choices {
		c := &tn.Choices[i]
		isOwn := c.AllocConf == tn.Own.AllocConf
		isBest := tn.Best != nil && c.AllocConf == tn.Best.AllocConf
		if !c.Frontier && !isOwn && !isBest {
			continue
		}
		mark := ""
		switch {
		case isOwn && isBest:
			mark = "as recorded, best"
		case isOwn:
			mark = "as recorded"
		case isBest:
			mark = "best"
		case !c.Verified:
			mark = "model not checked against recordings"
		}
		ownShown = ownShown || isOwn
		row(confName(c.AllocConf), c, mark)
	}
	if !ownShown {
		row(confName(tn.Own.AllocConf), tn.Own, "as recorded")
	}
	if tn.Cistern != nil {
		g.rows = append(g.rows, make([]string, len(g.head)))
		row("cistern", tn.Cistern, "instead of PyTorch's allocator")
	}
	g.write(w, s)

	fmt.Fprintln(w)
	switch b := tn.Best; {
	case tn.Warning != "":
		writeWarning(w, tn.Warning, s)
	case b == nil:
		fmt.Fprintf(w, "%s: %s\n", s.paint("best", bold), tn.Why)
	case b.AllocConf == tn.Own.AllocConf:
		fmt.Fprintf(w, "%s: the recorded settings (%s)\n", s.paint("best", bold), confName(b.AllocConf))
		writeWrapped(w, "  ", "  "+tn.Why, s)
	default:
		fmt.Fprintf(w, "%s: %s\n", s.paint("best", bold), confName(b.AllocConf))
		set := tn.BestSetting()
		writeShell(w, "  ", set.Do(), set.ByVersion(), s)
		writeWrapped(w, "  ", "  "+tn.Why, s)
	}
	if tn.Best != nil {
		for _, line := range tn.Best.Breaks {
			writeWrapped(w, "    ", "  - "+line, s)
		}
	}

	if len(tn.Floors) > 0 {
		writeFloors(w, tn, s)
	}
	for i := range tn.Thresholds {
		writeThresholds(w, &tn.Thresholds[i], s)
	}
	writeNotes(w, tn.Notes, s)
	fmt.Fprintln(w)
}

func writeFloors(w io.Writer, tn *analyze.Tuning, s Style) {
	fmt.Fprintf(w, "\n%s\n", s.paint("smallest memory limit with which the run survives", bold))
	g := grid{head: []string{"with", "smallest limit", "over peak live", "survives", "with less"}, textFrom: 3, optional: []string{"over peak live"}}
	for _, f := range tn.Floors {
		who := map[string]string{"own": "the recorded settings", "best": "the best settings",
			"least": "the settings that need least", "cistern": "cistern"}[f.Who]
		if f.Who != "cistern" {
			who += " (" + confName(f.AllocConf) + ")"
		}
		less := ""
		if f.Below != nil {
			less = fmt.Sprintf("%s at %s", f.Below.Odds, units.FormatBytes(f.Below.Capacity))
		}
		g.add(who, units.FormatBytes(f.Capacity), fmt.Sprintf("%.3f", f.Ratio), f.Odds.String(), less)
	}
	g.write(w, s)
}

func confName(conf string) string {
	if conf == "" {
		return "PyTorch's defaults"
	}
	return clean(conf)
}

// writeThresholds writes the frontier of memory against driver time, and what to set.
func writeThresholds(w io.Writer, t *analyze.Thresholds, s Style) {
	fmt.Fprintln(w)
	writeWrapped(w, "  ", s.paint("free memory that "+t.Policy+" keeps: no other threshold tried beats these in memory and time at once", bold), s)
	g := grid{head: []string{"threshold", "mean reserved", "peak reserved", "driver time", "p99.9 of a request", "longest"},
		optional: []string{"longest", "p99.9 of a request"}}
	for i := range t.Tried {
		x := &t.Tried[i]
		best := t.Best != nil && x.Conf == t.Best.Conf
		if !x.Frontier && !best && x.Conf != "" {
			continue
		}
		name := x.Conf
		switch {
		case best:
			name += " (recommended)"
		case x.Conf == "":
			name = "none"
		}
		r := x.Result
		g.add(name, units.FormatBytes(r.MeanReserved), units.FormatBytes(r.PeakReserved), driverTime(r), microseconds(r.Requests.P999),
			microseconds(r.Requests.Max))
	}
	g.write(w, s)
	switch {
	case t.Best == nil:
		fmt.Fprintf(w, "%s: no threshold\n", s.paint("recommended", bold))
	case t.Policy == "cistern":
		fmt.Fprintf(w, "%s: CISTERN_CONF=%s\n", s.paint("recommended", bold), t.Best.Conf)
	default:
		fmt.Fprintf(w, "%s: cudaMemPoolAttrReleaseThreshold %s\n", s.paint("recommended", bold), units.FormatBytes(t.Best.Bytes))
	}
	writeWrapped(w, "  ", "  "+t.Why, s)
}
