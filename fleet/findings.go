package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/units"
)

// find lists what stands out, the most important first.
func (a *Answer) find(f *Folder, job *Job, restarted map[int]int) {
	a.failed()
	a.standOut()
	a.differentRequests()
	a.imbalance()
	a.restarts(job, restarted)
	a.missing()
	a.endedEarly()
	a.clocks()
	a.identities()
	a.files(f, job)
}

func (a *Answer) add(x Finding) { a.Findings = append(a.Findings, x) }

// failed are ranks on which a request failed; the limiting one is the first line of the answer.
func (a *Answer) failed() {
	var numbers []int
	for i := range a.Ranks {
		if a.Ranks[i].OOMs > 0 {
			numbers = append(numbers, a.Ranks[i].Identity.Rank)
		}
	}
	if len(numbers) > 0 {
		slices.Sort(numbers)
		a.add(Finding{Kind: KindOutOfMemory, Ranks: numbers, Text: "requests failed on " + RankWords(numbers)})
	}
}

// standOut are ranks that need more than their twins, by the cause, and ranks that grow.
func (a *Answer) standOut() {
	words := map[string]string{CauseFragmentation: "free in segments in use", CauseCached: "cached", CauseOutside: "outside the allocator"}
	for _, cause := range []string{CauseFragmentation, CauseOutside, CauseCached} {
		for _, r := range a.ranks {
			i := slices.IndexFunc(partNames, func(name string) bool { return name == cause })
			own := r.Parts.list()[i].bytes
			usual := median(a.twins[r], func(t *Rank) uint64 { return t.Parts.list()[i].bytes })
			if more := int64(own) - int64(usual); more >= 2*significant(r.Device.Total) && len(a.twins[r]) > 0 {
				a.add(Finding{Kind: cause, Ranks: []int{r.ID.Rank}, Node: r.ID.Node, Bytes: more, Step: r.Device.PeakReserved.Step,
					Text: fmt.Sprintf("rank %d: %s %s, %s more than its twins", r.ID.Rank, size(own), words[cause], size(uint64(more)))})
			}
		}
	}
	a.growing()
	for _, r := range a.ranks {
		own := r.Device.PeakAllocated.Bytes
		usual := median(a.twins[r], func(t *Rank) uint64 { return t.Device.PeakAllocated.Bytes })
		more := int64(own) - int64(usual)
		if r.Growth > 0 || max(more, -more) < significant(r.Device.Total) || len(a.twins[r]) == 0 || a.alone(r) {
			continue
		}
		word := "more"
		if more < 0 {
			word = "less"
		}
		a.add(Finding{Kind: KindTwin, Ranks: []int{r.ID.Rank}, Bytes: more, Step: r.Device.PeakAllocated.Step,
			Text: fmt.Sprintf("rank %d: a peak of %s allocated, %s %s than its twins", r.ID.Rank, size(own), size(uint64(max(more, -more))), word)})
	}
}

// alone reports whether a rank makes other requests than all others, so that it needs other memory.
func (a *Answer) alone(r *Rank) bool { return len(a.groups[r.group].Ranks) == 1 && len(a.groups) > 1 }

var partNames = []string{CauseUsed, CauseFragmentation, CauseCached, CauseOutside}

// growing are ranks whose memory grows step by step; where all do, one finding says so.
func (a *Answer) growing() {
	var all []*Rank
	for _, r := range a.ranks {
		if r.Growth > 0 {
			all = append(all, r)
		}
	}
	if len(all) > 8 {
		var numbers []int
		for _, r := range all {
			numbers = append(numbers, r.ID.Rank)
		}
		slices.Sort(numbers)
		usual := median(all, func(r *Rank) uint64 { return uint64(r.Growth) })
		a.add(Finding{Kind: CauseGrowth, Ranks: numbers, Bytes: int64(usual), Text: fmt.Sprintf("%s: allocated memory grows by %s a step (the median)", RankWords(numbers), size(usual))})
		return
	}
	for _, r := range all {
		text := fmt.Sprintf("rank %d: allocated memory grows by %s a step", r.ID.Rank, size(uint64(r.Growth)))
		if r.Headroom > 0 {
			text += fmt.Sprintf("; the headroom lasts for some %s more steps", rounded(float64(r.Headroom)/r.Growth))
		}
		a.add(Finding{Kind: CauseGrowth, Ranks: []int{r.ID.Rank}, Node: r.ID.Node, Bytes: int64(r.Growth), Text: text})
	}
}

