package fleet

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// metric is one of Prometheus's, with its value for a device of a process; ok is false where there is none.
type metric struct {
	name, kind, help string
	of               func(s *Summary, d *Device) (value float64, ok bool)
}

// last is of the end of the last step.
func last(column func(s *Series) []uint64) func(*Summary, *Device) (float64, bool) {
	return func(_ *Summary, d *Device) (float64, bool) {
		c := column(&d.Series)
		if len(c) == 0 {
			return 0, false
		}
		return float64(c[len(c)-1]), true
	}
}

func always(of func(s *Summary, d *Device) float64) func(*Summary, *Device) (float64, bool) {
	return func(s *Summary, d *Device) (float64, bool) { return of(s, d), true }
}

var metrics = []metric{
	{"cistern_rank_allocated_bytes", "gauge", "Allocated by the program at the end of its last step.", last(func(s *Series) []uint64 { return s.Now })},
	{"cistern_rank_reserved_bytes", "gauge", "Reserved by the allocator, the most of its last steps.", last(func(s *Series) []uint64 { return s.Reserved })},
	{"cistern_rank_outside_bytes", "gauge", "In use on the GPU beside what the allocator has reserved, the most of its last steps.", last(func(s *Series) []uint64 { return s.Outside })},
	{"cistern_rank_peak_allocated_bytes", "gauge", "The most that was allocated.", always(func(_ *Summary, d *Device) float64 { return float64(d.PeakAllocated.Bytes) })},
	{"cistern_rank_peak_reserved_bytes", "gauge", "The most that was reserved.", always(func(_ *Summary, d *Device) float64 { return float64(d.PeakReserved.Bytes) })},
	{"cistern_rank_total_bytes", "gauge", "Memory of the GPU.", always(func(_ *Summary, d *Device) float64 { return float64(d.Total) })},
	{"cistern_rank_limit_bytes", "gauge", "Limit of the process, where it has one.", func(_ *Summary, d *Device) (float64, bool) { return float64(d.Limit), d.Limit > 0 }},
	{"cistern_rank_steps_total", "counter", "Steps of the program.", always(func(s *Summary, _ *Device) float64 { return float64(s.Steps) })},
	{"cistern_rank_retries_total", "counter", "How often cached memory was returned to meet a request.", always(func(_ *Summary, d *Device) float64 { return float64(d.Retries) })},
	{"cistern_rank_ooms_total", "counter", "Requests that failed.", always(func(_ *Summary, d *Device) float64 { return float64(d.OOMs) })},
	{"cistern_rank_updated_seconds", "gauge", "Time of the newest summary, in seconds since 1970.", always(func(s *Summary, _ *Device) float64 { return float64(s.UpdatedUS) / 1e6 })},
}

// WriteMetrics writes the newest state of the processes in a folder in Prometheus's text format: of those that have written their
// summary since a time, and have not ended.
func (f *Folder) WriteMetrics(w io.Writer, since time.Time) error {
	type row struct {
		labels string
		s      *Summary
		d      *Device
	}
	var rows []row
	at := map[string]int{}
	for _, s := range f.Summaries {
		if s.gone() || s.UpdatedUS < since.UnixMicro() {
			continue
		}
		for i := range s.Devices {
			r := row{labels(s, &s.Devices[i]), s, &s.Devices[i]}
			// Prometheus refuses a file that has two of one name, as of a process that became another program: the newest stays.
			if k, ok := at[r.labels]; !ok {
				at[r.labels] = len(rows)
				rows = append(rows, r)
			} else if rows[k].s.UpdatedUS < s.UpdatedUS {
				rows[k] = r
			}
		}
	}
	b := bufio.NewWriter(w)
	for i := range metrics {
		m := &metrics[i]
		head := fmt.Sprintf("# HELP %s %s\n# TYPE %s %s\n", m.name, m.help, m.name, m.kind)
		for _, r := range rows {
			if value, ok := m.of(r.s, r.d); ok {
				fmt.Fprintf(b, "%s%s{%s} %s\n", head, m.name, r.labels, strconv.FormatFloat(value, 'f', -1, 64))
				head = ""
			}
		}
	}
	return b.Flush()
}

var escapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// labels name a device of a process. No two processes that run have the same, as no two of a node have one number.
func labels(s *Summary, d *Device) string {
	id := s.Identity()
	var b strings.Builder
	for _, l := range [][2]string{{"job", id.Job}, {"rank", number(id.Rank)}, {"restart", strconv.Itoa(id.Restart)}, {"node", id.Node},
		{"pid", strconv.Itoa(id.PID)}, {"device", strconv.Itoa(d.Ordinal)}, {"uuid", d.UUID}} {
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(l[0] + `="` + escapes.Replace(strings.ToValidUTF8(l[1], "\uFFFD")) + `"`)
	}
	return b.String()
}

// number is empty for an unknown one, which Prometheus takes for a label that is not there.
func number(n int) string {
	if n < 0 {
		return ""
	}
	return strconv.Itoa(n)
}
