package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
)

// What `cistern fleet` writes of a job: the rank that sets the limit first, then what stands out, then ranks and groups. It fits
// 80 columns, and says nothing by colour alone.

const (
	fleetWidth  = 80
	fleetRanks  = 8 // with least headroom
	fleetGroups = 8
)

// causeWords are causes in words.
var causeWords = map[string]string{
	fleet.CauseUsed: "used memory", fleet.CauseFragmentation: "fragmentation", fleet.CauseCached: "cached memory",
	fleet.CauseOutside: "memory outside the allocator", fleet.CauseGrowth: "growth from step to step",
}

// WriteFleet writes what is known of a job.
func WriteFleet(w io.Writer, a *fleet.Answer, s Style) {
	s.Width = fleetWidth
	f := fleetText{w, s, a}
	f.head()
	if a.Limit != nil {
		f.limit(a.Limit)
	}
	f.findings()
	f.need()
	f.ranks()
	f.groups()
	if a.Tuning != nil {
		f.tuning(a.Tuning)
	}
}

// writeIdentity writes which process of a job a recording is of, where it is of one.
func writeIdentity(w io.Writer, s Style, id *recording.Identity) {
	if id == nil {
		return
	}
	var parts []string
	if id.Job != "" {
		parts = append(parts, "job "+id.Job)
	}
	if id.Rank >= 0 {
		rank := fmt.Sprintf("rank %d", id.Rank)
		if id.World > 0 {
			rank += fmt.Sprintf(" of %d", id.World)
		}
		parts = append(parts, rank)
	}
	for _, dim := range slices.Sorted(maps.Keys(id.Coordinates)) {
		parts = append(parts, fmt.Sprintf("%s %d", dim, id.Coordinates[dim]))
	}
	if id.Restart > 0 {
		parts = append(parts, fmt.Sprintf("restart %d", id.Restart))
	}
	if id.Node != "" {
		parts = append(parts, "node "+id.Node)
	}
	writeWrapped(w, "  ", clean(strings.Join(parts, ", ")), s)
}

type fleetText struct {
	w io.Writer
	s Style
	a *fleet.Answer
}

func (f *fleetText) wrap(indent, line string) { writeWrapped(f.w, indent, line, f.s) }

func (f *fleetText) head() {
	a := f.a
	job := "job " + cmp.Or(clean(a.Job), "without a name")
	if a.Launcher != "" {
		job += " (" + a.Launcher + ")"
	}
	ranks := plural(len(a.Ranks), "rank")
	if a.World > 0 && a.World != len(a.Ranks) {
		ranks += " of " + number(a.World)
	}
	f.wrap("  ", fmt.Sprintf("%s: %s on %s, %s", f.s.paint(job, bold), ranks, plural(a.Nodes, "node"), plural(a.Steps, "step")))
	var with []string
	with = append(with, a.GPUs...)
	for _, v := range a.PyTorch {
		with = append(with, "PyTorch "+v)
	}
	if len(with) > 0 {
		f.wrap("  ", clean(strings.Join(with, ", ")))
	}
	fmt.Fprintln(f.w)
}

// limit is the rank that sets the limit, and why.
func (f *fleetText) limit(r *fleet.RankAnswer) {
	what := fmt.Sprintf("has least headroom, %s of %s", units.FormatBytes(uint64(max(0, r.Headroom))), units.FormatBytes(r.Total))
	if r.Failure != nil {
		left := fmt.Sprintf("%s free of %s", units.FormatBytes(r.Failure.Free), units.FormatBytes(r.Total))
		if r.Limit > 0 && r.Failure.Reserved+r.Failure.Free > r.Limit {
			left = fmt.Sprintf("%s left of its limit of %s", units.FormatBytes(r.Limit-min(r.Limit, r.Failure.Reserved)), units.FormatBytes(r.Limit))
		}
		what = fmt.Sprintf("ran out of memory at step %s: it requested %s with %s", number(r.Failure.Step), units.FormatBytes(r.Failure.Requested), left)
	}
	f.wrap("  ", f.s.paint(rankName(r)+" sets the limit", red)+": it "+what+".")
	why := "Most is " + causeWords[r.Cause] + "."
	if r.Twins > 0 {
		why = "It needs what its twins need; most is " + causeWords[r.Cause] + "."
	}
	switch {
	case r.Cause == fleet.CauseGrowth:
		why = fmt.Sprintf("Its allocated memory grows by %s a step.", units.FormatBytes(uint64(r.Growth)))
	case r.Excess > 0:
		why = fmt.Sprintf("The cause is %s: %s more than its twins.", causeWords[r.Cause], units.FormatBytes(uint64(r.Excess)))
	}
	f.wrap("  ", "  "+why)
	p := &r.Parts
	f.wrap("  ", fmt.Sprintf("  Used %s, fragmentation %s, cached %s, outside the allocator %s, free %s.", units.FormatBytes(p.Used), units.FormatBytes(p.Split),
		units.FormatBytes(p.Cached), units.FormatBytes(p.Outside), units.FormatBytes(p.Free)))
	if r.Report != "" { // a line of its own, to be copied
		fmt.Fprintf(f.w, "\n  cistern report %s\n", analyze.ShellWord(clean(r.Report)))
	} else if n := len(r.Recordings); n > 0 {
		f.wrap("  ", fmt.Sprintf("  Its recordings are not beside its summary: the newest is %s, of node %s.", clean(r.Recordings[n-1]), clean(r.Identity.Node)))
	}
}