// differentRequests are ranks whose requests differ from those of most of their twins.
func (a *Answer) differentRequests() {
	type deviation struct {
		step int64
		of   int
	}
	by := map[deviation][]int{}
	for _, r := range a.ranks {
		twins := a.twins[r]
		if len(r.ID.Coordinates) == 0 {
			twins = a.ranks
		}
		count := map[int]int{}
		for _, t := range twins {
			count[t.group]++
		}
		usual, most := r.group, 0
		for _, g := range slices.Sorted(maps.Keys(count)) {
			if count[g] > most {
				usual, most = g, count[g]
			}
		}
		if usual != r.group && 2*most > len(twins) {
			d := deviation{firstDifference(&r.Device.Series, &a.groups[usual].Ranks[0].Device.Series), usual}
			by[d] = append(by[d], r.ID.Rank)
		}
	}
	for _, d := range slices.SortedFunc(maps.Keys(by), func(x, y deviation) int { return cmp.Or(cmp.Compare(x.step, y.step), cmp.Compare(x.of, y.of)) }) {
		numbers := by[d]
		a.add(Finding{Kind: KindRequests, Ranks: numbers, Step: d.step,
			Text: fmt.Sprintf("%s: other requests than twins, from step %d on", RankWords(numbers), d.step)})
	}
}

// firstDifference is the last step of the first row in which two series differ.
func firstDifference(a, b *Series) int64 {
	for i := range min(a.Len(), b.Len()) {
		x, y := a.Row(i), b.Row(i)
		if x.Step != y.Step || sequences(&x) != sequences(&y) {
			return x.Step
		}
	}
	return int64(min(a.Len(), b.Len()))
}

func (a *Answer) imbalance() {
	if len(a.Stages) == 0 {
		return
	}
	low := slices.MinFunc(a.Stages, func(x, y Stage) int { return cmp.Compare(x.Peak, y.Peak) })
	high := slices.MaxFunc(a.Stages, func(x, y Stage) int { return cmp.Compare(x.Peak, y.Peak) })
	if more := high.Peak - low.Peak; more > high.Peak/20 {
		a.add(Finding{Kind: KindImbalance, Bytes: int64(more), Text: fmt.Sprintf("pipeline stage %d peaks at %s allocated, stage %d at %s: %s less", high.Stage,
			size(high.Peak), low.Stage, size(low.Peak), size(more))})
	}
}

func (a *Answer) restarts(job *Job, restarted map[int]int) {
	if len(restarted) == 0 {
		return
	}
	most := 0
	for _, n := range restarted {
		most = max(most, n)
	}
	numbers := slices.Sorted(maps.Keys(restarted))
	text := fmt.Sprintf("%s restarted, up to %s; the newest attempt is shown", RankWords(numbers), times(most))
	if why := earlier(job); why != "" {
		text += "; before, " + why
	}
	a.add(Finding{Kind: KindRestarted, Ranks: numbers, Text: text})
}

// earlier is how ranks failed in the attempt before the newest one, as their launcher says.
func earlier(job *Job) string {
	newest, before := [2]int{}, [2]int{-1, -1}
	for _, p := range job.processes {
		if a := p.attempt(); compareAttempts(a, newest) > 0 {
			newest = a
		}
	}
	for _, p := range job.processes {
		if a := p.attempt(); compareAttempts(a, newest) < 0 && compareAttempts(a, before) > 0 {
			before = a
		}
	}
	status := map[int]int{}
	for _, p := range job.processes {
		if p.attempt() == before {
			status[p.id.Rank] = p.s.Status
		}
	}
	_, text := howFailed(status)
	return text
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

func (a *Answer) missing() {
	present := map[int]bool{}
	for _, r := range a.ranks {
		present[r.ID.Rank] = true
	}
	var numbers []int
	for n := range min(a.World, 1<<20) {
		if !present[n] {
			numbers = append(numbers, n)
		}
	}
	if len(numbers) > 0 {
		a.add(Finding{Kind: KindMissing, Ranks: numbers, Text: fmt.Sprintf("no summary of %s of %d", RankWords(numbers), a.World)})
	}
}

// lostAfter is how much older the summary of a rank may be than that of others: a process writes one every five minutes.
const lostAfter = 15 * time.Minute

// endedEarly are processes that wrote no last summary though others did; of a job that goes on, those that stopped writing.
func (a *Answer) endedEarly() {
	ended, newest := false, int64(0)
	for _, r := range a.ranks {
		ended = ended || r.Summary.gone()
		newest = max(newest, r.Summary.UpdatedUS)
	}
	var killed []*Rank
	for _, r := range a.ranks {
		if r.Summary.Ended == EndNone && (ended || newest-r.Summary.UpdatedUS > lostAfter.Microseconds()) {
			killed = append(killed, r)
		}
	}
	if a.failedFirst(killed) || len(killed) == 0 {
		return
	}
	var numbers []int
	first := killed[0]
	for _, r := range killed {
		numbers = append(numbers, r.ID.Rank)
		if r.Summary.Steps < first.Summary.Steps {
			first = r
		}
	}
	text := RankWords(numbers) + " ended without a last summary: killed, or lost"
	x := Finding{Kind: KindEnded, Ranks: numbers}
	if first.Summary.Steps < a.Steps {
		x.Step = first.Summary.Steps
		text += fmt.Sprintf("; rank %d first, after step %d or later", first.ID.Rank, x.Step)
	}
	x.Text = text
	a.add(x)
}

// failedFirst is of ranks of which their launcher says how they failed. It reports whether there are some.
func (a *Answer) failedFirst(killed []*Rank) bool {
	status, short := map[int]int{}, false
	for _, r := range a.ranks {
		status[r.ID.Rank] = r.Summary.Status
		short = short || r.Summary.Status > 0 && r.Device.OOMs > 0
	}
	for _, r := range a.ranks { // ranks that lose another one end with a status as well
		if short && r.Summary.Status > 0 && r.Device.OOMs == 0 {
			delete(status, r.ID.Rank)
		}
	}
	first, text := howFailed(status)
	if len(first) == 0 {
		return false
	}
	x := Finding{Kind: KindEnded, Ranks: first}
	rest := numbersOf(killed)
	for _, r := range a.ranks {
		switch {
		case !slices.Contains(first, r.ID.Rank):
			if r.Summary.Status != 0 {
				rest = append(rest, r.ID.Rank)
			}
		case x.Step == 0 || r.Summary.Steps < x.Step:
			x.Step = r.Summary.Steps
		}
	}
	x.Text = text
	if x.Step > 0 {
		x.Text += fmt.Sprintf(" after step %d or later", x.Step)
	}
	slices.Sort(rest)
	if rest = slices.DeleteFunc(slices.Compact(rest), func(n int) bool { return slices.Contains(first, n) }); len(rest) > 0 {
		x.Text += "; " + RankWords(rest) + " ended with it"
	}
	a.add(x)
	return true
}

// howFailed is the ranks that failed first, and words for it, of the status of each: those that a signal ended took others with them.
func howFailed(status map[int]int) (first []int, text string) {
	by, lowest := map[int][]int{}, 0
	for rank, n := range status {
		if n != 0 {
			by[n] = append(by[n], rank)
			lowest = min(lowest, n)
		}
	}
	var words []string
	for _, n := range slices.Sorted(maps.Keys(by)) {
		if n < 0 || lowest == 0 {
			slices.Sort(by[n])
			first = append(first, by[n]...)
			words = append(words, RankWords(by[n])+" "+statusWords(n))
		}
	}
	slices.Sort(first)
	return first, strings.Join(words, ", ")
}

func numbersOf(ranks []*Rank) []int {
	var numbers []int
	for _, r := range ranks {
		numbers = append(numbers, r.ID.Rank)
	}
	slices.Sort(numbers)
	return numbers
}

// signals of Linux that end processes against their will.
var signals = map[int]string{4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}

func statusWords(status int) string {
	switch name := signals[-status]; {
	case status > 0:
		return fmt.Sprintf("ended with status %d", status)
	case status == -9:
		return "was killed by SIGKILL (as the kernel does where host memory runs out)"
	case name != "":
		return "was killed by " + name
	default:
		return fmt.Sprintf("was killed by signal %d", -status)
	}
}

// clockLeast is from where on clocks differ. Ranks of a job that wait for each other end a step at about one time.
const clockLeast = 5 * time.Second

// clocks are nodes whose clock is off: their steps end at other times than those of most ranks.
func (a *Answer) clocks() {
	usual := map[int64]int64{} // the median of the ends of a step
	at := map[int64][]int64{}
	for _, r := range a.ranks {
		s := &r.Device.Series
		for i := range s.Len() {
			at[s.Step[i]] = append(at[s.Step[i]], s.TimeUS[i])
		}
	}
	for step, list := range at {
		if len(list) > len(a.ranks)/2 && len(list) > 1 {
			slices.Sort(list)
			usual[step] = list[(len(list)-1)/2]
		}
	}
	off := map[string][]int64{}
	for _, r := range a.ranks {
		var list []int64
		for i, step := range r.Device.Series.Step {
			if u, ok := usual[step]; ok {
				list = append(list, r.Device.Series.TimeUS[i]-u)
			}
		}
		if len(list) > 0 {
			slices.Sort(list)
			off[r.ID.Node] = append(off[r.ID.Node], list[(len(list)-1)/2])
		}
	}
	for _, node := range slices.Sorted(maps.Keys(off)) {
		list := off[node]
		slices.Sort(list)
		d := time.Duration(list[(len(list)-1)/2]) * time.Microsecond
		if d < clockLeast && d > -clockLeast {
			continue
		}
		word := "ahead"
		if d < 0 {
			word = "behind"
		}
		a.add(Finding{Kind: KindClock, Node: node, Text: fmt.Sprintf("the clock of node %s is %s %s, or its ranks do not wait for the others", node, d.Abs().Round(time.Second), word)})
	}
}

func (a *Answer) identities() {
	by := map[string][]int{}
	for _, r := range a.ranks {
		for _, d := range r.ID.Disagreements {
			by[d] = append(by[d], r.ID.Rank)
		}
	}
	for _, d := range slices.Sorted(maps.Keys(by)) {
		slices.Sort(by[d])
		a.add(Finding{Kind: KindIdentity, Ranks: by[d], Text: RankWords(by[d]) + ": " + d})
		if len(by) > 8 {
			break // each rank says something else
		}
	}
}

// files are those that are no part of the answer.
func (a *Answer) files(f *Folder, job *Job) {
	if n := len(f.Truncated); n > 0 {
		a.add(Finding{Kind: KindTruncated, Files: f.Truncated, Text: fmt.Sprintf("%s truncated: %s", filesAre(n), some(f.Truncated))})
	}
	if n := len(f.Bad); n > 0 {
		a.add(Finding{Kind: KindUnreadable, Files: f.Bad, Text: fmt.Sprintf("%s not readable: %s", filesAre(n), f.Bad[0])})
	}
	var names, paths []string
	for _, j := range f.Jobs() {
		if j.Name != job.Name {
			names = append(names, fmt.Sprintf("%s (%d)", cmp.Or(j.Name, "without a name"), len(j.processes)))
			for _, p := range j.processes {
				paths = append(paths, p.s.Path)
			}
		}
	}
	if len(names) > 0 {
		a.add(Finding{Kind: KindOtherJob, Files: paths, Text: fmt.Sprintf("%s of other jobs: %s; --job chooses one", filesAre(len(paths)), some(names))})
	}
}

func filesAre(n int) string {
	if n == 1 {
		return "1 summary is"
	}
	return fmt.Sprintf("%d summaries are", n)
}

func some(list []string) string {
	const most = 3
	var names []string
	for _, name := range list[:min(len(list), most)] {
		names = append(names, filepath.Base(name))
	}
	if len(list) > most {
		names = append(names, fmt.Sprintf("and %d more", len(list)-most))
	}
	return strings.Join(names, ", ")
}

// RankWords is a list of ranks in words, with ranges: "ranks 3, 5 to 8".
func RankWords(numbers []int) string {
	var parts []string
	for i := 0; i < len(numbers); {
		k := i
		for k+1 < len(numbers) && numbers[k+1] == numbers[k]+1 {
			k++
		}
		switch {
		case k > i+1:
			parts = append(parts, fmt.Sprintf("%d to %d", numbers[i], numbers[k]))
		default:
			for _, n := range numbers[i : k+1] {
				parts = append(parts, fmt.Sprint(n))
			}
		}
		i = k + 1
	}
	const most = 8
	if len(parts) > most {
		parts = append(parts[:most], "…")
	}
	if len(numbers) == 1 {
		return "rank " + parts[0]
	}
	return fmt.Sprintf("%d ranks (%s)", len(numbers), strings.Join(parts, ", "))
}

// rounded is a number with two digits that count.
func rounded(n float64) string {
	scale := int64(1)
	for n/float64(scale) >= 100 {
		scale *= 10
	}
	r := int64(n/float64(scale)+0.5) * scale
	text := fmt.Sprint(r)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

func size(bytes uint64) string { return units.FormatBytes(bytes) }