func rankName(r *fleet.RankAnswer) string {
	name := "process " + number(r.Identity.PID)
	if r.Identity.Rank >= 0 {
		name = "rank " + fmt.Sprint(r.Identity.Rank)
	}
	where := []string{"node " + clean(r.Identity.Node)}
	for _, dim := range []string{"pp", "dp", "tp"} {
		if n, ok := r.Identity.Coordinates[dim]; ok {
			where = append(where, fmt.Sprintf("%s %d", dim, n))
		}
	}
	return name + " (" + strings.Join(where, ", ") + ")"
}

func (f *fleetText) findings() {
	fmt.Fprintln(f.w)
	if len(f.a.Findings) == 0 {
		fmt.Fprintln(f.w, "Nothing stands out: ranks that make the same requests need the same memory.")
		return
	}
	const most = 20
	for i, x := range f.a.Findings {
		if i == most {
			fmt.Fprintf(f.w, "- and %d more: --json has them\n", len(f.a.Findings)-most)
			break
		}
		f.wrap("  ", "- "+clean(x.Text))
	}
}

func (f *fleetText) need() {
	n := &f.a.Need
	if n.Recorded == 0 {
		return
	}
	gpu := func(gb int) string {
		if gb == 0 {
			return "more than a GPU has"
		}
		return fmt.Sprintf("a GPU of %d GB", gb)
	}
	fmt.Fprintln(f.w)
	f.wrap("  ", fmt.Sprintf("As recorded, the job needs %s (rank %d): %s. No allocator needs less than %s (rank %d): %s.", units.FormatBytes(n.Recorded), n.RecordedRank,
		gpu(n.RecordedGB), units.FormatBytes(n.Least), n.LeastRank, gpu(n.LeastGB)))
}

// gib is bytes in GiB, the unit of the columns.
func gib[T uint64 | int64](n T) string { return fmt.Sprintf("%.2f", float64(n)/(1<<30)) }

func (f *fleetText) ranks() {
	fmt.Fprintf(f.w, "\nRanks with least headroom, in GiB\n")
	g := grid{head: []string{"rank", "headroom", "used", "fragm.", "cached", "outside", "step", "group", "node"}, textFrom: 8, numberFirst: true,
		optional: []string{"step"}}
	for i := range f.a.Ranks[:min(len(f.a.Ranks), fleetRanks)] {
		r := &f.a.Ranks[i]
		g.add(fmt.Sprint(r.Identity.Rank), gib(r.Headroom), gib(r.Parts.Used), gib(r.Parts.Split), gib(r.Parts.Cached), gib(r.Parts.Outside), number(r.PeakStep),
			fmt.Sprint(r.Group+1), clean(r.Identity.Node))
	}
	g.write(f.w, f.s)
}

func (f *fleetText) groups() {
	if len(f.a.Groups) == 0 {
		return
	}
	what := "Groups of ranks with equal requests, in GiB"
	if f.a.Groups[0].Same == fleet.SameCounts {
		what = "Groups of ranks with as many requests in each step, of sizes of their own, in GiB"
	}
	fmt.Fprintf(f.w, "\n%s\n", what)
	g := grid{head: []string{"group", "ranks", "peak allocated", "least headroom", "most", "which"}, textFrom: 5, numberFirst: true}
	for i := range f.a.Groups {
		x := &f.a.Groups[i]
		if i == fleetGroups {
			break
		}
		which := fleet.RankWords(x.Ranks)
		if _, inside, ok := strings.Cut(which, " ("); ok {
			which = strings.TrimSuffix(inside, ")")
		}
		const most = 26
		if r := []rune(which); len(r) > most {
			which = string(r[:most-1]) + "…"
		}
		g.add(fmt.Sprint(i+1), number(len(x.Ranks)), gib(x.Peak), gib(x.Least), gib(x.Most), which)
	}
	g.write(f.w, f.s)
	if left := len(f.a.Groups) - fleetGroups; left > 0 {
		fmt.Fprintf(f.w, "and %s more: --json has them\n", plural(left, "group"))
	}
}

func (f *fleetText) tuning(t *fleet.Tuning) {
	replayed := 0
	for _, r := range t.Ranks {
		if len(r.Tried) > 0 {
			replayed++
		}
	}
	fmt.Fprintf(f.w, "\nSettings for all ranks, by replays of %s\n", plural(replayed, "rank"))
	for _, r := range t.Ranks {
		if r.Error != "" {
			f.wrap("    ", fmt.Sprintf("  rank %d: %s", r.Rank, clean(r.Error)))
		}
	}
	if len(t.Unrecorded) > 0 {
		f.wrap("    ", "  without a recording: "+fleet.RankWords(t.Unrecorded))
	}
	if replayed == 0 {
		return
	}
	const most = 6
	g := grid{head: []string{"lets through", "peak reserved", "smallest limit", "setting"}, textFrom: 3}
	for i := range t.Settings {
		x := &t.Settings[i]
		if i >= most && !x.Own && x.Policy != fleet.AllocatorCistern {
			continue
		}
		name := cmp.Or(x.AllocConf, "PyTorch's defaults")
		if x.Policy == fleet.AllocatorCistern {
			name = "Cistern"
		}
		if x.Own {
			name += " (as recorded)"
		}
		floor := ""
		if x.Floor > 0 {
			floor = units.FormatBytes(x.Floor)
		}
		g.add(fmt.Sprintf("%d of %d", x.Holds, x.Of), units.FormatBytes(x.Peak), floor, clean(name))
	}
	g.write(f.w, f.s)
	if best := t.Best("torch"); best != nil {
		f.wrap("  ", fmt.Sprintf("With %s all replayed ranks get through.", cmp.Or("PYTORCH_ALLOC_CONF="+clean(best.AllocConf), "PyTorch's defaults")))
	} else {
		fmt.Fprintln(f.w, "No setting of PyTorch's that was tried lets all replayed ranks through.")
	}
}
